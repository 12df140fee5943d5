"""The house: a room imports only from rooms above it, and the rooms without torch stay without it."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"

# From top to bottom. "model as data" is the torch-free part of model/.
ROOMS = [
    *(
        "errors",
        "terminal",
        "limits",
        "names",
        "untrusted",
        "toml",
        "threads",
        "layout",
        "tables",
        "recipe_data",
        "recipe_tables",
        "recipe",
        "program",
        "collectives",
        "schedules",
    ),
    *(
        "model as data",
        "plan",
        "data",
        "comm",
        "probe",
        "model",
        "parallel",
        "train",
        "verify",
        "serve",
        "inspect",
        "cli",
    ),
]
TORCH_FREE = ROOMS[: ROOMS.index("comm")]
MODEL_AS_DATA = {
    *(
        "chunks",
        "config",
        "config_fields",
        "config_json",
        "config_reader",
        "disk_names",
        "encoder_json",
        "experts_json",
        "families",
        "foreign",
        "parameters",
        "partition",
        "presets",
        "refuse",
        "rope_scaling",
        "rows",
        "stage_times",
        "stages",
        "work",
    ),
}
# Below, and yet without torch: what starts the processes that load it, and how it reads their calls.
TORCH_FREE_MODULES = {
    "meshwright.train.launcher",
    *(
        f"meshwright.comm.{name}"
        for name in ("call_log", "call_ring", "disagreement", "rank_report", "verdict", "waiting")
    ),
}
BRINGS_TORCH = ("torch", "transformers", "accelerate", "safetensors.torch")


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in (SOURCE / "meshwright").rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room(module: str) -> str | None:
    """The room of a module; None for what belongs to none: the package's own files and the empty model/__init__."""
    parts = module.split(".")[1:]
    if parts in ([], ["__main__"], ["model"]):
        return None
    return "model as data" if parts[0] == "model" and parts[1] in MODEL_AS_DATA else parts[0]


def without_torch(module: str) -> bool:
    return room(module) in [*TORCH_FREE, None] or module in TORCH_FREE_MODULES


def imports(source: str, known: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are written in full"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node.lineno, inner if inner in (*known, *BRINGS_TORCH) else str(node.module)


def violations(module: str, source: str, known: dict[str, Path]) -> list[str]:
    """What is wrong with the imports of one file."""
    found = []
    own = room(module)
    for line, imported in imports(source, known):
        other = room(imported) if imported.partition(".")[0] == "meshwright" else None
        if own and other and ROOMS.index(other) > ROOMS.index(own):
            found.append(f"{module}:{line} imports {imported}: room {other} lies below {own}")
        if without_torch(module) and any(f"{imported}.".startswith(f"{name}.") for name in BRINGS_TORCH):
            found.append(f"{module}:{line} imports {imported}: this part of the house has no torch")
    return found


def test_every_module_has_a_room():
    assert {room(module) for module in modules()} - {None} <= set(ROOMS)


def test_a_room_imports_only_from_rooms_above_it():
    known = modules()
    assert [line for module, path in known.items() for line in violations(module, path.read_text(), known)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("meshwright.layout", "import meshwright.recipe"),
        ("meshwright.recipe", "def f():\n    from meshwright.model import config"),
        ("meshwright.model.config", "from meshwright.model import rope"),
        ("meshwright.model.config", "import torch.nn"),
        ("meshwright.plan.flops", "def f():\n    from torch import nn"),
        ("meshwright.data", "from safetensors.torch import load_file"),
        ("meshwright.data", "from safetensors import torch"),
        ("meshwright.comm.mesh", "from meshwright.parallel.data import DataParallel"),
    ],
)
def test_the_check_sees_an_import_from_below(module: str, source: str):
    assert violations(module, source, modules())


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("meshwright.recipe", "from meshwright.layout import Layout"),
        ("meshwright.model.rope", "import torch\nfrom meshwright.model.config import ModelConfig"),
        ("meshwright.data", "import safetensors.numpy, torchlike"),
        ("meshwright.cli.train", "def command():\n    import torch"),
    ],
)
def test_the_check_lets_an_import_from_above_pass(module: str, source: str):
    assert violations(module, source, modules()) == []


def test_types_are_strict_in_every_torch_free_room():
    rules = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["tool"]["mypy"]
    assert rules["strict"]
    relaxed, strict_again = (set(table["module"]) for table in rules["overrides"][:2])
    assert {name.split(".")[1] for name in relaxed}.isdisjoint(TORCH_FREE)
    assert strict_again == {f"meshwright.model.{name}" for name in MODEL_AS_DATA}


def test_importing_the_torch_free_rooms_and_every_command_loads_no_torch():
    names = [
        name for name in modules() if (without_torch(name) or room(name) == "cli") and name != "meshwright.__main__"
    ]
    program = f"""
import importlib, sys
for name in {sorted(names)!r}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"importing {{name}} loads torch")
"""
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
