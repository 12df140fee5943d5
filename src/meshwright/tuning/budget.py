"""Budget of a study: what its trials have used of it, and whether another one fits. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.recipe import Recipe

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


@dataclass(frozen=True)
class Budget:
    """Limits of a study, over all its workers; None: unlimited.

    trials: maximum number of trials. steps, tokens, seconds: maximum numbers of training steps, of tokens and of
    seconds of training, summed over the trials. largest_steps, largest_tokens: steps and tokens of the longest trial
    that the search space allows.
    """

    trials: int | None
    steps: int | None
    tokens: int | None
    seconds: float | None
    largest_steps: int
    largest_tokens: int

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Budget:
        """Return the budget that the recipe's table [tune] sets."""
        tune, largest = recipe.tune, cls.compute_largest_trial(recipe)
        return cls(tune.trials, tune.steps, tune.tokens, tune.seconds, largest["steps"], largest["tokens"])

    @staticmethod
    def compute_largest_trial(recipe: Recipe) -> dict[str, int]:
        """Return {"steps": number, "tokens": number} of the longest trial that the recipe's search space allows."""
        most = {"train.steps": recipe.train.steps, "train.batch": recipe.train.batch}
        for dimension in recipe.tune.dimensions:
            if dimension.key in most:
                most[dimension.key] = int(max(dimension.list_extreme_values()))
        steps = most["train.steps"]
        return {"steps": steps, "tokens": steps * most["train.batch"] * recipe.data.sequence}

    def allows_another(self, trials: Sequence[FrozenTrial]) -> bool:
        """Return True if the budget allows one more trial of the largest size. trials: all trials so far; a trial that
        is still running counts with all steps and tokens that it may use."""
        if self.trials is not None and len(trials) >= self.trials:
            return False
        for name, limit, largest in (("steps", self.steps, self.largest_steps),
                                     ("tokens", self.tokens, self.largest_tokens)):  # fmt: skip
            if limit is not None and sum(_get_usage(trial, name) for trial in trials) + largest > limit:
                return False
        return self.seconds is None or sum_seconds(trials) < self.seconds


def _get_usage(trial: FrozenTrial, name: str) -> int:
    """Return the steps or tokens (`name`: "steps" or "tokens") that a trial counts against the budget. An ended trial
    counts with the steps or tokens that it used, a running trial with all that it may use.
    """
    kind = name if trial.state.is_finished() else f"reserved_{name}"
    return int(trial.user_attrs.get(kind, 0))


def sum_seconds(trials: Sequence[FrozenTrial]) -> float:
    """Return the seconds of training of all trials together, as their workers last recorded them."""
    return sum(float(trial.user_attrs.get("seconds", 0.0)) for trial in trials)


def count_states(trials: Sequence[FrozenTrial]) -> dict[str, Any]:
    """Return the numbers of trials in all and by state: {"trials": number of all, "complete": number, "pruned": number,
    "failed": number, "running": number}."""
    names = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}
    counts = {"trials": len(trials)} | dict.fromkeys(names.values(), 0)
    for trial in trials:
        counts[names.get(trial.state.name, "running")] += 1
    return counts
