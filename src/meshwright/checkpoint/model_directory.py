"""Writes an unsharded model as a Hugging Face directory, of the files that a checkpoint of it has."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from meshwright.checkpoint.contents import TOKENIZER_FILES, make_small_files
from meshwright.checkpoint.files import replace_file
from meshwright.checkpoint.model_files import INDEX, SHARD_BYTES, plan_model_files
from meshwright.model.encoder import Encoder
from meshwright.model.initialise import extract_entry
from meshwright.model.transformer import Transformer
from meshwright.spec.parameters import parameter_table

# Includes the files from which a tokenizer is built if there is no tokenizer.json.
ALL_TOKENIZER_FILES = (*TOKENIZER_FILES, "vocab.json", "merges.txt", "tokenizer.model")


def save_huggingface(
    model: Transformer | Encoder,
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer_from: str | Path | None = None,
    largest_file_bytes: int = SHARD_BYTES,
) -> None:
    """Save an unsharded model as a Hugging Face directory that transformers can load. Each file is replaced atomically.

    dtype: dtype of the weights on disk; None: the model's dtype. tokenizer_from: directory whose tokenizer files are
    copied; None: no tokenizer. largest_file_bytes: maximum tensor bytes per file; a larger model gets several files and
    an index.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    parameters = dict(model.named_parameters())
    dtype = dtype or model.embedding.weight.dtype
    name = str(dtype).removeprefix("torch.")
    planned = plan_model_files(parameter_table(model.config), name, largest_file_bytes)
    for file in planned.sizes:
        held: dict[str, list[torch.Tensor]] = {}  # by tensor: one entry, or those of all experts in order
        for entry in (place.entry for place in planned.places.values() if place.file == file):
            value = extract_entry(parameters[entry.tensor].detach(), entry)
            held.setdefault(entry.disk_name, []).append(value[None] if entry.stacked else value)
        # Copied, because save_file rejects tensors that share memory, such as the parts of a fused tensor.
        tensors = {name: torch.cat(parts).to("cpu", dtype, copy=True).contiguous() for name, parts in held.items()}
        save_file(tensors, directory / f".{file}", {"format": "pt"})
        os.replace(directory / f".{file}", directory / file)
    source = None if tokenizer_from is None else Path(tokenizer_from)
    small = make_small_files(model.config, name, source, ALL_TOKENIZER_FILES)
    for file, content in (small | ({} if planned.index is None else {INDEX: planned.index})).items():
        replace_file(directory / file, content, sync=False)
