"""RoPE scaling methods (linear, llama3, yarn, longrope), which extend rotary positions beyond the training context, as
data.

Reads and writes both spellings of Hugging Face: ``rope_theta`` with ``rope_scaling`` (transformers 4) and one
``rope_parameters`` (transformers 5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.errors import UserError
from meshwright.limits import get_limit, shorten_repr
from meshwright.names import ROPE_SCALINGS

RopeKind = Literal["linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """RoPE scaling method (``kind``) and its parameters. ``None`` in an optional field means the method's own default.

    "linear" (Chen et al. 2023, arXiv:2306.15595): every rotary frequency is divided by ``factor``.

    "llama3" (Llama 3.1): frequencies with wavelengths above ``original_max_positions / low_frequency_factor`` are
    divided by ``factor``; frequencies with wavelengths below ``original_max_positions / high_frequency_factor`` are
    kept; between the two there is a ramp.

    "yarn" (Peng et al. 2023, arXiv:2309.00071): dimensions with more than ``beta_fast`` rotations within
    ``original_max_positions`` keep their frequency, dimensions with fewer than ``beta_slow`` rotations have it divided
    by ``factor``, with a ramp between. ``truncate``: False: do not round the ends of the ramp to whole dimensions.
    Cosine and sine are multiplied by ``attention_scale``: ``attention_factor`` if given, else f(``mscale``) /
    f(``mscale_all_dim``) if both are given, with f(m) = 0.1 m ln(``factor``) + 1, else f(1).

    "longrope" (Ding et al. 2024, arXiv:2402.13753): each rotary frequency is divided by a separate factor, one of
    ``long_factors`` for sequences of more than ``original_max_positions`` tokens, else one of ``short_factors``. Cosine
    and sine are multiplied by ``attention_factor`` or, without it, by sqrt(1 + ln(factor) /
    ln(original_max_positions)), or by 1 if ``factor`` is at most 1.
    """

    kind: RopeKind
    factor: float
    original_max_positions: int | None = None
    low_frequency_factor: float | None = None
    high_frequency_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def attention_scale(self) -> float:
        """Factor on cosine and sine: 1, except for yarn (by default 0.1 ln(factor) + 1) and longrope."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            assert self.original_max_positions is not None
            if self.factor <= 1:
                return 1.0
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_positions))
        if self.mscale and self.mscale_all_dim:
            return _compute_yarn_scale(self.factor, self.mscale) / _compute_yarn_scale(self.factor, self.mscale_all_dim)
        return _compute_yarn_scale(self.factor, 1.0)

    @property
    def latent_score_scale(self) -> float:
        """Factor on the scores of latent attention, besides 1 / sqrt(head size): (0.1 ``mscale_all_dim`` ln(factor) +
        1)² (DeepSeek-V2); 1 without ``mscale_all_dim`` or for a factor of at most 1."""
        return _compute_yarn_scale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary positions of a layer. size: number of rotated features of a head, from which the wavelengths follow; if it
    is odd, the next feature is rotated too, as in transformers. theta: base of the wavelengths. scaling: RoPE scaling
    method; None: no scaling."""

    size: int
    theta: float
    scaling: RopeScaling | None = None

    @property
    def pairs(self) -> int:
        """Number of pairs of features that are rotated together."""
        return (self.size + 1) // 2

    @property
    def attention_scale(self) -> float:
        """Factor on cosine and sine."""
        return self.scaling.attention_scale if self.scaling else 1.0


@dataclass(frozen=True, slots=True)
class Temperature:
    """Position-dependent temperature of queries (Llama 4): at position p queries are multiplied by 1 + `scale` log(1 +
    floor((p + 1) / `floor`)).
    """

    scale: float
    floor: int


def _compute_yarn_scale(factor: float, mscale: float) -> float:
    """Return YaRN's factor on cosine and sine, 0.1 mscale ln(factor) + 1; 1 if factor <= 1 (the context is not
    extended)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


# Field of RopeScaling -> key in a configuration, for each kind.
_KEYS: dict[RopeKind, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_positions": "original_max_position_embeddings",
        "low_frequency_factor": "low_freq_factor",
        "high_frequency_factor": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_max_positions": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "truncate",
    },
    "longrope": {
        "factor": "factor",
        "original_max_positions": "original_max_position_embeddings",
        "attention_factor": "attention_factor",
        "short_factors": "short_factor",
        "long_factors": "long_factor",
    },
}
_REQUIRED: dict[RopeKind, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}


