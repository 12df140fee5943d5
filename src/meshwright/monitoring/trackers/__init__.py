"""Experiment trackers that receive a run's metrics. Another one is a class like those here, named in `track.to` as
`module:Class`, which needs `--trust-recipe`, or by an entry point of the group `meshwright.trackers`. Free of torch."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from meshwright.errors import UserError
from meshwright.names import nearest, unknown
from meshwright.recipe import Recipe

ENTRY_POINTS = "meshwright.trackers"
BUILT_IN = {
    "tensorboard": "meshwright.monitoring.trackers.tensorboard:TensorBoardTracker",
    "mlflow": "meshwright.monitoring.trackers.mlflow:MLflowTracker",
}

_HOSTED = ("databricks", "databricks-uc", "uc")  # server names of MLflow that are not URLs

FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"


@dataclass(slots=True)
class TrackedRun:
    """Description of the run that a tracker gets at its start.

    Attributes:
        name: Name of the run.
        directory: Run directory.
        fresh: False if the run is resumed.
        step: Last step whose values the tracker has certainly received. Values of later steps may be sent again; the
            tracker should then show each step once.
        kept: Strings that are stored in the run directory for the next resume, such as the run's id on a server; the
            tracker may change them.
    """

    name: str
    directory: Path
    fresh: bool
    step: int
    kept: dict[str, str] = field(default_factory=dict)


class Tracker(Protocol):
    """Interface of an experiment tracker. Rank 0 creates the tracker before the first step, with the tracker's
    `track.options` as keyword arguments.

    All methods are called by one background thread: they may block, and may raise anything.
    """

    def start(self, run: TrackedRun, recipe: Mapping[str, Any]) -> None:
        """Begin or resume the run in the tracker. run: description of the run; recipe: {dotted key: value}, such as
        {"train.steps": 100}. If the method raises, it is called again."""

    def log(self, step: int, values: Mapping[str, float | str]) -> None:
        """Log the values of a step. values: {name: number or, for some values, text}. If the method raises, it is
        called again with the same values."""

    def finish(self, status: str) -> None:
        """End the run in the tracker. status: "finished", "stopped" (the run may be resumed) or "failed"."""


def check_trackers(recipe: Recipe) -> None:
    """Check the trackers named in `track.to` of the recipe. Raises `UserError` for a tracker that is unknown, cannot be
    loaded, or does not accept its options."""
    track = recipe.track
    for name in track.to:
        load_tracker_class(recipe, name)
    known = {*BUILT_IN, *_list_entry_points(), *track.to}
    for name in track.options:
        if name not in known:
            where = f"{recipe.where('track.options')}: track.options"
            raise UserError(f"{where}: {unknown('tracker', name, sorted(known))}")


def load_tracker_class(recipe: Recipe, name: str) -> Callable[..., Tracker]:
    """Load and return the class of the tracker called `name` in `track.to`. `UserError` if the name is unknown, is code
    that needs a trusted recipe (--trust-recipe), cannot be loaded, is not a tracker, or does not accept its
    `track.options`."""
    where = f"{recipe.where('track.to')}: track.to"
    known = BUILT_IN | _list_entry_points()
    if name not in known and ":" not in name:
        raise UserError(f"{where}: {unknown('tracker', name, (*known, 'module:Class'))}")
    if name not in known and not recipe.trusted:
        raise UserError(
            f'{where}: "{name}" is code that the recipe names; if you trust its author, add --trust-recipe '
            "(in Python trust=True), or install it with an entry point of the group meshwright.trackers"
        )
    module, _, attribute = known.get(name, name).partition(":")
    try:
        made: Any = importlib.import_module(module)
        for part in attribute.split("."):
            made = getattr(made, part)
    except (ImportError, AttributeError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        hint = "; install it, or add its directory to PYTHONPATH" if missing else ""
        raise UserError(f'{where}: tracker "{name}" cannot be loaded: {error}{hint}') from None
    if not _is_tracker(made):
        raise UserError(
            f'{where}: "{name}" is not a tracker: it must be a class with the methods start(run, recipe), '
            "log(step, values) and finish(status)"
        )
    if name in BUILT_IN:
        for package in made.packages:
            if find_spec(package) is None:
                raise UserError(
                    f"{where}: tracker {name} needs {package}: run `pip install 'meshwright[{name}]'` or leave it out"
                )
    _check_options(recipe, name, made)
    for option, value in recipe.track.options.get(name, {}).items():
        if not recipe.trusted and _contains_server_address(value):
            raise UserError(
                f"{recipe.where('track.options')}: track.options.{name}.{option}: your credentials (environment, files "
                "such as ~/.mlflow/credentials) could be sent to the server that the recipe names; if you trust the "
                "author of the recipe, add --trust-recipe (in Python trust=True)"
            )
    return made  # type: ignore[no-any-return]


def _is_tracker(made: object) -> bool:
    """Return True if `made`, loaded from a tracker's path, is a class with the methods of `Tracker`."""
    if not isinstance(made, type):
        return False
    for name, arguments in (("start", 2), ("log", 2), ("finish", 1)):
        method = getattr(made, name, None)
        if not callable(method):
            return False
        try:
            inspect.signature(method).bind(*[None] * (1 + arguments))
        except (TypeError, ValueError):
            return False
    return True


def _contains_server_address(value: object) -> bool:
    """Return True if the value of a tracker's option contains the address of a server, to which credentials could be
    sent. Addresses of local files and SQLite databases do not count."""
    if isinstance(value, Mapping):
        return any(map(_contains_server_address, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_contains_server_address, value))
    text = str(value).strip().lower()
    scheme, separator, _ = text.partition("://")
    return text in _HOSTED or (bool(separator) and scheme.split("+")[0] not in ("file", "sqlite"))


def make_tracker(recipe: Recipe, name: str) -> Tracker:
    """Create the tracker called `name` with its `track.options` in the recipe. `UserError` if the tracker's class
    cannot be loaded or does not accept the options."""
    return load_tracker_class(recipe, name)(**recipe.track.options.get(name, {}))


def _check_options(recipe: Recipe, name: str, made: Callable[..., Tracker]) -> None:
    """Check that the tracker class `made` accepts the `track.options` of the tracker called `name`. Raises
    `UserError`."""
    options = recipe.track.options.get(name, {})
    where = f"{recipe.where('track.options')}: track.options.{name}"
    try:
        signature = inspect.signature(made)
        signature.bind(**options)
    except TypeError as error:
        takes = [key for key in signature.parameters if key != "self"]
        wrong = next((key for key in options if key not in takes), None)
        if wrong is None:
            raise UserError(f"{where}: {error}") from None
        meant = nearest(wrong, takes)
        raise UserError(
            f'{where}: unknown option "{wrong}"'
            + (f"; did you mean {meant}?" if meant else f" (it takes {', '.join(takes) or 'none'})")
        ) from None


def _list_entry_points() -> dict[str, str]:
    """Return the trackers that installed packages provide: entry-point name -> "module:Class"."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
