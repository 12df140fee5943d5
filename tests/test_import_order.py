"""Import order: a package imports only from packages before it in `PACKAGES`, and torch-free code loads no torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"

# A package, or a module of the top level, imports from those before it.
PACKAGES = [
    *("errors", "documents", "terminal", "limits", "names", "untrusted", "toml", "threads", "processes", "machine"),
    *("layout", "tables"),
    *(
        "recipe",
        "program",
        "draw",
        "collectives",
        "schedules",
        "spec",
        "planner",
        "gallery",
        "data",
        "synthesis",
        "flight_recorder",
        "kernels",
    ),
    *(
        "comm",
        "emulation",
        "quantization",
        "model",
        "adapters",
        "parallel",
        "checkpoint",
        "monitoring",
        "launcher",
        "probe",
        "training",
        "verification",
    ),
    *("serving", "evaluation", "tuning", "inspection", "cli"),
]
TORCH_FREE = PACKAGES[: PACKAGES.index("comm")]
OPTIONAL = tuple(f"meshwright.kernels.{name}" for name in ("triton_attention", "triton_kernels", "device_operations"))
"""They need triton."""
TORCH = ("torch", "transformers", "accelerate", "safetensors.torch")


def modules() -> dict[str, Path]:
    """Every module by its dotted name."""
    found = {}
    for path in (SOURCE / "meshwright").rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def package(module: str) -> str | None:
    """The package of a module; None for meshwright/__init__.py and __main__.py."""
    parts = module.split(".")[1:]
    return None if parts in ([], ["__main__"]) else parts[0]


def says_torch_free(path: Path) -> bool:
    """True if the module's docstring ends with the claim that importing it loads no torch."""
    return "free of torch" in " ".join((ast.get_docstring(parse(path.read_text())) or "").lower().split())


@cache
def parse(source: str) -> ast.Module:
    """Parse a file that several tests read."""
    return ast.parse(source)


def imports(source: str, known: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import of a file, those inside functions and under TYPE_CHECKING included."""
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node.lineno, inner if inner in known or inner in TORCH else str(node.module)


def violations(module: str, source: str, known: dict[str, Path]) -> list[str]:
    """The imports of one file that break the order, a line each."""
    found = []
    own = package(module)
    for line, imported in imports(source, known):
        other = package(imported) if imported.partition(".")[0] == "meshwright" else None
        if own and other and PACKAGES.index(other) > PACKAGES.index(own):
            found.append(f"{module}:{line} imports {imported}: {other} comes after {own}")
        if own in [*TORCH_FREE, None] and any(f"{imported}.".startswith(f"{name}.") for name in TORCH):
            found.append(f"{module}:{line} imports {imported}: {own} is torch-free")
    return found


def import_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that import each other: the strongly connected components of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph.get(module, ())):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                found.append(sorted(component))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found


def test_every_package_has_position_in_import_order():
    assert {package(module) for module in modules()} - {None} == set(PACKAGES)


def test_packages_import_only_earlier_packages():
    known = modules()
    assert [line for module, path in known.items() for line in violations(module, path.read_text(), known)] == []


def test_modules_do_not_import_each_other_in_cycles():
    """Type-checking imports count as well."""
    known = modules()
    graph = {
        module: {name for _, name in imports(path.read_text(), known) if name in known} - {module}
        for module, path in known.items()
    }
    assert import_cycles(graph) == []


def test_import_cycles_finds_exactly_the_cycles():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"g"}, "g": {"f"}}
    assert import_cycles(graph) == [["a", "b", "c"], ["f", "g"]]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("meshwright.layout", "import meshwright.recipe"),
        ("meshwright.recipe", "def f():\n    from meshwright.spec import config"),
        ("meshwright.spec.config", "from meshwright.model import rope"),
        ("meshwright.spec.config", "import torch.nn"),
        ("meshwright.spec.flops", "def f():\n    from torch import nn"),
        ("meshwright.data", "from safetensors.torch import load_file"),
        ("meshwright.data", "from safetensors import torch"),
        ("meshwright.comm.mesh", "from meshwright.parallel.zero_engine import ZeroEngine"),
    ],
)
def test_import_of_later_package_or_of_torch_is_reported(module: str, source: str):
    assert violations(module, source, modules())


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("meshwright.recipe", "from meshwright.layout import Layout"),
        ("meshwright.model.rope", "import torch\nfrom meshwright.spec.config import ModelConfig"),
        ("meshwright.data", "import safetensors.numpy, torchlike"),
        ("meshwright.cli.train", "def command():\n    import torch"),
    ],
)
def test_import_of_an_earlier_package_is_accepted(module: str, source: str):
    assert violations(module, source, modules()) == []


def test_types_are_strict_in_every_torch_free_package():
    rules = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["tool"]["mypy"]
    assert rules["strict"]
    (relaxed,) = (table["module"] for table in rules["overrides"] if table.get("disallow_untyped_defs") is False)
    assert {name.split(".")[1] for name in relaxed}.isdisjoint(TORCH_FREE)


def test_importing_torch_free_modules_and_commands_loads_no_torch():
    """Torch-free packages, the modules elsewhere whose docstrings say so, and the command line."""
    known = modules()
    names = [
        name
        for name, path in known.items()
        if name not in ("meshwright.__main__", *OPTIONAL)
        and (package(name) in [*TORCH_FREE, None, "cli"] or says_torch_free(path))
    ]
    assert {"meshwright.launcher.launcher", "meshwright.training.start"} <= set(names)
    program = f"""
import importlib, sys
for name in {sorted(names)!r}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"importing {{name}} loads torch")
"""
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr


def test_benchmarks_import_nothing_from_tests():
    """Code of both is in bench/shared."""
    scripts = [*(SOURCE.parent / "bench").rglob("*.py")]
    assert len(scripts) > 80
    for path in scripts:
        assert not re.findall(r"^ *(?:from|import) tests\b.*", path.read_text(), re.MULTILINE), path
