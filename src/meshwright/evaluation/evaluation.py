"""Loss, perplexity and bits per byte of a checkpoint on held-out text, each token counted once."""

from __future__ import annotations

import itertools
import math
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.checkpoint import find_checkpoint
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.data import PackedDataset, PackedExamples, PreparedData, TokenBatch, measure_xz_bits_per_byte, prepare
from meshwright.errors import UserError
from meshwright.kernels.choice import prepare_kernels
from meshwright.launcher.device import choose_single_device
from meshwright.layout import Layout
from meshwright.model.loss import IGNORED
from meshwright.recipe import DataRecipe, load_recipe
from meshwright.serving.engine import Engine
from meshwright.serving.offline import build_offline_engine, run_requests
from meshwright.serving.request import Request
from meshwright.serving.sampling import Sampling
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_from_path
from meshwright.spec.refuse import serving_layout
from meshwright.threads import choose_threads
from meshwright.untrusted import read_file

MAX_ROW_TOKENS = 2048  # default context length of text, in tokens
TOKENS_PER_BATCH = 1 << 14


def run_evaluation(
    checkpoint: os.PathLike[str] | str,
    data: str,
    *,
    sequence: int | None = None,
    with_xz: bool = True,
    device: str = "auto",
    layout: str | None = None,
    overrides: Sequence[str] = (),
    check_hashes: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Compute loss, perplexity and bits per byte of a checkpoint on held-out text; return the JSON document of
    `meshwright evaluate --json`.

    checkpoint: run directory, checkpoint, or Hugging Face directory. data: recipe (its validation split is used) or
    data source (all its text is used). sequence: context length in tokens (None: the recipe's or the model's). with_xz:
    also compress the text with `xz -9`. device: "auto", "cpu" or "cuda". layout: such as "dp2 tp2", of CPU ranks (None:
    one device). overrides: "table.key=value" for the recipe. check_hashes: verify the model's SHA-256. progress: called
    with (rows done, all rows), where a row is a token sequence packed with documents; on one device only. log: called
    with each line for the user.

    Result keys: loss (nats per token), perplexity, bits_per_byte (None for SFT or preference records, of which only the
    responses count), tokens, bytes, documents, sequence, data, checkpoint; for text also lossy_documents (number of
    documents that encoding and decoding changes; bits per byte then miss the lost text) and, with_xz, xz_bits_per_byte.
    Documents have the same start and end tokens as in training; attention does not cross documents or packed rows.
    """
    device = choose_single_device(device)
    directory = find_checkpoint(checkpoint, log, check_hashes=check_hashes)
    config = config_from_path(directory)
    reading = Layout() if layout is None else serving_layout(layout, config)
    prepared, tokens = prepare_held_out(directory, config, data, sequence, log, overrides)
    if reading.world_size == 1:
        nats, count = _evaluate_on_device(directory, tokens, device, progress)
    else:
        with LocalRanks(reading.world_size, threads=choose_threads(reading.world_size)) as ranks:
            kernels, _ = prepare_kernels("float32", reading, log)
            given = str(directory), str(reading), data, tokens.sequence, tuple(overrides), kernels
            shares = ranks.run(_evaluate_on_rank, *given, timeout=24 * 3600.0)
            nats, count = math.fsum(share[0] for share in shares), sum(share[1] for share in shares)
    result: dict[str, Any] = {
        "loss": nats / count,
        "perplexity": math.exp(min(nats / count, 700.0)),
        "bits_per_byte": None,
        "tokens": count,
        "bytes": tokens.bytes,
        "documents": tokens.documents,
        "sequence": tokens.sequence,
        "data": data,
        "checkpoint": str(directory),
    }
    if isinstance(tokens, PackedExamples):  # only response tokens count, so there are no bits per byte
        return result
    result |= {"bits_per_byte": nats / math.log(2) / tokens.bytes, "lossy_documents": _count_lossy(prepared, tokens)}
    if with_xz:
        result["xz_bits_per_byte"] = measure_xz_bits_per_byte(tokens.iterate_texts())
    return result


def _evaluate_on_device(
    directory: Path, tokens: PackedDataset, device: str, progress: Callable[[int, int], None]
) -> tuple[float, int]:
    """Evaluate the model in `directory` on one device; return (sum of token losses in nats, number of target tokens).

    tokens: the data, as packed rows: a row is a sequence that is filled with documents. device: "cpu" or "cuda".
    progress: called with (rows done, number of all rows).
    """
    engine = build_offline_engine(directory, Mesh.single(device=device), "float32", scoring=True)
    batches = tokens.iterate_batches(_choose_rows_per_batch(tokens))
    return _sum_losses(engine, batches, lambda done: progress(done, tokens.rows))


def _evaluate_on_rank(
    directory: str, layout: str, data: str, sequence: int, overrides: Sequence[str], instruction_set: str | None
) -> tuple[float, int]:
    """Evaluate the model on this data-parallel replica's share of the data; every rank of the layout calls this
    function. Return (sum of token losses in nats, number of target tokens) on the first rank of each replica, (0, 0) on
    its other ranks.

    directory: path of the model. layout: such as "dp2 tp2". data: path of a recipe or data source. sequence: context
    length in tokens. overrides: "table.key=value" for the recipe. instruction_set: instruction set of the CPU kernels,
    such as "avx2", equal on all ranks; None: the fastest.
    """
    mesh = Mesh.create(Layout.parse(layout))
    engine = build_offline_engine(Path(directory), mesh, "float32", scoring=True, instruction_set=instruction_set)
    config = config_from_path(directory)
    _, tokens = prepare_held_out(Path(directory), config, data, sequence, lambda line: None, overrides)
    batches = tokens.iterate_batches(_choose_rows_per_batch(tokens))
    nats, count = _sum_losses(engine, itertools.islice(batches, mesh.dp.rank, None, mesh.dp.size))
    mesh.close()
    return (nats, count) if mesh.tp.rank == mesh.pp.rank == 0 else (0.0, 0)


def _sum_losses(
    engine: Engine, batches: Iterable[TokenBatch], progress: Callable[[int], None] = lambda done: None
) -> tuple[float, int]:
    """Score `batches` with the inference engine: return (sum of the losses of all target tokens in nats, number of
    target tokens). A document is a prompt without generation, and the loss of a token its negative log-probability
    (`prompt_logprobs`). progress: called after each batch with the number of rows done.
    """
    losses, rows = array("d"), 0
    for batch in batches:
        requests, counted = _build_requests(batch)
        for output in run_requests(engine, requests):
            scored = output.prompt_results or []
            for result in (scored[place] for place in counted[output.request_id] if scored):
                assert result is not None and result.logprob is not None
                losses.append(-result.logprob)
        rows += len(batch.tokens)
        progress(rows)
    return math.fsum(losses), len(losses)


def _build_requests(batch: TokenBatch) -> tuple[list[Request], dict[str, list[int]]]:
    """Build one scoring request (nothing is generated) for each document in the batch's rows, except documents without
    target tokens. Return (requests, {request ID: positions of the target tokens in the request's prompt}). A prompt is
    the document up to and including its last target token."""
    requests: list[Request] = []
    counted: dict[str, list[int]] = {}
    sampling = Sampling(max_tokens=0, prompt_logprobs=0)
    for row, begins in enumerate(batch.list_document_starts()):
        for begin, end in itertools.pairwise([*begins.tolist(), batch.tokens.shape[1]]):
            targets = batch.targets[row, begin:end]
            places = np.flatnonzero(targets != IGNORED)
            if not len(places):
                continue
            last = int(places[-1]) + 1
            part = (*batch.tokens[row, begin : begin + last].tolist(), int(targets[last - 1]))
            requests.append(Request(f"{row}-{begin}", part, sampling))
            counted[requests[-1].id] = (places + 1).tolist()
    return requests, counted


def _choose_rows_per_batch(tokens: PackedDataset) -> int:
    """Return the number of packed rows (sequences filled with documents) per batch, such that a batch has at most
    16,384 tokens, but at least one row. tokens: the data, which give the length of a row."""
    return max(1, TOKENS_PER_BATCH // tokens.sequence)


def prepare_held_out(
    checkpoint: Path,
    config: ModelConfig,
    data: str,
    sequence: int | None,
    log: Callable[[str], None],
    overrides: Sequence[str] = (),
) -> tuple[PreparedData, PackedDataset]:
    """Tokenize and pack the evaluation data with the checkpoint's tokenizer; return (prepared data, split to evaluate).

    checkpoint: model directory. config: configuration of the model. data: recipe (its validation split is used) or data
    source (all its text is used). sequence: context length in tokens (None: the recipe's or the model's). log: called
    with each line for the user. overrides: "table.key=value" for the recipe. Raises `UserError` if the tokenizer or the
    validation split is missing, or if the tokenizer has more tokens than the model's vocabulary.
    """
    if not (checkpoint / "tokenizer.json").is_file():
        raise UserError(f"{checkpoint} has no tokenizer.json, which is needed to tokenize text")
    from_recipe = data.endswith(".toml")
    if from_recipe:
        recipe = load_recipe(data, overrides)
        part, split, seed = recipe.data, "validation", recipe.run.seed
        if not part.validation_fraction:
            raise UserError(f"{data}: data.validation_fraction is 0: there is no held-out data to evaluate on")
    else:
        # With `sequence=1` even a text that is shorter than a row is prepared; rows are resized below.
        part = DataRecipe(source=data, tokenizer=str(checkpoint), sequence=1, validation_fraction=0.0)
        split, seed = "train", 0
    default = part.sequence if from_recipe else MAX_ROW_TOKENS
    length = min(sequence or default, config.max_positions)
    if part.records != "text":  # rows of examples are packed for their length
        part = part.model_copy(update={"sequence": length})
    prepared = prepare(part, seed, log=log, keep_text=not from_recipe)
    if read_file(prepared.tokenizer_directory / "tokenizer.json") != read_file(checkpoint / "tokenizer.json"):
        part = part.model_copy(update={"tokenizer": str(checkpoint)})
        prepared = prepare(part, seed, log=log, keep_text=not from_recipe)
    if prepared.vocabulary > config.vocabulary:
        raise UserError(
            f"{checkpoint}: the tokenizer has {prepared.vocabulary} tokens, the model only {config.vocabulary}"
        )
    tokens = prepared.split(split)
    tokens.sequence, tokens.document_mask = length, True
    for line in prepared.format_packing_lines([split]):
        log(line)
    return prepared, tokens


def _count_lossy(prepared: PreparedData, tokens: PackedDataset) -> int:
    """Return the number of documents whose text changes when it is encoded to tokens and decoded again. prepared:
    prepared data with the tokenizer. tokens: the evaluated split, whose original texts are read."""
    tokenizer, lossy = prepared.tokenizer, 0
    for texts in _batch_texts(tokens.iterate_texts(), 256):
        encoded = tokenizer.encode(texts)
        lossy += sum(tokenizer.decode(ids) != text for ids, text in zip(encoded, texts, strict=True))
    return lossy


def _batch_texts(texts: Iterator[str], size: int) -> Iterator[list[str]]:
    """Yield the texts of an iterator in lists of `size` texts; the last list may be shorter."""
    while batch := list(itertools.islice(texts, size)):
        yield batch
