"""Merges adapters into base weights, removes them again, and extracts an adapter from two checkpoints."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from meshwright.adapters.peft_directory import open_adapter, with_adapter_of
from meshwright.errors import UserError, error_reason
from meshwright.model.checkpoint_files import CheckpointFiles
from meshwright.model.huggingface import match_entries, read_entry
from meshwright.quantization.formats import round_trip
from meshwright.spec.adapter_config import RECORD_BYTES, AdapterConfig
from meshwright.spec.adapter_entries import ADAPTER_PARTS, PEFT_PREFIX, find_adaptable_entries
from meshwright.spec.adapter_json import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    adapter_to_peft,
    find_base_directory,
    make_missing_base_error,
)
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_from_path
from meshwright.spec.parameter_entries import ParameterEntry
from meshwright.spec.parameters import parameter_table
from meshwright.toml import parse_toml
from meshwright.untrusted import read_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class Adapter:
    """Adapter of a model, read from a PEFT directory. files: reader of its tensors; config: the model's configuration
    with the adapter; names: {name of an adapted weight in the base model's files: name of its module in the model};
    transposed: names of the adapted weights that the base model's files store as [input, output]."""

    files: CheckpointFiles
    config: ModelConfig
    names: dict[str, str]
    transposed: frozenset[str]

    @property
    def settings(self) -> AdapterConfig:
        """Settings of the adapter: kind (LoRA, DoRA ...), rank, scale, target modules."""
        assert self.config.adapter is not None
        return self.config.adapter

    def product(self, name: str) -> torch.Tensor:
        """Return s B A, the change that the adapter makes to the weight `name` (name in the base model's files), in
        float64 and in the shape of that weight on disk.
        """
        prefix = f"{PEFT_PREFIX}{self.names[name]}"
        first, second = (self.files.read_weights(f"{prefix}.{ADAPTER_PARTS[part]}").double() for part in "ab")
        product = self.settings.scale * second @ first
        return product.T if name in self.transposed else product

    def merge(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight with the adapter merged into it, W + s B A, in float64; with DoRA its rows are scaled to
        the trained magnitudes. name: the weight's name in the base model's files. weight: W, as the base model's files
        store it; the result has the same shape."""
        merged = weight.double() + self.product(name)
        if self.settings.kind != "dora":
            return merged
        dim = 0 if name in self.transposed else 1
        magnitude = self.files.read_weights(f"{PEFT_PREFIX}{self.names[name]}.{ADAPTER_PARTS['magnitude']}").double()
        return merged * (magnitude / torch.linalg.vector_norm(merged, dim=dim)).unsqueeze(dim)


def open_model_adapter(directory: Path, base: Path) -> tuple[CheckpointFiles, Adapter]:
    """Open the base model in `base` and its adapter in `directory`; return (tensors of the base model, adapter). Raises
    `UserError` if the adapter is of another model."""
    files, settings = open_adapter(directory)
    config = config_from_path(base)
    adapted = with_adapter_of(files, settings, config)
    weights, table = CheckpointFiles(base), parameter_table(config)
    names = match_entries(weights, table, config)
    found = {names[table_entry.name]: module for module, table_entry in _find_target_layers(config, settings).items()}
    transposed = {names[entry.name] for entry in table.entries if entry.transposed}
    return weights, Adapter(files, adapted, found, frozenset(transposed))


def _find_target_layers(config: ModelConfig, settings: AdapterConfig) -> dict[str, Any]:
    """Return the linear layers that an adapter targets, as {Hugging Face module name: parameter entry of its weight}.
    config: configuration of the base model. settings: settings of the adapter, which name the target modules."""
    known = find_adaptable_entries(parameter_table(config).entries)
    return {module: known[module] for module in settings.targets}


def find_base(directory: Path) -> Path:
    """Return the directory of the base model that the adapter in the PEFT directory `directory` names
    (base_model_name_or_path). Raises `UserError` if there is no such directory."""
    open_adapter(directory)
    if (base := find_base_directory(directory)) is None:
        raise make_missing_base_error(directory)
    return base


class MergedFiles(CheckpointFiles):
    """Reader of the tensors of a base model with the adapter of a PEFT directory merged into them; each tensor is
    merged at the time of reading, and returned in the dtype of the base model's files. directory: PEFT directory; base:
    Hugging Face directory of its base model."""

    mapped = False

    def __init__(self, directory: Path, base: Path) -> None:
        super().__init__(base)
        _, self._adapter = open_model_adapter(directory, base)

    def read(self, name: str) -> torch.Tensor:
        """Read the tensor `name` as a whole, in its dtype on disk, with the adapter merged into it."""
        value = super().read(name)
        return self._adapter.merge(name, value).to(value.dtype) if name in self._adapter.names else value


def open_weights(directory: Path) -> CheckpointFiles:
    """Open the weights in `directory`. For a Hugging Face directory these are the model's weights; for a PEFT
    directory, the weights of the base model with the adapter merged into them."""
    if (directory / ADAPTER_CONFIG).is_file():
        return MergedFiles(directory, find_base(directory))
    return CheckpointFiles(directory)


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Context manager that yields a hidden directory next to `target` and renames it to `target` at the end; after an
    error the hidden directory is removed. Raises `UserError` if `target` exists."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target}: exists already; name a directory that does not")
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        partial.replace(target)
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error_reason(error)}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def rewrite_model(
    base: Path, target: Path, change: Callable[[str, torch.Tensor], torch.Tensor], tokenizer: Path | None = None
) -> None:
    """Write a copy of the Hugging Face directory `base` to `target`, file by file. Each tensor is replaced by
    `change(name, tensor)`, which has the same shape and dtype. Configuration and tokenizer are copied. tokenizer:
    directory from which the tokenizer files are copied; None: `base`."""
    files = CheckpointFiles(base)
    by_file: dict[Path, list[str]] = {}
    for name in sorted(files.names):
        by_file.setdefault(files.file(name), []).append(name)
    with new_directory(target) as partial:
        for path, names in by_file.items():
            tensors = {name: change(name, files.read(name)).contiguous() for name in names}
            save_file(tensors, partial / path.name, {"format": "pt"})
        for path in sorted(base.iterdir()):
            hidden = path.name.startswith(".") or path.name == "manifest.json"
            if path.is_file() and not hidden and path.suffix not in NOT_COPIED:
                shutil.copyfile(path, partial / path.name)
        for name in TOKENIZER_FILES if tokenizer else ():
            if (path := Path(tokenizer or "", name)).is_file():
                shutil.copyfile(path, partial / name)


def find_format(directory: Path) -> str | None:
    """Return the quantization format, such as "nf4", in which the base model's weights were kept while the adapter in
    the checkpoint `directory` was trained. None: not quantized, or `directory` is not a checkpoint of a run.
    """
    try:
        state = read_json(directory / "training" / "state.json")
        adapter = parse_toml(state["recipe"], "recipe")["adapter"]
        base = f"{adapter['base']}-double" if adapter.get("double_quantization") else str(adapter["base"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
        return None
    return base if base in RECORD_BYTES else None


def merge_adapter(directory: Path, base: Path, target: Path, packed: str | None = None) -> dict[str, Any]:
    """Merge the adapter in `directory` into the base model in `base`, and write the result to `target`; return the JSON
    document of `meshwright adapter merge`.

    packed: format in which the base weights were quantized in training, such as "nf4" (None: not quantized). If
    quantized, the adapter is merged into the dequantized weights, because it was trained on these.

    Keys of the document: "rounding": relative error of the merged weights due to rounding to the dtype of the files;
    "quantization": relative error of the base weights due to quantization."""
    _, adapter = open_model_adapter(directory, base)
    rounding, lost = _RelativeError(), _RelativeError()

    def change(name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the tensor `name` of the merged model, given the base model's `weight`."""
        if name not in adapter.names:
            return weight
        started = weight
        if packed is not None:
            turned = name in adapter.transposed
            started = round_trip(packed, weight.T.contiguous() if turned else weight)
            started = started.T if turned else started
            lost.add(started, weight)
        merged = adapter.merge(name, started)
        rounded = merged.to(weight.dtype)
        rounding.add(rounded, merged)
        return rounded

    rewrite_model(base, target, change, directory)
    document = {"directory": str(target), "base": str(base), "layers": len(adapter.names), "rounding": rounding.value}
    return document | ({"quantization": lost.value} if packed is not None else {})


def unmerge_adapter(directory: Path, merged: Path, target: Path, packed: str | None = None) -> dict[str, Any]:
    """Subtract an adapter from the weights into which it was merged, W - s B A, and write the model to `target`; return
    the JSON document of `meshwright adapter unmerge`. Raises `UserError` for DoRA, whose base norms are lost.

    directory: PEFT directory of the adapter. merged: Hugging Face directory of the merged model. packed: format in
    which the base weights were quantized in training, such as "nf4" (None: not quantized). If quantized, the written
    weights are the dequantized base weights, because the adapter was merged into these.

    Keys of the document: "quantized": the format; "quantization": relative error of the written weights to the base
    weights, null if the base model is not found at the path that the adapter names."""
    _, adapter = open_model_adapter(directory, merged)
    if adapter.settings.kind == "dora":
        raise UserError(f"{directory}: a merged DoRA adapter cannot be removed: the norms of the base are not stored")

    before = find_base_directory(directory) if packed is not None else None
    original = None if before is None else CheckpointFiles(before)
    lost = _RelativeError()

    def change(name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the tensor `name` of the base model, given the merged model's `weight`."""
        if name not in adapter.names:
            return weight
        restored = weight.double() - adapter.product(name)
        if original is not None and name in original.names and original.shape(name) == tuple(weight.shape):
            lost.add(restored, original.read(name))
        return restored.to(weight.dtype)

    rewrite_model(merged, target, change)
    document = {"directory": str(target), "layers": len(adapter.names)}
    if packed is None:
        return document
    return document | {"quantized": packed, "quantization": lost.value if original is not None else None}


def extract_adapter(
    tuned: Path, base: Path, target: Path, *, rank: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Compute a LoRA adapter of rank `rank` from a fine-tuned model, and write it to the PEFT directory `target`. For
    each linear layer, A and B are the truncated singular value decomposition of the difference between the weights in
    the checkpoints `tuned` and `base`: the closest matrix of this rank (Eckart & Young 1936).

    Return the JSON document of `meshwright adapter extract`. Keys: "kept": share of the differences' squared norm that
    the adapter reproduces; "not_extracted": names of the tensors that differ but cannot have an adapter. progress:
    called after each tensor with (tensors done, number of all tensors)."""
    config = config_from_path(base)
    if config_from_path(tuned) != config:
        raise UserError(f"{tuned}: its config.json describes another model than that of {base}")
    table = parameter_table(config)
    both = [CheckpointFiles(each) for each in (tuned, base)]
    names = [match_entries(files, table, config) for files in both]
    modules = {entry.name: module for module, entry in find_adaptable_entries(table.entries).items()}
    factors, rest = dict[str, tuple[torch.Tensor, torch.Tensor]](), []
    kept = whole = 0.0
    for number, entry in enumerate(table.entries):
        progress(number, len(table.entries))
        after, before = (read_entry(files, entry, each) for files, each in zip(both, names, strict=True))
        if torch.equal(after, before):
            continue
        if entry.name not in modules:
            rest.append(entry.name)
            continue
        difference = after.double() - before.double()
        left, values, right = torch.linalg.svd(difference.T if entry.transposed else difference, full_matrices=False)
        if rank > len(values):
            raise UserError(f"--rank {rank} is above the width of {modules[entry.name]}; at most {len(values)}")
        root = values[:rank].sqrt()
        factors[modules[entry.name]] = root[:, None] * right[:rank], left[:, :rank] * root
        whole, kept = whole + float(values.square().sum()), kept + float(values[:rank].square().sum())
    progress(len(table.entries), len(table.entries))
    factors |= _pad_experts(table.entries, modules, factors, rank)
    if not factors:
        raise UserError(f"{tuned}: no linear layer differs from {base}: there is nothing to extract")
    adapter = AdapterConfig("lora", rank, float(rank), tuple(factors), str(base.resolve()))
    tensors = {
        f"{PEFT_PREFIX}{module}.{ADAPTER_PARTS[part]}": value.float().contiguous()
        for module, pair in factors.items()
        for part, value in zip("ab", pair, strict=True)
    }
    write_adapter(target, dataclasses.replace(config, adapter=adapter), tensors)
    return {"directory": str(target), "layers": len(factors), "kept": kept / whole, "not_extracted": rest}


def _pad_experts(
    entries: Sequence[ParameterEntry],
    modules: dict[str, str],
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]],
    rank: int,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return zero adapters, {module name: (A, B)}, for each routed expert without adapter in a layer in which another
    expert has an adapter. (In a PEFT directory either all experts of a layer have adapters or none.)

    entries: parameter entries of the model. modules: {entry name: module name}. factors: {module name: (A, B)} of the
    extracted adapter. rank: rank of A and B.
    """
    experts = [(entry, modules[entry.name]) for entry in entries if entry.expert and entry.name in modules]
    adapted = {(entry.tensor, module.rpartition(".")[2]) for entry, module in experts if module in factors}
    return {
        module: (torch.zeros(rank, entry.model_shape[1]), torch.zeros(entry.model_shape[0], rank))
        for entry, module in experts
        if module not in factors and (entry.tensor, module.rpartition(".")[2]) in adapted
    }


def write_adapter(target: Path, config: ModelConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Write an adapter as the PEFT directory `target`. config: the model's configuration with the adapter; tensors:
    PEFT tensor name -> value."""
    with new_directory(target) as partial:
        save_file(tensors, partial / ADAPTER_FILE, {"format": "pt"})
        (partial / ADAPTER_CONFIG).write_text(json.dumps(adapter_to_peft(config), indent=1) + "\n")


class _RelativeError:
    """Accumulator of the relative error ‖a - b‖ / ‖b‖ over several tensors."""

    def __init__(self) -> None:
        self._difference = self._norm = 0.0

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add the tensor `a`, an approximation of the exact tensor `b` of the same shape."""
        self._difference += float((a.double() - b.double()).square().sum())
        self._norm += float(b.double().square().sum())

    @property
    def value(self) -> float:
        """Relative error ‖a - b‖ / ‖b‖ over all tensors added so far."""
        return math.sqrt(self._difference / self._norm) if self._norm else 0.0
