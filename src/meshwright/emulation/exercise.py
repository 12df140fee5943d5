"""Check of an exercise, a script with `one_device()` and `distributed()`: compares what its ranks compute with what one
device computes, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.errors import UserError
from meshwright.limits import shorten_repr

TOLERANCE = 1e-10
"""Largest relative error that passes, far above float64 rounding."""

Result = torch.Tensor | tuple[torch.Tensor, Any]


@dataclass(frozen=True, slots=True)
class WrongTensor:
    """Mismatch found by `run --check`, between a tensor that a script's function `distributed()` returns on the ranks
    and the tensor of the same name that its function `one_device()` returns.

    Attributes:
        name: Key of the tensor in the returned dictionary.
        rank: First rank that returns wrong values; None if some elements are missing on all ranks.
        relative_error: ‖a-b‖ / ‖b‖ of the rank's tensor a and the single device's b; infinite if the shape is wrong or
            elements are missing.
        reason: Text for the user.
    """

    name: str
    rank: int | None
    relative_error: float
    reason: str

    def __str__(self) -> str:
        """Return name, rank and reason as one line for the user."""
        where = "" if self.rank is None else f" on rank {self.rank}"
        return f"{self.name}{where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class ExerciseResult:
    """Result of `run --check`: comparison of the tensors that a script's function `distributed()` returns on all ranks
    with the tensors that its function `one_device()` returns.

    wrong: tensors that differ, in the order in which one_device() returns them. compared: number of tensors. worst:
    largest relative error ‖a-b‖ / ‖b‖ of any tensor on any rank.
    """

    wrong: tuple[WrongTensor, ...]
    compared: int
    worst: float

    @property
    def passed(self) -> bool:
        """True if the tensors of all ranks agree with those of the single device."""
        return not self.wrong


def get_function(namespace: Mapping[str, Any], name: str, script: str) -> Callable[[], Mapping[str, Any]]:
    """Return the function called `name`, "distributed" or "one_device", of a script that is checked with `run --check`.
    namespace: global variables of the script. script: path of the script, for the error message. Raises UserError if
    there is no such function."""
    function = namespace.get(name)
    if not callable(function):
        raise make_missing_function_error(name, script)
    return function  # type: ignore[no-any-return]


def make_missing_function_error(name: str, script: str) -> UserError:
    """Return the error for a script that is checked with `run --check` and lacks the function `name`. script: path of
    the script."""
    return UserError(
        f"{script} has no function {name}(): a script for --check needs one_device() and distributed(), which "
        "return the tensors to compare by name"
    )


def compare_ranks(truth: Mapping[str, torch.Tensor], ranks: Sequence[Mapping[str, Result]]) -> ExerciseResult:
    """Compare the tensors that a script's `distributed()` returned on all ranks with the tensors that its
    `one_device()` returned. A tensor is wrong if its relative error ‖a-b‖ / ‖b‖ exceeds 1e-10 (`TOLERANCE`), or if no
    rank returns some of its elements.

    truth: results of `one_device()`: {name: tensor}, in the order of computation. ranks: results of `distributed()` by
    rank: {name: full tensor, or (slice, index) for the elements `tensor[index]`}. Raises UserError for a name that is
    not in `truth`, for results other than tensors by name, and if `truth` is empty.
    """
    _check_returned("one_device() returns", truth, None)
    if not truth:
        raise UserError("one_device() returns no tensor to compare")
    for rank, results in enumerate(ranks):
        _check_returned(f"distributed() returns on rank {rank}", results, truth)
        if unknown := sorted(set(results) - set(truth)):
            raise UserError(f'distributed() returns "{unknown[0]}" on rank {rank}, one_device() does not')
    wrong, worst = [], 0.0
    for name, whole in truth.items():
        covered = torch.zeros_like(whole, dtype=torch.bool)
        found = None
        for rank, results in enumerate(ranks):
            if name not in results:
                continue
            held = results[name]
            part, index = held if isinstance(held, tuple) else (held, ...)
            covered[index] = True
            error, reason = _compare_tensor(part, whole[index])
            worst = max(worst, error)
            if error > TOLERANCE and found is None:
                found = WrongTensor(name, rank, error, reason)
        if found is None and not bool(covered.all()):
            missing = int((~covered).sum())
            found = WrongTensor(name, None, math.inf, f"no rank returns {missing} of its {whole.numel()} elements")
        if found is not None:
            wrong.append(found)
    return ExerciseResult(tuple(wrong), len(truth), worst)


def _check_returned(prefix: str, returned: Any, truth: Mapping[str, torch.Tensor] | None) -> None:
    """Check the result `returned` of a script's function `distributed()` or `one_device()`. Raise UserError unless the
    result is a dictionary {name: tensor}; for `distributed()` a value may also be a pair (slice of the tensor, index
    expression of the slice).

    prefix: beginning of the error message. truth: if `returned` is the result of `distributed()`, the result of
    `one_device()`, whose names and shapes `returned` must fit; None if `returned` is the result of `one_device()`."""
    if not isinstance(returned, Mapping):
        raise UserError(f"{prefix} {shorten_repr(returned)}: return a dictionary of tensors by name")
    for name, held in returned.items():
        if not isinstance(name, str):
            raise UserError(f"{prefix} a tensor under the key {shorten_repr(name)}: keys must be strings")
        is_pair = truth is not None and isinstance(held, tuple) and len(held) == 2
        part, index = held if is_pair else (held, ...)
        if not isinstance(part, torch.Tensor):
            wanted = "a tensor" if truth is None else "a tensor or (part, index)"
            raise UserError(f'{prefix} {shorten_repr(held)} for "{name}": return {wanted}')
        if truth is not None and name in truth:
            try:
                truth[name][index]
            except (IndexError, TypeError, ValueError) as error:
                shape = list(truth[name].shape)
                raise UserError(f'{prefix} an index for "{name}" that does not fit shape {shape}: {error}') from None


def _compare_tensor(part: torch.Tensor, right: torch.Tensor) -> tuple[float, str]:
    """Compare `part`, the tensor or slice that a rank returned, with `right`, the same elements of the single device's
    tensor; return (relative error, text for the user on what differs). The error is infinite if the shapes differ.
    """
    if part.shape != right.shape:
        return math.inf, f"shape {list(part.shape)}, one device has {list(right.shape)}"
    scale = float(right.double().norm())
    error = float((part.detach().double() - right.detach().double()).norm())
    relative = error / scale if scale else (math.inf if error else 0.0)
    relative = relative if math.isfinite(relative) else math.inf
    return relative, f"relative error {relative:.2e}"
