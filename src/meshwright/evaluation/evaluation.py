"""Loss, perplexity and bits per byte of a checkpoint on held-out text, each token counted once."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint import find_checkpoint
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.data import PackedDataset, PackedExamples, PreparedData, TokenBatch, measure_xz_bits_per_byte, prepare
from meshwright.errors import UserError
from meshwright.launcher.device import one_device
from meshwright.layout import Layout
from meshwright.model.documents import Documents
from meshwright.model.huggingface import load_huggingface
from meshwright.parallel.inference import SplitModel, parse_inference_layout
from meshwright.parallel.stage_compute import MicroBatch
from meshwright.recipe import DataRecipe, load_recipe
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_from_path
from meshwright.threads import choose_threads
from meshwright.untrusted import read_file

LONGEST_ROW = 2048  # tokens of context where neither recipe nor model says less
TOKENS_AT_ONCE = 4096


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
    """Compute loss, perplexity and bits per byte of a checkpoint on text; return the document of `meshwright evaluate
    --json`.

    Arguments as in `meshwright.evaluate`; overrides as on the command line. Documents have the same start and end
    tokens as in training, so that every byte is predicted; attention stays within a row. For records only the responses
    count and `bits_per_byte` is None. `lossy_documents`: documents that do not survive encoding and decoding; the bits
    per byte miss the lost text, so they do not compare with other models.
    """
    device = one_device(device)
    directory = find_checkpoint(checkpoint, log, check_hashes=check_hashes)
    config = config_from_path(directory)
    reading = None if layout is None else parse_inference_layout(layout, config)
    prepared, tokens = held_out(directory, config, data, sequence, log, overrides)
    if reading is None:
        nats, count = _evaluate_on_device(directory, tokens, device, progress)
    else:
        with LocalRanks(reading.world_size, threads=choose_threads(reading.world_size)) as ranks:
            given = str(directory), str(reading), data, tokens.sequence, tuple(overrides)
            nats, count = ranks.run(_evaluate_on_rank, *given, timeout=24 * 3600.0)[0]
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
    if isinstance(tokens, PackedExamples):  # of which only the responses count, and not all of their bytes
        return result
    result |= {"bits_per_byte": nats / math.log(2) / tokens.bytes, "lossy_documents": _count_lossy(prepared, tokens)}
    if with_xz:
        result["xz_bits_per_byte"] = measure_xz_bits_per_byte(tokens.iterate_texts())
    return result


def _evaluate_on_device(
    directory: Path, tokens: PackedDataset, device: str, progress: Callable[[int, int], None]
) -> tuple[float, int]:
    """Return (sum of token losses in nats, number of target tokens) on one device. progress: called with (rows done,
    all)."""
    model, _ = load_huggingface(directory, torch.float32, device)
    nats, count, done = 0.0, 0, 0
    with torch.no_grad():
        for batch in tokens.iterate_batches(_rows_per_batch(tokens)):
            nats += float(model(*(part.to(device) for part in _micro_batch(batch))))
            count += batch.target_tokens
            done += len(batch.tokens)
            progress(done, tokens.rows)
    return nats, count


def _evaluate_on_rank(
    directory: str, layout: str, data: str, sequence: int, overrides: Sequence[str]
) -> tuple[float, int]:
    """Return (sum of token losses in nats, number of target tokens), as one of several ranks among which the model is
    split."""
    mesh = Mesh.create(Layout.parse(layout))
    split = SplitModel(Path(directory), mesh)
    _, tokens = held_out(Path(directory), split.config, data, sequence, lambda line: None, overrides)
    nats, count = 0.0, 0
    under_way: list[MicroBatch] = []
    for number, batch in enumerate(tokens.iterate_batches(_rows_per_batch(tokens)), start=1):
        under_way.append(_micro_batch(batch))
        count += batch.target_tokens
        if number % mesh.pp.size == 0:
            nats += split.losses(under_way)
            under_way.clear()
    nats += split.losses(under_way)
    mesh.close()
    return nats, count


def _rows_per_batch(tokens: PackedDataset) -> int:
    """Return the number of rows per batch, about `TOKENS_AT_ONCE` tokens."""
    return max(1, TOKENS_AT_ONCE // tokens.sequence)


def _micro_batch(batch: TokenBatch) -> MicroBatch:
    """Return the batch as torch tensors (tokens [B, S], targets [B, S]) and its document boundaries."""
    tokens_BS, targets_BS = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
    return tokens_BS, targets_BS, Documents.from_ids(batch.document_ids)


def held_out(
    checkpoint: Path,
    config: ModelConfig,
    data: str,
    sequence: int | None,
    log: Callable[[str], None],
    overrides: Sequence[str] = (),
) -> tuple[PreparedData, PackedDataset]:
    """Return (prepared data, the split to evaluate), tokenized with the checkpoint's own tokenizer. `data`: recipe or
    source; `sequence`: tokens of context; `overrides`: of the recipe, if `data` is one."""
    if not (checkpoint / "tokenizer.json").is_file():
        raise UserError(f"{checkpoint} has no tokenizer.json: text cannot become its tokens")
    from_recipe = data.endswith(".toml")
    if from_recipe:
        recipe = load_recipe(data, overrides)
        part, split, seed = recipe.data, "validation", recipe.run.seed
        if not part.validation_fraction:
            raise UserError(f"{data}: data.validation_fraction is 0: there is nothing held out to evaluate on")
    else:
        # A text too short for one full row is still a text: the row is as long as it must be.
        part = DataRecipe(source=data, tokenizer=str(checkpoint), sequence=1, validation_fraction=0.0)
        split, seed = "train", 0
    default = part.sequence if from_recipe else LONGEST_ROW
    length = min(sequence or default, config.max_positions)
    if part.records != "text":  # whose rows depend on it
        part = part.model_copy(update={"sequence": length})
    prepared = prepare(part, seed, log=log, keep_text=not from_recipe)
    if read_file(prepared.tokenizer_directory / "tokenizer.json") != read_file(checkpoint / "tokenizer.json"):
        part = part.model_copy(update={"tokenizer": str(checkpoint)})
        prepared = prepare(part, seed, log=log, keep_text=not from_recipe)
    if prepared.vocabulary > config.vocabulary:
        raise UserError(
            f"{checkpoint}: its tokenizer has {prepared.vocabulary} tokens, its model only {config.vocabulary}"
        )
    tokens = prepared.split(split)
    tokens.sequence, tokens.document_mask = length, True
    for line in prepared.format_packing_lines([split]):
        log(line)
    return prepared, tokens


def _count_lossy(prepared: PreparedData, tokens: PackedDataset) -> int:
    """Return the number of documents that differ from their decoded tokens."""
    tokenizer, lossy = prepared.tokenizer, 0
    for texts in _iterate_batches(tokens.iterate_texts(), 256):
        encoded = tokenizer.encode(texts)
        lossy += sum(tokenizer.decode(ids) != text for ids, text in zip(encoded, texts, strict=True))
    return lossy


def _iterate_batches(texts: Iterator[str], size: int) -> Iterator[list[str]]:
    """Yield lists of `size` consecutive texts; the last may be shorter."""
    while batch := list(itertools.islice(texts, size)):
        yield batch
