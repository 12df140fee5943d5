"""`meshwright.plan`: time, memory and the best layout before a run, as the command `meshwright plan` reports them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from meshwright.collectives.quantities import GIB
from meshwright.documents import to_json_dict
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.limits import shorten_repr
from meshwright.names import check_options
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.memory.rank_memory import distinct_ranks, memory_of
from meshwright.planner.models import adapted_model, find_recipe, model_document
from meshwright.planner.problem import Problem
from meshwright.planner.search.estimate import Estimate, ProblemOptions, estimate_layout, problem_of, recipe_layout
from meshwright.planner.search.nearest import Nearest, find_nearest
from meshwright.planner.search.search import SearchResult, search
from meshwright.planner.search.shortlist import MOST_PRICED
from meshwright.planner.show.explain import OperationTime, explain, find_busiest_rank
from meshwright.spec.config import ModelConfig

if TYPE_CHECKING:
    from meshwright.recipe import Recipe

MOST_TOP = 100
"""Maximum number of layouts that a search returns."""


class PlanOptions(ProblemOptions, total=False):
    """Keyword options of `plan`.

    Attributes:
        engine: Training engine (framework) whose kernels and buffers are modelled; `"meshwright"` unless given.
        compile: Predict for blocks compiled with torch.compile; the recipe's `train.compile` unless given.
        optimizer: `"adamw"`, `"adam"`, `"sgd"` or `"momentum"`; the recipe's, else `"adamw"`, unless given.
        precision: `"fp32"`, `"tf32"`, `"bf16"`, `"fp16"` or `"fp8"`, where the layout names none.
        documents: Average number of documents packed into one sequence; 1 unless given.
        reserve: Memory of a device to keep free: a fraction, `0.1`, or a size, `"8GiB"`; 0 unless given.
        top: Number of layouts that a search returns, 1 to 100; 5 unless given.
        adapter: Adapter on a model that is not a recipe: keys of the table `[adapter]`, such as `{"kind": "lora"}`, or
            overrides such as `["adapter.kind=lora"]`.
    """

    top: int
    adapter: Mapping[str, Any] | Sequence[str]


@dataclass(frozen=True)
class Plan:
    """Result of `plan`: predicted cost of one layout, or of the fastest layouts that fit.

    Attributes:
        problem: Model, cluster, sequence length, batch size and engine that were planned for.
        estimates: Time and memory of each layout, fastest first; empty where no layout fits.
        search: Result of the search over all layouts; None where a layout was given.
        recipe_estimate: Cost of the layout that a recipe names, or the reason why it cannot run on this cluster; None
            without a recipe, or where a layout was given.
    """

    problem: Problem
    estimates: tuple[Estimate, ...]
    search: SearchResult | None = None
    recipe_estimate: Estimate | str | None = None

    @property
    def layouts(self) -> list[dict[str, Any]]:
        """JSON records of the predicted layouts as in `meshwright plan --json`, one dict per estimate: layout, fits,
        memory_gib, step_seconds, mfu ..."""
        found = [one.document() for one in self.estimates]
        if self.search is not None:
            for one, why in zip(found, self.search.reasons, strict=True):
                one["compared_with_first"] = why
        return found

    @property
    def best(self) -> Estimate:
        """Estimate of the fastest layout that fits, or of the layout that was given. Raises `UserError` where no layout
        fits."""
        self.check_fits()
        return self.estimates[0]

    def check_fits(self) -> None:
        """Raise `UserError` if the search found no layout that fits. The error names the number of devices, the GiB of
        each, and what to change."""
        if self.search is None or self.estimates:
            return
        problem, count = self.problem, self.problem.cluster.devices
        reserved = f", with {problem.reserve / GIB:.1f} GiB more reserved" if problem.reserve else ""
        none = f"none of the {MOST_PRICED} fastest layouts" if self.search.undecided else "no layout"
        raise UserError(
            f"{none} of {count:,} device{'s' * (count > 1)} fits into {problem.usable_bytes / GIB:.1f} GiB each"
            f"{reserved}; use more devices, a smaller batch or shorter sequences"
        )

    @cached_property
    def nearest(self) -> Nearest | None:
        """The layout that needs least memory, and the number of devices that would suffice; None if a layout fits or
        the user gave the layout."""
        return None if self.search is None or self.estimates else find_nearest(self.search)

    @cached_property
    def busiest_rank(self) -> int:
        """Index of the pipeline rank with the most compute seconds per micro-batch under the best layout."""
        return find_busiest_rank(self.problem, self.best.layout)

    @cached_property
    def operations(self) -> list[OperationTime]:
        """Operations of one micro-batch on the busiest pipeline rank of the best layout, longest first."""
        return explain(self.problem, self.best.layout, self.busiest_rank)

    def to_json_dict(self, *, ledger: bool = False, operations: bool = False) -> dict[str, Any]:
        """Return the JSON document of `meshwright plan --json` for the best layouts.

        ledger: True to add all tensors at the memory peak of the best layout, for each pipeline rank; of several ranks
        with equal memory only one is listed. operations: True to add the operations of one micro-batch, with their
        seconds, on the best layout's busiest pipeline rank."""
        problem, own = self.problem, self.recipe_estimate
        found: dict[str, Any] = {
            "model": model_document(problem.config),
            "cluster": {"name": problem.cluster.name, "devices": problem.cluster.devices},
            "engine": problem.engine.name, "sequence": problem.sequence, "batch": problem.batch,
            "layouts": self.layouts,
        }  # fmt: skip
        found |= {"searched": 0, "search_seconds": 0.0} if self.search is None else self.search.document()
        if own is not None:
            found["recipe_layout"] = {"error": own} if isinstance(own, str) else own.document()
        if self.nearest is not None:
            found["nearest"] = self.nearest.document()
        if ledger and self.estimates:
            ranks = sorted(distinct_ranks(problem, self.best.layout))
            found["ledger"] = [memory_of(problem, self.best.layout, rank).document() for rank in ranks]
        if operations and self.estimates:
            found["operations"] = [row.document() for row in self.operations]
        return to_json_dict(found)


