"""Reads the tensors of a Hugging Face directory's safetensors files, sharded ones with an index, and packed weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.errors import UserError
from meshwright.quantization import block_fp8, mxfp4
from meshwright.spec.config_json import read_config
from meshwright.spec.weight_formats import READ_FORMATS, BlockFp8, MxFp4, WeightFormat, read_weight_format
from meshwright.untrusted import read_json

Found = TypeVar("Found")
SINGLE_FILE = "model.safetensors"
WEIGHT_TYPES = ("F64", "F32", "BF16", "F16")  # safetensors dtype names
FP8 = "F8_E4M3"  # safetensors dtype of weights in float8
SCALE_SUFFIX = "_scale_inv"  # of the name of their scales
BLOCKS = "_blocks"  # of the names of weights in MXFP4
SCALES = "_scales"  # and of their scales
PICKLES = (".bin", ".pt", ".pth", ".ckpt")  # endings of the files of older versions
INDEX_FILE = "model.safetensors.index.json"


class CheckpointFiles:
    """Reader of the safetensors files of a Hugging Face directory (`directory`), either one file or sharded files with
    an index. Each tensor is read by name when it is requested. Packed (quantized) weights are two tensors, values and
    scales. `single`: name of the safetensors file in a directory without an index. Attribute `mapped`: True if the
    tensors returned are views of memory-mapped files.

    Raises UserError, naming the file and the tensor, when a file is missing, truncated, or does not match the index.
    """

    mapped = True

    def __init__(self, directory: str | Path, single: str = SINGLE_FILE) -> None:
        self.directory = Path(directory)
        self._single = single
        if not self.directory.is_dir():
            what = "is a file" if self.directory.exists() else "does not exist"
            raise UserError(f"{directory}: {what}; a Hugging Face model directory is needed")
        self._files: dict[Path, Any] = {}
        self._place = self._locate_tensors()

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of all tensors in the directory's files."""
        return frozenset(self._place)

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Return the names of the tensors that store the weights `name`: (name,), or for packed weights (values,
        scales); () if the files do not have the weights.
        """
        packed = (name + BLOCKS, name + SCALES)
        if name not in self.names:
            return packed if self.names.issuperset(packed) else ()
        return (name, name + SCALE_SUFFIX) if name + SCALE_SUFFIX in self.names else (name,)

    def describe_missing(self, name: str, shape: tuple[int, ...]) -> str:
        """Return, for an error message, the name and expected `shape` of the weights `name` that the files do not have.
        If `name` is a packed (quantized) weight with one of its two tensors in the files, return the name of the other
        tensor.
        """
        lacking = [part for part in (name + BLOCKS, name + SCALES) if part not in self.names]
        return lacking[0] if len(lacking) == 1 else f"{name} {list(shape)}"

    def weights_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the weights `name`; if they are quantized, their shape after dequantization."""
        return self.shape(name) if name in self.names else mxfp4.compute_dequantized_shape(self.shape(name + BLOCKS))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor `name` without reading its values."""
        return self._query_file(name, lambda file: tuple(file.get_slice(name).get_shape()))

    def read(self, name: str) -> Tensor:
        """Read the tensor `name` as a whole, in its dtype on disk. Raises UserError if the file is damaged."""
        return self._query_file(name, lambda file: file.get_tensor(name))

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype name ("F32") of the tensor `name` without reading its values."""
        return self._query_file(name, lambda file: str(file.get_slice(name).get_dtype()))

    def _query_file(self, name: str, query: Callable[[Any], Found]) -> Found:
        """Return `query(file)`, called with the open safetensors file that contains the tensor `name`. Read errors
        become UserErrors.
        """
        with _convert_read_errors(self._place[name], name):
            return query(self._open(self._place[name]))

    def read_weights(self, name: str, expert: int | None = None) -> Tensor:
        """Read the weights `name` in their dtype on disk; quantized weights are dequantized to float32.

        `expert`: index of one expert in weights that are stacked by expert along the first dim, to read only this
        expert's weights; None: read all. Raises UserError for an unsupported dtype and for NaN or infinite values."""
        self.check_weights(name)
        stored = map(self.read, self.stored_names(name))
        value, *scales = stored if expert is None else (tensor[expert] for tensor in stored)
        if scales:
            form = self._config_format
            unpack = partial(block_fp8.dequantize, form=form) if isinstance(form, BlockFp8) else mxfp4.dequantize
            value = unpack(value, scales[0])
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
        """Raise UserError unless the weights `name` have a supported floating-point dtype (`WEIGHT_TYPES`), or are
        quantized, with scales, in the format that ``config.json`` describes."""
        if name not in self.names:
            self._check_mxfp4(name)
            return
        dtype = self.dtype(name)
        if dtype == FP8 and name + SCALE_SUFFIX in self.names:
            shape = self.shape(name)
            scales = name + SCALE_SUFFIX
            form = self._require_format(name, BlockFp8)
            wanted = form.scale_shape(shape) if isinstance(form, BlockFp8) and len(shape) == 2 else None
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

    def _check_mxfp4(self, name: str) -> None:
        """Raise UserError unless the weights `name` are stored in MXFP4 with scales of the right shape. ``config.json``
        must also name this format."""
        values = name + BLOCKS
        scales = name + SCALES
        self._require_format(values, MxFp4)
        shape = self.shape(values)
        if len(shape) < 3 or shape[-1] != mxfp4.BLOCK_BYTES or self.shape(scales) != shape[:-1]:
            raise UserError(
                f"{self.file(values)}: tensor {values} is {list(shape)} and {scales} {list(self.shape(scales))}; MXFP4 "
                f"has {mxfp4.BLOCK_BYTES} bytes and one scale for each block"
            )
        for each in (values, scales):
            if self.dtype(each) != "U8":
                raise UserError(f"{self.file(each)}: tensor {each} is of type {self.dtype(each)}; MXFP4 is in U8")

    @cached_property
    def _config_format(self) -> WeightFormat | None:
        """Quantization format that the directory's ``config.json`` describes; None if the weights are not quantized."""
        return read_weight_format(read_config(self.directory), str(self.directory / "config.json"))

    def _require_format(self, name: str, wanted: type[WeightFormat]) -> WeightFormat:
        """Return the quantization format that ``config.json`` describes. Raises UserError unless this format is an
        instance of `wanted`, the class of the format in which the tensor `name` is stored."""
        if not isinstance(self._config_format, wanted):
            raise UserError(
                f"{self.file(name)}: tensor {name} is {self.dtype(name)}, but config.json has no "
                f'"quantization_config" of {wanted.__name__}'
            )
        return self._config_format

    def file(self, name: str) -> Path:
        """Return the path of the file that contains the tensor, or the quantized weights, called `name`."""
        return self._place[name if name in self._place else name + BLOCKS]

    def _locate_tensors(self) -> dict[str, Path]:
        """Return {tensor name: file}, from the index or the single safetensors file of the directory. Raises UserError
        if the directory has neither."""
        index = self.directory / INDEX_FILE
        single = self.directory / self._single
        if self._single == SINGLE_FILE and index.is_file():
            return self._locate_by_index(index)
        if single.is_file():
            return dict.fromkeys(self._open(single).keys(), single)
        old = sorted(path.name for path in self.directory.iterdir() if path.suffix in PICKLES)
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
