"""Planning: time, memory and bytes before a run. `evaluate` prices one layout; `search.search` finds the best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.planner.search.estimate import Estimate, evaluate

__all__ = ["Estimate", "evaluate"]


def __getattr__(name: str) -> Any:
    """Return `Estimate` or `evaluate`, importing planner/search/estimate.py only when first asked for, so that the
    command line starts fast. name: attribute of this package; AttributeError for any other."""
    if name in ("Estimate", "evaluate"):
        from meshwright.planner.search import estimate

        return getattr(estimate, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
