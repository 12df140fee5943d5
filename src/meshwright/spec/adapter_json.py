"""PEFT's `adapter_config.json`, from and to an `AdapterConfig`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from meshwright.errors import UserError, error_reason
from meshwright.spec.adapter_config import AdapterConfig, AdapterKind
from meshwright.spec.adapter_entries import PEFT_PREFIX, target_modules
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.untrusted import read_json

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
MAX_RANK = 65536

# Keys of PEFT under which an adapter computes something else, and the values that leave them unused.
_UNUSED: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"), "modules_to_save": (None, []), "rank_pattern": (None, {}), "alpha_pattern": (None, {}),
    "layer_replication": (None, []), "target_parameters": (None, []), "trainable_token_indices": (None, [], {}),
    "use_qalora": (None, False), "alora_invocation_tokens": (None, []), "lora_bias": (None, False),
    "corda_config": (None,), "use_bdlora": (None, False),
}  # fmt: skip


def adapter_to_peft(config: ModelConfig) -> dict[str, Any]:
    """Return the content of `adapter_config.json`, as PEFT writes it, for the adapter of a model configuration.
    `target_modules` lists the last parts of the module names if these select the same layers, else full names.
    """
    adapter = config.adapter
    assert adapter is not None
    entries = parameter_table(dataclasses.replace(config, adapter=None)).entries
    modules = list(target_modules(entries, adapter.targets))
    kinds = sorted({module.rpartition(".")[2] for module in modules})
    named = kinds if list(target_modules(entries, kinds)) == modules else modules
    return settings_to_peft(adapter, named) | {"task_type": "CAUSAL_LM", "fan_in_fan_out": config.family == "gpt2"}


def settings_to_peft(adapter: AdapterConfig, modules: list[str]) -> dict[str, Any]:
    """Return the content of `adapter_config.json` for an adapter, on a Meshwright model or on a user's own module.
    modules: names of the adapted linear layers, or last parts of the names."""
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": adapter.base or None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": modules,
        "use_rslora": adapter.kind == "rslora",
        "use_dora": adapter.kind == "dora",
        "fan_in_fan_out": False,
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def find_base_directory(directory: Path) -> Path | None:
    """Return the base model's directory that `adapter_config.json` in the PEFT directory `directory` names; None if the
    file or the base directory does not exist.
    """
    base = _read_base_name(directory)
    return Path(base) if base and os.path.isdir(base) else None  # False for a name that is too long, too


def make_missing_base_error(directory: Path) -> UserError:
    """Return the error for the PEFT directory `directory`, whose base model is missing."""
    base = _read_base_name(directory) or "(none that can be read)"
    return UserError(
        f"{directory / ADAPTER_CONFIG}: the base model {base} is not a directory here; "
        "name it in base_model_name_or_path (a relative path starts at the current directory), or by --base of "
        "meshwright adapter"
    )


def _read_base_name(directory: Path) -> str | None:
    """Return the base model that `adapter_config.json` in the PEFT directory `directory` names; None without one."""
    try:
        base = read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None
    return base if isinstance(base, str) else None


def check_initial_adapter(directory: str | Path, config: ModelConfig) -> None:
    """Check that a directory holds an adapter with the settings and modules of the adapter of `config`; raise
    `UserError` if not. The values of the adapter are not read. directory: value of `adapter.from`: a PEFT directory, or
    a run directory or its directory of checkpoints, of which the newest checkpoint is checked."""
    place = Path(directory)
    if not (place / ADAPTER_CONFIG).is_file():
        found = [path.parent for each in ("checkpoints/", "") for path in place.glob(f"{each}step-*/{ADAPTER_CONFIG}")]
        place = max(found, key=lambda path: (len(path.name), path.name), default=place)  # numbers have 6 digits or more
    path = place / ADAPTER_FILE
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
    except (OSError, SafetensorError) as error:
        what = error_reason(error) if isinstance(error, OSError) else str(error)
        raise UserError(f"adapter.from: {path} cannot be read: {what}; a PEFT directory or a run is needed") from None
    refuse_other_adapter(place, config, read_adapter_config(place, names))


def refuse_other_adapter(directory: str | Path, config: ModelConfig, other: AdapterConfig) -> None:
    """Raise `UserError` if the settings of an adapter in a directory differ from the adapter of a model. directory:
    PEFT directory of the adapter, for the message. config: configuration of the model. other: settings of the adapter
    in the directory."""
    if (difference := find_adapter_difference(config, other)) is not None:
        raise UserError(f"{directory}: holds an adapter with {difference}; give [adapter] the values of the directory")


def read_adapter_config(directory: str | Path, tensors: Iterable[str]) -> AdapterConfig:
    """Read the `adapter_config.json` of a PEFT directory. tensors: names of the tensors in its safetensors file, from
    which the adapted modules follow. Raises `UserError` if `adapter_config.json` is missing or damaged, or describes a
    kind of adapter that is not supported."""
    path = Path(directory) / ADAPTER_CONFIG
    try:
        data = read_json(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error_reason(error)}") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("peft_type") != "LORA":
        other = data.get("peft_type") if isinstance(data, dict) else None
        raise UserError(f'{path}: peft_type must be "LORA", not {str(other)[:40]!r}')
    for key, unused in _UNUSED.items():
        if data.get(key) not in unused:
            raise UserError(f"{path}: {key} is set, and adapters with it are not supported; leave it unset in PEFT")
    rank, alpha = data.get("r"), data.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise UserError(f"{path}: r must be a whole number from 1 to {MAX_RANK}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1e9:
        raise UserError(f"{path}: lora_alpha must be a positive number")
    if data.get("use_dora") and data.get("use_rslora"):
        raise UserError(f"{path}: use_dora and use_rslora are both set; adapters with both are not supported")
    modules = sorted(
        {name.removeprefix(PEFT_PREFIX).partition(".lora_")[0] for name in tensors if name.startswith(PEFT_PREFIX)}
    )
    if not modules:
        raise UserError(f"{path.parent / ADAPTER_FILE}: no tensor of a LoRA adapter ({PEFT_PREFIX}...lora_A.weight)")
    kind: AdapterKind = "dora" if data.get("use_dora") else "rslora" if data.get("use_rslora") else "lora"
    base = data.get("base_model_name_or_path")
    return AdapterConfig(kind, rank, float(alpha), tuple(modules), base if isinstance(base, str) else "")


def find_adapter_difference(config: ModelConfig, other: AdapterConfig) -> str | None:
    """Compare the adapter of a model configuration (`config`) with `other`, read from a checkpoint: return None if the
    two adapters are equal, else the first difference as text such as "rank 8, not 16"."""
    adapter = config.adapter
    assert adapter is not None
    for name in ("kind", "rank", "alpha"):
        if getattr(adapter, name) != getattr(other, name):
            return f"{name} {getattr(other, name)}, not {getattr(adapter, name)}"
    entries = parameter_table(dataclasses.replace(config, adapter=None)).entries
    wanted, found = set(target_modules(entries, adapter.targets)), set(other.targets)
    for module in sorted(wanted ^ found):
        return f"{'no' if module in wanted else 'an'} adapter of {module}"
    return None
