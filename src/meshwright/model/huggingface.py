"""Read models from Hugging Face directories: `config.json` and safetensors files, sharded ones with an
index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from meshwright.errors import UserError
from meshwright.model.checkpoint_files import CheckpointFiles
from meshwright.model.encoder import Encoder
from meshwright.model.initialise import fill_parameters, initial_value
from meshwright.model.transformer import Transformer
from meshwright.names import unknown
from meshwright.spec.config import Head, ModelConfig
from meshwright.spec.config_json import config_from_huggingface, read_config, read_decoder_config
from meshwright.spec.disk_names import BASE_PREFIX, FORMER_ENDINGS, FURTHER_LAYERS, NESTED_PREFIXES, OTHER_HEADS
from meshwright.spec.families import FAMILIES
from meshwright.spec.parameter_entries import ParameterEntry
from meshwright.spec.parameters import ParameterTable, parameter_table

AnyModel = TypeVar("AnyModel", Transformer, Encoder)
# Constants that files of older versions hold and a model computes itself.
CONSTANTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", "embeddings.position_ids")


def load_huggingface(
    directory: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Transformer, ModelConfig]:
    """Load the decoder in the Hugging Face directory `directory` onto `device`, its parameters cast to `dtype`; return
    the model and its configuration.

    Raises UserError when a file is missing or damaged, when the model is an encoder or of an unsupported family, and
    when tensors are missing, unexpected, or of another shape than the configuration implies.
    """
    files = CheckpointFiles(directory)
    config = read_decoder_config(Path(directory))
    return _load_model(partial(Transformer, device=device, dtype=dtype), config, files), config


def load_encoder(
    directory: str | Path, *, head: Head | None = None, labels: Sequence[str] = (), seed: int = 0,
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
) -> tuple[Encoder, ModelConfig]:  # fmt: skip
    """Load the encoder in the Hugging Face directory `directory` onto `device`, its parameters cast to `dtype`; return
    the model and its configuration.

    `head`: "masked", "classes" or "none", to replace the head in `config.json`; "classes" needs `labels`, the class
    names. None: the head in `config.json`. Head parameters that the files lack are initialised from `seed`. Raises
    UserError when a file or the configuration is missing or damaged, when the model is no encoder or its family lacks
    this head, and when tensors are missing, unexpected or misshapen."""
    files = CheckpointFiles(directory)
    config = _read_encoder_config(directory, head, labels)
    build = partial(Encoder, device=device, dtype=dtype)
    return _load_model(build, config, files, seed, new_head=head is not None), config


def _read_encoder_config(directory: str | Path, head: Head | None, labels: Sequence[str]) -> ModelConfig:
    """Return the configuration of the encoder in a Hugging Face directory. `head` and `labels` (class names) replace
    the head and the labels of the configuration unless they are None and empty. Raises UserError if the model is not an
    encoder, or its family has no such head."""
    data = read_config(directory)
    family = FAMILIES.get(str(data.get("model_type")))
    if family is not None and not family.encoder:
        raise UserError(f"{directory}: {family.name} is a decoder; `load_huggingface` reads it")
    if labels and head != "classes":
        raise UserError('labels need head="classes"')
    if head is not None and family is not None:
        if head not in family.heads.values():
            raise UserError(unknown("head", head, family.heads.values()))
        data["architectures"] = [name for name, other in family.heads.items() if other == head]
        if labels:
            data["id2label"] = {str(number): label for number, label in enumerate(labels)}
    return config_from_huggingface(data, str(directory))


def _load_model(
    build: Callable[[ModelConfig], AnyModel], config: ModelConfig, files: CheckpointFiles, seed: int = 0,
    new_head: bool = False,
) -> AnyModel:  # fmt: skip
    """Build the model of configuration `config` and load all its parameters from `files`.

    `build`: function that builds the model. It is called only after the tensors in `files` were checked against
    `config`, so that a wrong config.json cannot make it allocate a huge model. `new_head`: True to initialise head
    parameters from `seed` if the files lack them or have them in another shape. Raises UserError if tensors are
    missing, misshapen or unexpected, except such head parameters.
    """
    table = parameter_table(config)
    names = match_entries(files, table, config, new_head)
    model = build(config)

    def value_of(entry: ParameterEntry) -> Tensor:
        """Return the value of a parameter entry (checkpoint tensor) from the files; its initial value if it is not in
        them."""
        return read_entry(files, entry, names) if entry.name in names else initial_value(entry, seed)

    fill_parameters(model, table, value_of)
    return model


def match_entries(
    files: CheckpointFiles, table: ParameterTable, config: ModelConfig, new_head: bool = False
) -> Mapping[str, str]:
    """Match the parameter entries of `table` to the tensors in `files`; return {entry name: tensor name}. The entries
    are the tensors that a checkpoint of a model with configuration `config` has. Raises UserError for missing,
    misshapen or unexpected tensors.

    Files of a base model may omit the prefix "transformer.", "model." or "bert.". The tensor of an output head tied to
    the embedding is ignored, as in transformers, and so are an encoder's other heads. `new_head`: True: head entries
    that are missing or of another shape are left out of the result, without an error.
    """
    prefix = BASE_PREFIX[config.family]
    written = _map_current_names(files, config)
    bare = not any(name.startswith(prefix) for name in written)
    names: dict[str, str] = {}
    missing = []
    misshapen = []
    for entry in table.entries:
        wanted = entry.disk_name.removeprefix(prefix) if bare else entry.disk_name
        name = written.get(wanted, wanted)
        names[entry.name] = name
        if entry.stacked and entry.expert and entry.expert[0]:  # the same tensor as that of the first expert
            continue
        parts = files.stored_names(name)
        if new_head and entry.unit == "head" and (not parts or files.shape(name) != entry.shape):
            del names[entry.name]
            continue
        if not parts:
            missing.append(files.describe_missing(name, entry.disk_shape))
            continue
        files.check_weights(name)
        if files.weights_shape(name) != entry.disk_shape:
            found = list(files.weights_shape(name))
            misshapen.append(
                f"{name} of {files.file(parts[0]).name} is {found}, by config.json {list(entry.disk_shape)}"
            )
    known = set(chain.from_iterable(files.stored_names(name) for name in names.values()))
    if config.tied:
        known.add(written.get("lm_head.weight", ""))
    others = OTHER_HEADS.get(config.family, ())
    if config.family in FURTHER_LAYERS:
        others += tuple(f"layers.{config.layers + further}." for further in range(8))
    left = {
        name
        for name in written.values()
        if not (name in known or name.endswith(CONSTANTS) or name.removeprefix(prefix).startswith(others))
    }
    for wrong, what in (
        (missing, "is missing"),
        (misshapen, ""),
        (sorted(left), f"has no place in the {config.family} model of config.json"),
    ):
        if wrong:
            raise UserError(f"{files.directory}: tensor {_list_some(wrong)} {what}".rstrip())
    return names


def _list_some(found: Sequence[str]) -> str:
    """Return the first three of the texts `found` and how many more there are, as one text."""
    return "; ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _map_current_names(files: CheckpointFiles, config: ModelConfig) -> dict[str, str]:
    """Return {current Hugging Face name of a tensor: its name in the files} for a model of configuration `config`. The
    two names differ if an older version of transformers wrote the files."""
    nested = NESTED_PREFIXES.get(config.family, {})
    found = {}
    for name in files.names:
        prefix = next((each for each in nested if name.startswith(each)), "")
        found[nested.get(prefix, "") + name.removeprefix(prefix)] = name
    for ending, today in FORMER_ENDINGS.get(config.family, {}).items():
        for name in files.names:
            if name.endswith(ending):
                found.setdefault(name.removesuffix(ending) + today, found.pop(name))
    return found


def read_entry(files: CheckpointFiles, entry: ParameterEntry, names: Mapping[str, str] | None = None) -> Tensor:
    """Read the unsharded value of a parameter entry (checkpoint tensor) from `files`, in its shape on disk, which may
    be the transpose of the model's.

    `names`: {entry name: tensor name}, result of `match_entries`; None: the tensor has the entry's name. Raises
    UserError if the tensor is missing.
    """
    name = entry.disk_name if names is None else names[entry.name]
    if not files.stored_names(name):
        raise UserError(f"{files.directory}: tensor {files.describe_missing(name, entry.disk_shape)} is missing")
    return files.read_weights(name, entry.expert[0] if entry.stacked and entry.expert else None)
