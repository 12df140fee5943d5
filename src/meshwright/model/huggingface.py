"""Read models from Hugging Face directories: `config.json` and safetensors files, sharded ones with an
index."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from meshwright.errors import UserError
from meshwright.model.encoder import Encoder
from meshwright.model.initialise import fill_parameters, initial_value
from meshwright.model.transformer import Transformer
from meshwright.names import unknown
from meshwright.quantization.block_fp8 import dequantize
from meshwright.spec.config import Head, ModelConfig
from meshwright.spec.config_json import config_from_huggingface, config_from_path, read_config
from meshwright.spec.disk_names import BASE_PREFIX, FORMER_ENDINGS, FURTHER_LAYERS, NESTED_PREFIXES, OTHER_HEADS
from meshwright.spec.families import FAMILIES
from meshwright.spec.parameter_entries import ParameterEntry
from meshwright.spec.parameters import ParameterTable, parameter_table
from meshwright.spec.weight_formats import READ_FORMATS, BlockFp8, read_weight_format
from meshwright.untrusted import read_json

Found = TypeVar("Found")
AnyModel = TypeVar("AnyModel", Transformer, Encoder)
SINGLE_FILE = "model.safetensors"
WEIGHT_TYPES = ("F64", "F32", "BF16", "F16")  # safetensors dtype names
FP8, SCALE_SUFFIX = "F8_E4M3", "_scale_inv"  # of a weight in float8, and the name of its scales
INDEX_FILE = "model.safetensors.index.json"
# Constants that files of older versions hold and a model computes itself.
CONSTANTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", "embeddings.position_ids")


class CheckpointFiles:
    """Reader of the safetensors files of the Hugging Face directory `directory`; each tensor is read by name when it is
    requested. `single`: name of the file if there is no index. Attribute `mapped`: True if tensors that are read are
    views of the memory-mapped file.

    Raises UserError, naming the file and the tensor, when a file is missing, truncated, or does not match the index."""

    mapped = True

    def __init__(self, directory: str | Path, single: str = SINGLE_FILE) -> None:
        self.directory, self._single = Path(directory), single
        if not self.directory.is_dir():
            what = "is a file" if self.directory.exists() else "does not exist"
            raise UserError(f"{directory}: {what}; a Hugging Face model directory is needed")
        self._files: dict[Path, Any] = {}
        self._place = self._locate_tensors()

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors in the directory's files."""
        return frozenset(self._place)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor `name` without reading its values."""
        return self._query_file(name, lambda file: tuple(file.get_slice(name).get_shape()))

    def read(self, name: str) -> torch.Tensor:
        """Read the tensor `name` as a whole, in its dtype on disk. Raises UserError if the file is damaged."""
        return self._query_file(name, lambda file: file.get_tensor(name))

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype name ("F32") of the tensor `name` without reading its values."""
        return self._query_file(name, lambda file: str(file.get_slice(name).get_dtype()))

    def _query_file(self, name: str, query: Callable[[Any], Found]) -> Found:
        """Call `query` with the open safetensors file that contains the tensor `name`, and return the result. Read
        errors become UserErrors."""
        with _convert_read_errors(self._place[name], name):
            return query(self._open(self._place[name]))

    def read_weights(self, name: str) -> torch.Tensor:
        """Read the floating-point tensor `name` as a whole, in its dtype on disk; float8 in blocks times its scales, in
        float32. Raises UserError for another dtype and for NaN or infinite values."""
        self.check_weights(name)
        value = self.read(name)
        if self.dtype(name) == FP8:
            value = dequantize(value, self.read(name + SCALE_SUFFIX), self._fp8_format(name))
        if value.numel():
            ends = torch.aminmax(value)
            if not (torch.isfinite(ends.min) & torch.isfinite(ends.max)):
                count = value.numel() - int(torch.isfinite(value).sum())
                raise UserError(
                    f"{self.file(name)}: tensor {name} holds {count:,} of {value.numel():,} values that are NaN or "
                    "infinite: no model computes with such weights (`meshwright inspect` counts them)"
                )
        return value

    def check_weights(self, name: str) -> None:
        """Raise UserError unless the tensor `name` has a floating-point dtype in which weights are supported
        (`WEIGHT_TYPES`), or is in float8 with the scales that ``config.json`` describes."""
        dtype = self.dtype(name)
        if dtype == FP8 and name + SCALE_SUFFIX in self.names:
            shape, scales = self.shape(name), name + SCALE_SUFFIX
            wanted = self._fp8_format(name).scale_shape(shape) if len(shape) == 2 else None
            if self.shape(scales) != wanted or self.dtype(scales) not in WEIGHT_TYPES:
                raise UserError(
                    f"{self.file(scales)}: tensor {scales} is {self.dtype(scales)} {list(self.shape(scales))}; scales "
                    f"of {list(shape)} are F32 {list(wanted or ())}"
                )
        elif dtype not in WEIGHT_TYPES:
            raise UserError(
                f"{self.file(name)}: tensor {name} is of type {dtype}; weights are {', '.join(WEIGHT_TYPES)}, or "
                f"{READ_FORMATS}: another quantized or packed model cannot be read, save the unquantized one"
            )

    def _fp8_format(self, name: str) -> BlockFp8:
        """Return the format of the float8 tensor `name`, which the directory's ``config.json`` describes. Raises
        UserError if it describes none."""
        found = read_weight_format(read_config(self.directory), str(self.directory / "config.json"))
        if found is None:
            raise UserError(f'{self.file(name)}: tensor {name} is {FP8}, but config.json has no "quantization_config"')
        return found

    def file(self, name: str) -> Path:
        """Return the path of the file that contains the tensor `name`."""
        return self._place[name]

    def _locate_tensors(self) -> dict[str, Path]:
        """Return {tensor name: file}, from the index or the single safetensors file of the directory. Raises UserError
        if it has neither."""
        index, single = self.directory / INDEX_FILE, self.directory / self._single
        if self._single == SINGLE_FILE and index.is_file():
            return self._locate_by_index(index)
        if single.is_file():
            return dict.fromkeys(self._open(single).keys(), single)
        old = sorted(path.name for path in self.directory.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        if old:
            raise UserError(
                f"{self.directory}: {old[0]} is a pickle, which can run code when it is read; save the model as "
                f"safetensors (transformers: save_pretrained)"
            )
        more = f" and no {INDEX_FILE}" if self._single == SINGLE_FILE else ""
        raise UserError(f"{self.directory}: no {self._single}{more} in it")

    def _locate_by_index(self, index: Path) -> dict[str, Path]:
        """Return {tensor name: file} as listed in the file `index`; raises UserError where index and files disagree."""
        try:
            weight_map = read_json(index, object_pairs_hook=partial(_reject_duplicate_keys, index))["weight_map"]
            places = {str(name): self.directory / file for name, file in weight_map.items()}
        except OSError as error:
            raise UserError(f"{index}: cannot be read: {(error.strerror or str(error)).lower()}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f'{index}: not an index: one JSON object with a "weight_map" is needed') from None
        held: dict[Path, set[str]] = {}
        found: dict[str, Path] = {}
        for name, path in places.items():
            if path not in held:
                if path.parent != self.directory or not os.path.isfile(path):
                    raise UserError(f"{index}: names {path.name[:200]}, which is not in the directory")
                held[path] = set(self._open(path).keys())
                for again in sorted(held[path] & found.keys()):
                    raise UserError(f"{path}: tensor {again} is in {found[again].name} as well; remove one of the two")
                found |= dict.fromkeys(held[path], path)
            if name not in held[path]:
                raise UserError(f"{path}: tensor {name} is missing, though {INDEX_FILE} says it is here")
        for name in sorted(found.keys() - places.keys()):
            raise UserError(
                f"{found[name]}: tensor {name} is not in {INDEX_FILE}, which lists all tensors of its files"
            )
        return places

    def _open(self, path: Path) -> Any:
        """Return the open safetensors file at `path`; a file that is already open is reused. Raises UserError if it
        cannot be read."""
        if path not in self._files:
            with _convert_read_errors(path):
                self._files[path] = safe_open(path, framework="pt")
        return self._files[path]


def _reject_duplicate_keys(index: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object of the file `index` from its key-value pairs; raise UserError for a duplicate key, which the
    json module would accept. An `object_pairs_hook` of json.loads."""
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise UserError(f"{index}: {name} is in it twice; keep one of the two")
        made[name] = value
    return made


@contextmanager
def _convert_read_errors(path: Path, name: str | None = None) -> Iterator[None]:
    """Context manager that converts safetensors and file-system errors to a UserError that names the file `path` and,
    if given, the tensor `name`."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        tensor = f"tensor {name} " if name else ""
        raise UserError(f"{path}: {tensor}cannot be read, the file is cut or damaged ({error})") from None


def load_huggingface(
    directory: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Transformer, ModelConfig]:
    """Load the decoder in the Hugging Face directory `directory` onto `device`, its parameters cast to `dtype`; return
    the model and its configuration.

    Raises UserError when a file or the configuration is missing or damaged, when the model is an encoder or of a family
    that can only be planned, and when tensors are missing, unexpected, or of another shape than the configuration
    implies."""
    files = CheckpointFiles(directory)
    config = config_from_path(directory)
    if config.planning_only:
        raise UserError(f"{directory}: {config.family} can be planned but not run: {config.planning_only}")
    if config.encoder:
        raise UserError(
            f"{directory}: {config.family} is an encoder, which predicts no next token; `load_encoder` reads it"
        )
    return _load_model(partial(Transformer, device=device, dtype=dtype), config, files), config


def load_encoder(
    directory: str | Path,
    *,
    head: Head | None = None,
    labels: Sequence[str] = (),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Encoder, ModelConfig]:
    """Load the encoder in the Hugging Face directory `directory` onto `device`, its parameters cast to `dtype`; return
    the model and its configuration.

    `head`: head to use instead of the one that `config.json` names ("masked", "classes", "none"); "classes" needs
    `labels`, the class names. Head parameters that the files lack are initialised from `seed`. Raises UserError when a
    file or the configuration is missing or damaged, when the model is no encoder or has no such head, and when tensors
    are missing, unexpected or misshapen."""
    files = CheckpointFiles(directory)
    config = _read_encoder_config(directory, head, labels)
    build = partial(Encoder, device=device, dtype=dtype)
    return _load_model(build, config, files, seed, new_head=head is not None), config


def _read_encoder_config(directory: str | Path, head: Head | None, labels: Sequence[str]) -> ModelConfig:
    """Return the configuration of the encoder in a Hugging Face directory. `head` and `labels` (class names) replace
    those of the configuration if given. Raises UserError if the model is not an encoder, or its family has no such
    head."""
    data = read_config(directory)
    family = FAMILIES.get(str(data.get("model_type")))
    if family is not None and not family.encoder:
        raise UserError(f"{directory}: {family.name} is a decoder; `load_huggingface` reads it")
    if labels and head != "classes":
        raise UserError('labels need head="classes"')
    if head is not None and family is not None:
        if head not in family.heads.values():
            raise UserError(unknown("head", head, family.heads.values()))
        (data["architectures"],) = ([name] for name, other in family.heads.items() if other == head)
        if labels:
            data["id2label"] = {str(number): label for number, label in enumerate(labels)}
    return config_from_huggingface(data, str(directory))


def _load_model(
    build: Callable[[ModelConfig], AnyModel], config: ModelConfig, files: CheckpointFiles, seed: int = 0,
    new_head: bool = False,
) -> AnyModel:  # fmt: skip
    """Build the model of configuration `config` and load all its parameters from `files`. `build`: function that builds
    the model; it is called only after the tensors in `files` were found to match `config`, so that a wrong config.json
    cannot make it allocate a huge model. `new_head`: True to initialise, from `seed`, head parameters that are missing
    in the files or have another shape there. Raises UserError if tensors are missing, misshapen or unexpected, except
    such head parameters."""
    table = parameter_table(config)
    names = match_entries(files, table, config, new_head)
    model = build(config)

    def value_of(entry: ParameterEntry) -> torch.Tensor:
        """Return the value of a parameter entry (checkpoint tensor) from the files; its initial value if it is not in
        them."""
        return files.read_weights(names[entry.name]) if entry.name in names else initial_value(entry, seed)

    fill_parameters(model, table, value_of)
    return model


def match_entries(
    files: CheckpointFiles, table: ParameterTable, config: ModelConfig, new_head: bool = False
) -> Mapping[str, str]:
    """Match the parameter entries of `table` (the tensors that a checkpoint of the model has) to the tensors in
    `files`; return {entry name: tensor name}. Raises UserError for missing, misshapen or unexpected tensors.

    Files of a base model may omit the prefix "transformer.", "model." or "bert.". The tensor of an output head tied to
    the embedding is ignored, as in transformers, and so are an encoder's other heads. `new_head`: True: do not raise
    for entries of the head that are missing or of another shape; leave them out of the result."""
    prefix = BASE_PREFIX[config.family]
    written = _map_current_names(files, config)
    bare = not any(name.startswith(prefix) for name in written)
    names, missing, misshapen = dict[str, str](), list[str](), list[str]()
    for entry in table.entries:
        wanted = entry.name.removeprefix(prefix) if bare else entry.name
        names[entry.name] = name = written.get(wanted, wanted)
        if new_head and entry.unit == "head" and (name not in files.names or files.shape(name) != entry.shape):
            del names[entry.name]
            continue
        if name not in files.names:
            missing.append(f"{name} {list(entry.shape)}")
            continue
        files.check_weights(name)
        if files.shape(name) != entry.shape:
            found, file = list(files.shape(name)), files.file(name).name
            misshapen.append(f"{name} of {file} is {found}, by config.json {list(entry.shape)}")
    known = {*names.values(), *((written.get("lm_head.weight", ""),) if config.tied else ())}
    known |= {name + SCALE_SUFFIX for name in names.values()}
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
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more


def _map_current_names(files: CheckpointFiles, config: ModelConfig) -> dict[str, str]:
    """Return {current Hugging Face name of a tensor: its name in the files}. The names differ if an older version of
    transformers wrote the files."""
    nested = NESTED_PREFIXES.get(config.family, {})
    inside = lambda name: next((each for each in nested if name.startswith(each)), None)  # noqa: E731
    found = {}
    for name in files.names:
        prefix = inside(name)
        found[name if prefix is None else nested[prefix] + name.removeprefix(prefix)] = name
    for ending, today in FORMER_ENDINGS.get(config.family, {}).items():
        for name in files.names:
            if name.endswith(ending):
                found.setdefault(name.removesuffix(ending) + today, found.pop(name))
    return found


def read_entry(files: CheckpointFiles, entry: ParameterEntry, names: Mapping[str, str] | None = None) -> torch.Tensor:
    """Read the unsharded value of a parameter entry (checkpoint tensor) as stored on disk (not transposed for the
    model). `names`: result of `match_entries`; None: the tensor has the entry's own name. Raises UserError if the
    tensor is missing."""
    name = entry.name if names is None else names[entry.name]
    if name not in files.names:
        raise UserError(f"{files.directory}: tensor {name} is missing")
    return files.read_weights(name)
