"""Configurations of public models by name.

``presets.json`` holds the relevant keys of each published ``config.json`` and its source. ``parameters`` are published
totals (model pages, safetensors metadata), a tied matrix counted once; the parameter table gives the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.names import LISTED, unknown
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_from_huggingface


@dataclass(frozen=True, slots=True)
class Preset:
    """Public model. ``name``: name of the preset, such as "llama-3-8b". ``config``: its architecture. ``parameters``:
    the exact published parameter count; None if no exact count was published. ``source``: origin of the configuration.
    """

    name: str
    config: ModelConfig
    parameters: int | None
    source: str


@cache
def _read_presets() -> dict[str, dict[str, Any]]:
    """Read ``presets.json``; return the JSON object of each preset, by preset name."""
    tables: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
    return tables


@cache
def find_preset(name: str) -> Preset:
    """Return the preset with this name, such as "llama-3-8b". Raises ``UserError``, with the nearest name, if there is
    none."""
    tables = _read_presets()
    if name not in tables:
        raise UserError(unknown("preset", name, tables, LISTED))
    entry = tables[name]
    like = tables[entry["like"]]["config"] if "like" in entry else {}
    config = config_from_huggingface({**like, **entry["config"]}, where=f"preset {name}")
    return Preset(name, config, entry.get("parameters"), entry["source"])


def preset(name: str) -> ModelConfig:
    """Return the ModelConfig of the preset with this name, such as "llama-3-8b". Raises ``UserError``, with the nearest
    name, if there is none."""
    return find_preset(name).config


class _Presets(Mapping[str, Preset]):
    """Mapping from preset name ("llama-3-8b") to `Preset`; each preset is built on first access."""

    def __getitem__(self, name: str) -> Preset:
        """Return the preset of this name; ``KeyError`` if there is none."""
        if name not in _read_presets():
            raise KeyError(name)
        return find_preset(name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the preset names."""
        return iter(_read_presets())

    def __len__(self) -> int:
        """Return the number of presets."""
        return len(_read_presets())


PRESETS: Mapping[str, Preset] = _Presets()
