"""PEFT directories: `adapter_config.json` and `adapter_model.safetensors`, read for a model's configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from meshwright.errors import UserError
from meshwright.model.checkpoint_files import CheckpointFiles
from meshwright.model.initialise import initial_value
from meshwright.spec.adapter_config import AdapterConfig
from meshwright.spec.adapter_json import ADAPTER_FILE, read_adapter_config, refuse_other_adapter
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameter_entries import ParameterEntry
from meshwright.spec.parameters import parameter_table


def open_adapter(directory: str | Path) -> tuple[CheckpointFiles, AdapterConfig]:
    """Open a PEFT directory; return (reader of its tensors, its settings). Raises `UserError` if a file is missing or
    damaged."""
    if not Path(directory).is_dir():
        what = "is a file" if Path(directory).exists() else "does not exist"
        raise UserError(f"{directory}: {what}; a PEFT directory is needed")
    files = CheckpointFiles(directory, ADAPTER_FILE)
    return files, read_adapter_config(directory, files.names)


def check_adapter(files: CheckpointFiles, config: ModelConfig) -> None:
    """Raise `UserError` unless the tensors in `files` have the names and shapes that the adapter of `config`
    requires."""
    try:
        wanted = {entry.name: entry for entry in parameter_table(config).trained.entries if entry.exported}
    except UserError as error:
        raise UserError(f"{files.directory}: the adapter is of another model: {error}") from None
    for name in sorted(files.names ^ wanted.keys()):
        what = "is missing" if name in wanted else "belongs to no adapter of this model"
        raise UserError(f"{files.directory / ADAPTER_FILE}: tensor {name} {what}")
    for name, entry in wanted.items():
        files.check_weights(name)
        if files.shape(name) != entry.shape:
            raise UserError(
                f"{files.file(name)}: tensor {name} is {list(files.shape(name))}, but the model and rank "
                f"{config.adapter and config.adapter.rank} need {list(entry.shape)}: the adapter is of another model"
            )


def with_adapter_of(files: CheckpointFiles, adapter: AdapterConfig, base: ModelConfig) -> ModelConfig:
    """Return the configuration of the base model `base` with the adapter settings `adapter`. files: reader of the
    adapter's tensors. Raises `UserError` if the tensors' names or shapes do not fit the model."""
    config = dataclasses.replace(base, adapter=adapter)
    check_adapter(files, config)
    return config


def read_peft_adapter(
    directory: str | Path, config: ModelConfig, seed: int
) -> Callable[[ParameterEntry], torch.Tensor]:
    """Return a function that maps a trained parameter entry to its tensor in a PEFT directory. Entries outside the
    adapter (projections to a teacher's hidden states) are drawn from `seed` instead. Raises `UserError` if the adapter
    in the directory is not the adapter of the configuration `config`."""
    files, adapter = open_adapter(directory)
    refuse_other_adapter(directory, config, adapter)
    check_adapter(files, config)
    return lambda entry: files.read_weights(entry.name) if entry.exported else initial_value(entry, seed)