def plan(
    model: ModelConfig | Recipe | str | Path | Mapping[str, Any], cluster: Cluster | str | Mapping[str, Any],
    layout: Layout | str | None = None, *, sequence: int | None = None, batch: int | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:  # fmt: skip
    """Predict time and memory of training a model on a cluster: of one layout, or of the fastest layouts that fit.

    Args:
        model: Name of a preset, a Hugging Face directory, a config.json or its content, a recipe or its file.
        cluster: Devices such as `"64xh100-sxm"`, a cluster file, `"this"` (the measured machine), or a mapping with
            `device`, `devices`, `devices_per_node`.
        layout: Layout, or its notation, to predict; None: search for the fastest layouts.
        sequence: Tokens in a sequence; the recipe's unless given.
        batch: Sequences a step over all devices; the recipe's unless given.
        **options: Fields of `PlanOptions`.

    Returns:
        The plan; `plan.layouts` are the records of `meshwright plan --json`.

    Raises:
        UserError: A name is unknown, a number is out of range, or the layout cannot run. A search in which no layout
            fits returns a plan without estimates.

    Examples:
        >>> import meshwright as mw
        >>> plan = mw.plan("llama-3-8b", "8xh100-sxm", "dp8 zero3 ac:full", sequence=8192, batch=64)
        >>> plan.best.fits, plan.layouts[0]["layout"]
        (True, 'dp8 zero3 ac:full bf16')
        >>> 0.2 < plan.best.mfu < 0.6
        True
    """
    check_options(plan, options, PlanOptions)
    recipe = find_recipe(model)
    parsed = Layout.parse(layout) if isinstance(layout, str) else layout
    top, adapter = options.get("top", 5), options.get("adapter")
    texts = {name: options.get(name) for name in ("precision", "optimizer")}
    overrides = isinstance(adapter, list | tuple) and all(isinstance(each, str) for each in adapter)
    for name, value, fits, expected in (
        *((name, value, isinstance(value, str | None), "text") for name, value in texts.items()),
        ("layout", parsed, isinstance(parsed, Layout | None), "a layout or its notation"),
        ("compile", flag := options.get("compile"), isinstance(flag, bool | None), "true or false"),
        ("top", top, type(top) is int and 1 <= top <= MOST_TOP, f"a whole number from 1 to {MOST_TOP}"),
        ("adapter", adapter, overrides or isinstance(adapter, Mapping | None), "an object or a list of overrides"),
    ):
        if not fits:
            raise UserError(f"{name}: takes {expected}, not {shorten_repr(value)}")
    if adapter is not None:
        if recipe is not None:
            raise UserError("adapter: a recipe has its own, in its table [adapter]")
        model = adapted_model(model, adapter)  # type: ignore[arg-type]
    # The layout that the recipe names, which is shown in addition to the found ones.
    own = None if recipe is None or parsed is not None or recipe.layout == "auto" else recipe.parsed_layout
    given: Any = {name: value for name, value in options.items() if name in ProblemOptions.__annotations__}
    given["precision"] = (parsed and parsed.precision) or given.get("precision") or (own and own.precision)
    problem = problem_of(recipe or model, cluster, sequence=sequence, batch=batch, **given)
    if parsed is not None:
        return Plan(problem, (estimate_layout(problem, parsed),))
    found = search(problem, top)
    return Plan(problem, found.best, found, None if own is None else recipe_layout(problem, own))
