"""Shared fixtures: paths, the command line in this process, and a small recipe."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest

from meshwright.comm import local
from meshwright.layout import AXES, Layout

# Models here are so small that threads wait for each other longer than they compute. Torch reads this when it is
# loaded, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Runs in tests have no hardware profile: the user's must not be found, and none is measured.
os.environ["MESHWRIGHT_PROBE"] = "0"
_HOME = Path(__file__).resolve().parent.parent / ".pytest_cache" / "home"
os.environ["XDG_CONFIG_HOME"], os.environ["XDG_CACHE_HOME"] = str(_HOME / "config"), str(_HOME / "cache")

# Tests start hundreds of processes. Where bytecode is not kept, each of them compiles the package anew, for a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# On a busy machine an example may take any time.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Collections while modules are imported and tests collected would free nothing, for half a minute of processor time.
gc.disable()

# Nearly all ranks in tests compute a model, some compile it, and their cases are in modules that import pytest: the
# fork server loads their imports once. It forks commands, too. Process groups of a rank share a thread.
local._SERVER_CODE = local._SERVER_CODE.replace(
    "; serve(",
    "; import meshwright.training.loop, meshwright.verification.ranks; "
    "import pytest, torch._inductor.compile_fx, torch._dynamo.backends.common, torch.utils.flop_counter; "
    "from tests import forked_commands, gloo_device; forked_commands.install(); gloo_device.install(); serve(",
)

REPOSITORY = Path(__file__).resolve().parent.parent

LONGEST_FILES = (REPOSITORY / "tests" / "longest_files.txt").read_text().split()
"""Files of tests that take longest, longest first. If one of them began last, the other processes would wait for it."""


def exhaustive(*values: object) -> list[Any]:
    """Values of a parameter (a plain tuple: of several parameters) that run with --exhaustive only."""
    return [pytest.param(*(v if type(v) is tuple else (v,)), marks=pytest.mark.exhaustive) for v in values]


def covering(cases: Iterable[Any], list_features: Callable[..., set[Any]]) -> list[Any]:
    """Values of a parameter, in order: those of a greedy set cover run always, the others with --exhaustive only. The
    cover has every feature of any case; its next case is the one with the most features that it lacks. Cases with
    marks, which may be skipped, only add features that no other case has. Features that interact belong in pairs.
    cases: values, tuples of several or `pytest.param`. list_features: returns the features of a case, given its values
    as arguments."""
    marked = type(pytest.param())
    every = [
        each if type(each) is marked else pytest.param(*(each if type(each) is tuple else (each,))) for each in cases
    ]
    features = [list_features(*case.values) for case in every]
    chosen, covered = set[int](), set[Any]()
    for with_marks in (False, True):
        group = [index for index, case in enumerate(every) if bool(case.marks) == with_marks]
        lacking = set[Any]().union(*(features[index] for index in group)) - covered
        while lacking:
            best = max(group, key=lambda index: len(features[index] & lacking))
            chosen.add(best)
            covered |= features[best]
            lacking -= features[best]
    rest = pytest.mark.exhaustive
    return [
        case if index in chosen else pytest.param(*case.values, marks=[*case.marks, rest], id=case.id)
        for index, case in enumerate(every)
    ]


def list_axes(text: str) -> set[tuple[object, ...]]:
    """Return the features of a layout: each axis of several ranks, with its variant but without its size; ZeRO stage,
    with and without hybrid sharding; one or several micro-batches; activation checkpointing; precision."""
    layout = Layout.parse(text)
    variants = {"tp": layout.tensor_sequence_parallel, "cp": layout.cp_method, "pp": layout.schedule}
    axes = {(axis, variants.get(axis)) for axis in (*AXES, "ep", "etp") if layout.group_size(axis) > 1}
    return axes | {
        ("zero", layout.zero),
        ("hybrid", layout.hybrid is not None),
        ("several micro-batches", layout.micro_batches > 1),
        ("recompute", layout.recompute),
        ("precision", layout.precision),
    }


def list_config_features(config: Any, *names: str) -> set[tuple[object, ...]]:
    """Return the features of a model's configuration: each field but the family's name. Truth values and strings count
    with their value; numbers, tuples and None count as equal to the default or 0, or as different from both. names:
    names of the fields that lead to `config`, before its own."""
    found = set[tuple[object, ...]]()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found |= list_config_features(value, *names, field.name)
        if field.name != "family":
            shown = value if isinstance(value, bool | str) else value not in (field.default, 0)
            found.add((*names, field.name, shown))
    return found


def pytest_collection_finish() -> None:
    """Collect garbage from now on, without looking through what the tests consist of, and seldom: modules that tests
    import later are looked through each time."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


class Outcome(NamedTuple):
    """Result of a command: exit code, standard output and standard error."""

    code: int
    output: str
    errors: str


@pytest.fixture(scope="session")
def two() -> Iterator[local.LocalRanks]:
    with local.LocalRanks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four() -> Iterator[local.LocalRanks]:
    with local.LocalRanks(4) as ranks:
        yield ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run the tests marked exhaustive, too")
    parser.addoption("--fuzz", action="store_true", help="run the tests marked fuzz, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker in ("exhaustive", "fuzz"):
        if config.getoption(f"--{marker}"):
            continue
        left_out = [item for item in items if item.get_closest_marker(marker)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker(marker)]
    if hasattr(config, "workerinput"):  # one of several workers, which get whole files in this order
        places = {REPOSITORY / "tests" / name: place for place, name in enumerate(LONGEST_FILES)}
        items.sort(key=lambda item: (places.get(item.path, len(places)), item.path))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let each of several workers begin to collect elsewhere: in a new checkout, one of them compiles a module and the
    others read its bytecode."""
    report = yield
    if hasattr(collector.config, "workerinput") and isinstance(collector, pytest.Directory) and report.passed:
        worker = collector.config.workerinput
        begin = len(report.result) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        report.result = report.result[begin:] + report.result[:begin]
    return report


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Directory of reference data; tests that need it are skipped if it is missing."""
    path = REPOSITORY.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no reference data at {path}")
    return path


@pytest.fixture
def command_line(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs `meshwright ARGUMENTS...` in this process."""
    from meshwright.cli.main import main

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return run


TINY_RECIPE = """
layout = "dp1"

[run]
seed = 7

[model]
family = "llama"
layers = 2
hidden = 16
heads = 4
kv_heads = 2
intermediate = 32

[data]
source = "stdlib"
tokenizer = "bytes"
sequence = 32

[train]
steps = 4
batch = 4
learning_rate = 1e-2
"""


@pytest.fixture
def tiny_recipe(tmp_path: Path) -> Path:
    """The file of a small valid recipe."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY_RECIPE)
    return path


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """Context in which transformers computes norms, rotations and scores in float64 instead of float32."""
    import torch

    importlib.import_module("torch._inductor.compile_fx")  # keeps tables by type: they must not be made inside

    @contextmanager
    def inside() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "float32", torch.float64)
            patch.setattr(torch, "float", torch.float64)
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            yield

    return inside
