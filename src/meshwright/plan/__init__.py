"""Planning: time, memory and bytes before a run. `evaluate` prices one layout, `search` finds the best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.plan.estimate import Estimate, evaluate
    from meshwright.plan.search import search

__all__ = ["Estimate", "evaluate", "search"]


def __getattr__(name: str) -> Any:
    """Loaded when asked for: the command line imports parts of this room before it knows what it will need."""
    if name in ("Estimate", "evaluate"):
        from meshwright.plan import estimate

        return getattr(estimate, name)
    if name == "search":
        from meshwright.plan.search import search

        return search
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
