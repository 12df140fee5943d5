"""Typed access to the keys of a ``config.json``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from meshwright.errors import UserError
from meshwright.limits import make_limit_error, shorten_repr

# Hugging Face's names of activations -> ours. Both tanh names are the same function.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


class Reader:
    """Typed access to the keys of a ``config.json`` object (`data`). defaults: {key: value if the key is missing}.
    where: name of the configuration; error messages contain it and the key."""

    def __init__(self, data: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        """Wrap a ``config.json`` object (`data`). `defaults`: the family's values of missing keys; `where`: name of the
        configuration in errors."""
        self.data, self.defaults, self.where = data, defaults, where

    def get(self, keys: Iterable[str], default: Any = None) -> tuple[str, Any]:
        """Return (key, value) for the first of the synonymous ``keys`` that is present. If none is present, the first
        key is returned, and the value is the family's default for it, or `default` if the family has none. Raises
        ``UserError`` if two synonyms are present with different values."""
        keys = tuple(keys)
        present = [key for key in keys if key in self.data]
        for other in present[1:]:
            if self.data[other] != self.data[present[0]] and self.data[other] is not None:
                raise UserError(
                    f'{self.where}: "{present[0]}" is {shorten_repr(self.data[present[0]])} and "{other}", another '
                    f"name of it, {shorten_repr(self.data[other])}; leave one out"
                )
        if present:
            return present[0], self.data[present[0]]
        return keys[0], self.defaults.get(keys[0], default)

    def integer(self, limit: str, keys: Iterable[str], default: int | None = None) -> int:
        """Return the integer under the first of the synonyms ``keys`` that is present, else `default` (None: the key is
        required). ``UserError`` if it is below 1 or above a limit. limit: name of this limit in `meshwright.limits`."""
        key, value = self.get(keys, default)
        if value is None:
            value = default
        if value is None:
            raise UserError(f'{self.where}: "{key}" is missing; it must be a whole number above 0')
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f'{self.where}: "{key}" must be a whole number above 0, not {shorten_repr(value)}')
        if problem := make_limit_error(limit, value, f'"{key}"'):
            raise UserError(f"{self.where}: {problem}")
        return value

    def number(self, keys: Iterable[str], default: float) -> float:
        """Return the number under the first of the synonyms ``keys`` that is present, else `default`. ``UserError``
        unless it is finite and above 0."""
        key, value = self.get(keys, default)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise UserError(f'{self.where}: "{key}" must be a number above 0, not {shorten_repr(value)}')
        if value > sys.float_info.max:
            raise UserError(f'{self.where}: "{key}" {shorten_repr(value)} is too large for a floating-point number')
        return float(value)

    def boolean(self, key: str, numbers: bool = False) -> bool:
        """Return the boolean under ``key``, False for null. A missing key has the family's default for it, else False.
        numbers: True to accept a number too, where 0 means False. ``UserError`` for any other type.
        """
        _, value = self.get((key,), False)
        value = False if value is None else value
        value = bool(value) if numbers and isinstance(value, int | float) else value
        if not isinstance(value, bool):
            raise UserError(f'{self.where}: "{key}" must be true or false, not {shorten_repr(value)}')
        return value

    def activation(self, keys: Iterable[str], default: str) -> str:
        """Return Meshwright's name ("silu", "gelu", "gelu_tanh", "relu", "relu2") of an activation function. Its
        Hugging Face name is the value of the first of the synonyms ``keys`` that is present, else `default`.
        ``UserError`` for an unknown name.
        """
        key, value = self.get(keys, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise UserError(
                f'{self.where}: "{key}" {shorten_repr(value)} is not supported (supported: {", ".join(ACTIVATIONS)})'
            )
        return ACTIVATIONS[value]

    def tokens(self, key: str, vocabulary: int) -> tuple[int, ...]:
        """Return the token ids under ``key``, whose value is one id, a list of ids or null; empty for null or a missing
        key without default. Ids outside the `vocabulary` (number of token ids) are left out. ``UserError`` for another
        type."""
        _, value = self.get((key,))
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise UserError(
                    f'{self.where}: "{key}" must be a token id or a list of them, not {shorten_repr(value)}'
                )
        return tuple(token for token in ids if 0 <= token < vocabulary)
