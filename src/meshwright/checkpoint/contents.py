"""Contents of all checkpoints of a run: the parameter table, configuration and tokenizer files; and the check that a
checkpoint is of the same model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.checkpoint.files import to_json_bytes
from meshwright.checkpoint.settings import SaveOptions
from meshwright.checkpoint.slices import read_index
from meshwright.errors import UserError
from meshwright.spec.adapter_json import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    adapter_to_peft,
    find_adapter_difference,
    read_adapter_config,
)
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_from_huggingface, config_from_path, config_to_huggingface
from meshwright.spec.parameters import ParameterTable, parameter_table

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointContents:
    """Model description and small files that are the same in all checkpoints of a run.

    table: the model's parameter table (name, shape ... of each tensor). small_files: file name -> content of
    configuration and tokenizer files. check: function that takes a checkpoint directory and raises `UserError` if the
    model in it differs from the run's. stem: name of the model files without ".safetensors".
    """

    table: ParameterTable
    small_files: Mapping[str, bytes]
    check: Callable[[Path], None]
    stem: str = "model"


def make_model_contents(config: ModelConfig, options: SaveOptions) -> CheckpointContents:
    """Return the parameter table, small files and model check of all checkpoints of a model with the architecture
    `config`. If the model has an adapter, its checkpoints are PEFT directories, which hold the adapter's weights alone.

    options: settings of the saves."""
    if config.adapter is not None:
        small_files = {
            ADAPTER_CONFIG: to_json_bytes(adapter_to_peft(config)),
            **read_tokenizer_files(options.tokenizer_directory),
        }
        return CheckpointContents(
            parameter_table(config).trained, small_files, partial(_check_adapter, config), ADAPTER_FILE.split(".")[0]
        )
    small_files = make_small_files(config, options.dtype, options.tokenizer_directory)
    return CheckpointContents(parameter_table(config), small_files, lambda path: _check_config(config, path))


def _check_adapter(config: ModelConfig, path: Path) -> None:
    """Raise `UserError` if the adapter in the checkpoint directory `path` differs from the adapter in `config`, the
    model configuration."""
    found = read_adapter_config(path, {part.name for part in read_index(path)})
    if (difference := find_adapter_difference(config, found)) is not None:
        raise UserError(
            f"checkpoint {path} holds an adapter with {difference}; use the same [adapter] or another run.directory"
        )


def _check_config(config: ModelConfig, path: Path) -> None:
    """Raise `UserError` if the checkpoint directory `path` holds a model of another architecture than `config`; the
    error names the first field that differs."""
    found = config_from_path(path / "config.json")
    wanted = config_from_huggingface(config_to_huggingface(config))  # as saved and loaded
    ignored = {"initializer_range", "bos_token", "eos_token", "more_eos_tokens"}
    if wanted.positions == "rope":
        ignored.add("max_positions")
    for field in dataclasses.fields(ModelConfig):
        there, here = getattr(found, field.name), getattr(wanted, field.name)
        if field.name not in ignored and there != here:
            raise UserError(
                f"checkpoint {path} holds a model with {field.name} = {there}, but the recipe has {here}; "
                "use the same model or another run.directory"
            )


def make_small_files(
    config: ModelConfig, dtype: str, tokenizer_directory: Path | None, tokenizer_files: Sequence[str] = TOKENIZER_FILES
) -> dict[str, bytes]:
    """Return the files of a Hugging Face directory besides the weights, as file name -> content: config.json for the
    model configuration `config`, generation_config.json unless the model is an encoder, and the tokenizer's files.

    dtype: dtype of the exported weights. tokenizer_directory: directory of the tokenizer files; None: no tokenizer.
    tokenizer_files: names of the files to copy from there; missing files are left out."""
    tokens: dict[str, Any] = {"_from_model_config": True}
    if config.bos_token is not None:
        tokens["bos_token_id"] = config.bos_token
    if config.eos_tokens:
        tokens["eos_token_id"] = list(config.eos_tokens) if len(config.eos_tokens) > 1 else config.eos_tokens[0]
    files = {"config.json": to_json_bytes(config_to_huggingface(config) | {"dtype": dtype, "torch_dtype": dtype})}
    if not config.encoder:
        files["generation_config.json"] = to_json_bytes(tokens)
    return files | read_tokenizer_files(tokenizer_directory, tokenizer_files)


def read_tokenizer_files(directory: Path | None, names: Sequence[str] = TOKENIZER_FILES) -> dict[str, bytes]:
    """Return the tokenizer files of a directory as file name -> content; missing files are left out. directory:
    directory of the files; None: no tokenizer, no files. names: names of the files."""
    return {name: (directory / name).read_bytes() for name in names if directory and (directory / name).is_file()}
