"""Meshwright: plan, verify, train and serve language models on any number of devices.

    import meshwright as mw

    plan = mw.plan("llama-3-8b", "64xh100-sxm", sequence=8192, batch=512)
    result = mw.train("tiny.toml", {"train.steps": 200}, layout="dp2 zero1")
    print(mw.load(result.checkpoint).generate("def main(").text)

Each name is imported when it is first used; `__init__.pyi` has their types.
"""

from importlib import import_module

__version__ = "0.1.0"

_MODULES = {
    "plan": "planner.api",
    "schedule": "schedules.api",
    "collective": "comm.api",
    "explain": "gallery.examples",
    "verify": "verification.api",
    "emulate": "emulation.api",
    "train": "training.api",
    "fit": "training.module.fit",
    "tune": "tuning.api",
    "evaluate": "evaluation.api",
    "load": "serving.api",
    "serve": "serving.serve",
    "Plan": "planner.api",
    "ScheduleReport": "schedules.report",
    "CollectiveReport": "collectives.report",
    "Explanation": "gallery.explanation",
    "Verification": "verification.api",
    "Result": "training.api",
    "Tuning": "tuning.api",
    "Evaluation": "evaluation.api",
    "Model": "serving.api",
    "Generation": "serving.api",
    "Layout": "layout",
    "Recipe": "recipe",
    "MeshwrightError": "errors",
    "UserError": "errors",
    "CheckFailed": "errors",
    "RankLost": "errors",
    "Terminated": "errors",
}
"""The module of each public name."""

__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> object:
    """Import and return the public attribute `name` at its first use (PEP 562). Raises AttributeError for any other
    name."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the names of the module's attributes, including public names that are not imported yet (PEP 562)."""
    return sorted({*globals(), *__all__})
