"""Planning: time, memory and bytes before a run. `evaluate` prices one layout; `search.search` finds the best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.planner.estimate import Estimate, evaluate

__all__ = ["Estimate", "evaluate"]


def __getattr__(name: str) -> Any:
    """Import `Estimate` or `evaluate` on first use: the command line imports parts of this package without them."""
    if name in ("Estimate", "evaluate"):
        from meshwright.planner import estimate

        return getattr(estimate, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
