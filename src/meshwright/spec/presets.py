"""Public model sizes by name.

``presets.json`` holds what matters of each published ``config.json`` and where it is from. ``parameters`` are totals
that others published (model pages, safetensors metadata), a tied matrix counted once; the table gives the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from meshwright.errors import UserError
from meshwright.names import unknown
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_from_huggingface


@dataclass(frozen=True, slots=True)
class Preset:
    """A named model. ``parameters`` is the published exact total, None where there is none to compare with."""

    name: str
    config: ModelConfig
    parameters: int | None
    source: str


@cache
def _tables() -> dict[str, dict[str, Any]]:
    text = resources.files("meshwright.spec").joinpath("presets.json").read_text(encoding="utf-8")
    tables: dict[str, dict[str, Any]] = json.loads(text)
    return tables


@cache
def find(name: str) -> Preset:
    """The preset of this name; ``UserError`` with the nearest name when there is none."""
    tables = _tables()
    if name not in tables:
        raise UserError(unknown("preset", name, tables))
    entry = tables[name]
    like = tables[entry["like"]]["config"] if "like" in entry else {}
    config = config_from_huggingface({**like, **entry["config"]}, where=f"preset {name}")
    return Preset(name, config, entry.get("parameters"), entry["source"])


def preset(name: str) -> ModelConfig:
    """The model of this name; ``UserError`` with the nearest name when there is none."""
    return find(name).config


class _Presets(Mapping[str, Preset]):
    """All presets by name, each made when it is asked for."""

    def __getitem__(self, name: str) -> Preset:
        if name not in _tables():
            raise KeyError(name)
        return find(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_tables())

    def __len__(self) -> int:
        return len(_tables())


PRESETS: Mapping[str, Preset] = _Presets()
