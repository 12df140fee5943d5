"""Checked numbers and texts from tables that users or other programs write: cluster files and results of runs."""

from __future__ import annotations

from typing import Any

from meshwright.errors import UserError
from meshwright.limits import is_finite_number, shorten_repr


def read_number(value: Any, name: str) -> float:
    """Return `value` as float. Raises `UserError` unless it is a finite number above 0. name: its key, with the file or
    table, with which the error begins."""
    if not is_finite_number(value) or value <= 0:
        raise UserError(f"{name} takes a number above 0, not {shorten_repr(value)}")
    return float(value)


def read_finite_number(value: Any, name: str) -> float:
    """Return `value` as float. Raises `UserError` unless it is a finite number. name: its key, with the file or table,
    with which the error begins."""
    if not is_finite_number(value):
        raise UserError(f"{name} takes a number, not {shorten_repr(value)}")
    return float(value)


def read_count(value: Any, name: str) -> int:
    """Return `value`. Raises `UserError` unless it is a whole number, at least 1. name: its key, with the file or
    table, with which the error begins."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name} takes a whole number, at least 1, not {shorten_repr(value)}")
    return value


def read_text(value: Any, name: str) -> str:
    """Return `value`. Raises `UserError` unless it is text. name: its key, with the file or table, with which the error
    begins."""
    if not isinstance(value, str):
        raise UserError(f"{name} should be text, not {shorten_repr(value)}")
    return value