def read_rope_scaling(entry: Mapping[str, Any], *, max_positions: int, where: str) -> RopeScaling | None:
    """Read a RopeScaling from a ``rope_scaling`` or ``rope_parameters`` object (`entry`); None for plain RoPE.

    ``where``: name of the object in errors (``config.json: rope_scaling``). ``max_positions``: default of
    ``original_max_position_embeddings`` (tokens), as in transformers. Raises ``UserError`` for an unknown method or
    key, and for a missing or invalid value.
    """
    kind = entry.get("rope_type", entry.get("type", "default"))
    plain = kind in (None, "default")
    if not plain and kind not in ROPE_SCALINGS:
        raise UserError(
            f'{where}: RoPE scaling "{kind}" is not supported (supported: default, {", ".join(ROPE_SCALINGS)})'
        )
    keys = {} if plain else _KEYS[kind]
    unknown = sorted(set(entry) - set(keys.values()) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
    # Keys of other kinds have no effect: transformers ignores them too, and its own files contain some.
    harmless = {key for keys_of_kind in _KEYS.values() for key in keys_of_kind.values()}
    for key in unknown:
        if key not in harmless:
            raise UserError(
                f'{where}: unknown key "{key}" for RoPE scaling "{kind or "default"}" (known: '
                f"{', '.join(keys.values()) or 'rope_theta'})"
            )
    if plain:
        return None
    for key in _REQUIRED[kind]:
        if entry.get(key) is None:
            raise UserError(f'{where}: RoPE scaling "{kind}" needs "{key}"')

    values: dict[str, Any] = {}
    for field, key in keys.items():
        value = entry.get(key)
        if value is None:
            continue
        if key == "truncate":
            if not isinstance(value, bool):
                raise UserError(f'{where}: "{key}" must be true or false, not {shorten_repr(value)}')
            values[field] = value
        elif key in ("short_factor", "long_factor"):
            values[field] = _read_factors(value, f'{where}: "{key}"')
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= get_limit("count"):
            raise UserError(
                f'{where}: "{key}" must be a number above 0 and at most {get_limit("count")}, not {shorten_repr(value)}'
            )
        elif key == "original_max_position_embeddings":
            if value != int(value):
                raise UserError(f'{where}: "{key}" must be a whole number, not {shorten_repr(value)}')
            values[field] = int(value)
        else:
            values[field] = float(value)
    if kind != "linear":
        values.setdefault("original_max_positions", max_positions)
    if "factor" not in values:
        if "original_max_position_embeddings" not in entry:
            raise UserError(f'{where}: RoPE scaling "{kind}" needs "factor" or "original_max_position_embeddings"')
        values["factor"] = max_positions / values["original_max_positions"]
    if values["factor"] < 1 and kind != "longrope":
        raise UserError(f'{where}: "factor" must be at least 1, not {values["factor"]:g}')
    if kind == "llama3" and values["high_frequency_factor"] < values["low_frequency_factor"]:
        raise UserError(f'{where}: "high_freq_factor" must be at least "low_freq_factor"')
    if kind == "longrope" and values["original_max_positions"] < 2:
        raise UserError(f'{where}: "original_max_position_embeddings" must be at least 2')
    if kind == "yarn" and values.get("beta_fast", 32.0) <= values.get("beta_slow", 1.0):
        raise UserError(f'{where}: "beta_fast" must be greater than "beta_slow"')
    return RopeScaling(kind=kind, **values)


def _read_factors(value: object, where: str) -> tuple[float, ...]:
    """Return a list of factors of rotary frequencies (`value`) as a tuple. where: name of the key in errors. Raises
    ``UserError`` unless it is a list of numbers above 0, of bounded length."""
    if not isinstance(value, list) or len(value) > get_limit("head_dim"):
        raise UserError(f"{where} must be a list with one number for each rotated pair, not {shorten_repr(value)}")
    for factor in value:
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= get_limit("count"):
            raise UserError(f"{where} must hold numbers above 0, not {shorten_repr(factor)}")
    return tuple(float(factor) for factor in value)


def write_rope_scaling(scaling: RopeScaling) -> dict[str, Any]:
    """Return the ``rope_scaling`` object of a ``config.json`` for `scaling`, without ``rope_theta``."""
    entry: dict[str, Any] = {"rope_type": scaling.kind}
    for field, key in _KEYS[scaling.kind].items():
        value = getattr(scaling, field)
        if value is not None:
            entry[key] = list(value) if isinstance(value, tuple) else value
    return entry
