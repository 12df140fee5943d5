"""Verification of layouts: trains them on local ranks and compares them with one device; with `mutate`, checks that
planted faults are detected."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from meshwright.collectives.named import load_named_programs
from meshwright.comm.local import LocalRanks
from meshwright.errors import UserError
from meshwright.flight_recorder.call_log import RankCalls
from meshwright.flight_recorder.circular_wait import find_circular_wait
from meshwright.layout import Layout
from meshwright.names import unknown
from meshwright.recipe import CollectivesRecipe, Recipe, load_recipe
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.spec.config_json import config_from_path
from meshwright.spec.presets import preset
from meshwright.spec.refuse import refuse
from meshwright.training.preference_loss import make_preference
from meshwright.verification.cases import Case, CaseBuilder
from meshwright.verification.compare import TOLERANCES, Comparison, choose_tolerance, compare
from meshwright.verification.grid import GRID, MIXTURES
from meshwright.verification.mutations import plant_all_faults
from meshwright.verification.problem import Problem, scale_down_layout
from meshwright.verification.ranks import COMPILING_SECONDS, WHOLE, StepRange, run_rank
from meshwright.verification.reference import Reference
from meshwright.verification.teaching import make_distillation_settings

DTYPES = ("float64", "float32")
DEFAULT_MODELS = ("llama-3-8b", "qwen3-0.6b", "gpt2")
"""Models if none is named: one per layout in turn over the grid, all with `thorough`. They cover an untied head; a tied
head with query and key norms; biases and learned positions."""
EXPERT_MODELS = ("mixtral-8x7b-v0.1", "qwen1.5-moe-a2.7b", "dots-llm1")
"""Models for expert-parallel layouts and `MIXTURES`. They cover routed experts only; a gated shared expert; a router
that balances by its bias."""
MODEL_OF_ONE_LAYOUT, EXPERT_MODEL_OF_ONE_LAYOUT = "qwen3-0.6b", "qwen1.5-moe-a2.7b"
"""Models if one layout but no model is named. On every layout they make all collective calls that the others make."""


def run_verification(
    layout: Recipe | Layout | str | Path | None = None,
    *,
    model: Recipe | ModelConfig | str | Path | None = None,
    dtype: str = "float64",
    mutate: bool = False,
    thorough: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Train small models on layouts and on one device, compare the results, and return the document of `meshwright
    verify --json`.

    layout: layout, notation, recipe or its file; None: a grid of layouts. model: preset, path, configuration or recipe;
    None: representative models. dtype: "float64" or "float32". mutate: True to also plant faults (deliberate bugs),
    each of which must be detected. thorough: True to run the slow cases too. log: called with a line of text for each
    layout. Raises `UserError` if a name is unknown or the layout cannot run.
    """
    if dtype not in DTYPES:
        raise UserError(unknown("dtype", dtype, DTYPES))
    begun = time.monotonic()
    layouts, models, recipe = _resolve_arguments(layout, model)
    mutations = {"planted": 0, "caught": 0, "neutral": 0, "missed": [], "faults": []} if mutate else None
    if recipe is not None and len(layouts) == 1:
        for reason in _list_infeasibility_reasons(layouts[0], models, recipe):
            log(f"note: train refuses this recipe: {reason}; it is verified with sizes that the layout divides")
    with _Verifier(dtype, log, recipe, thorough) as bench:
        bench.many = len(layouts) > 1
        planted: set[tuple[str, ...]] = set()
        for number, wanted in enumerate(layouts):
            # Over the grid, models alternate, so that each is verified on every number of ranks.
            one = len(layouts) == 1 and not thorough
            fitting = models or _choose_default_models(wanted, len(layouts) > 1 and wanted in MIXTURES, one)
            for name, config in fitting if len(layouts) == 1 else fitting[number % len(fitting) :][:1]:
                ran = bench.verify(wanted, name, config)
                if mutations is not None and ran["passed"]:
                    for key, found in bench.mutate(wanted, config, planted).items():
                        mutations[key] += found
    entries = bench.entries
    worst = max(entries, key=lambda entry: entry["worst"]["relative_error"])
    missed = mutations["missed"] if mutations else []
    return {
        "passed": all(entry["passed"] for entry in entries) and not missed,
        "dtype": dtype,
        "tolerance": TOLERANCES[dtype],
        "worst": {**worst["worst"], "layout": worst["layout"]},
        "loss_error": max(entry["loss_error"] for entry in entries),
        "gradient_norm_error": max(entry["gradient_norm_error"] for entry in entries),
        "failure": next((f"{e['layout']}: {e['failure']}" for e in entries if e["failure"]), None),
        "layouts": entries,
        "mutations": mutations,
        "seconds": round(time.monotonic() - begun, 2),
    }


class _Verifier:
    """Runner of verification cases on local rank processes. It keeps the processes for the next layout if the next
    layout has the same number of ranks, and caches the single-device references.

    dtype: dtype of the parameters, "float64" or "float32". log: function that is called with a line for each layout.
    recipe: sets collective algorithms, loss and `train.compile`; None: the defaults. thorough: True to run the slow
    cases too.

    Attributes:
        many: True if a grid of layouts is verified; each layout then runs only its most relevant cases.
        entries: Result of each layout so far, as in the JSON document.
    """

    many = False

    def __init__(
        self,
        dtype: str,
        log: Callable[[str], None],
        recipe: Recipe | None = None,
        thorough: bool = False,
    ) -> None:
        """Start without ranks and references. dtype: dtype of the parameters, "float64" or "float32". log: function
        that is called with a line for each layout. recipe: sets collective algorithms, loss, `train.compile` and
        `train.tensor_overlap`; None: the defaults. thorough: True to run the slow cases too."""
        self.dtype, self.log = dtype, log
        self.collectives = CollectivesRecipe() if recipe is None else recipe.collectives
        self.preference = None if recipe is None else make_preference(recipe)
        self.teaching = None if recipe is None else make_distillation_settings(recipe)
        self.compiled = recipe is not None and recipe.train.compile
        self.overlap = recipe is not None and recipe.train.tensor_overlap != "off"
        self.thorough = thorough
        self.entries: list[dict[str, Any]] = []
        self._ranks: LocalRanks | None = None
        self._references: dict[Problem, Reference] = {}

    def __enter__(self) -> _Verifier:
        """Set torch to one thread, in which references are computed."""
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the thread count and stop the ranks."""
        torch.set_num_threads(self._threads)
        if self._ranks is not None:
            self._ranks.close()

    def verify(self, wanted: Layout, model: str, config: ModelConfig) -> dict[str, Any]:
        """Scale down one layout, run all its cases and log the result. Return the layout's entry of the result document
        (JSON dict): passed, worst error, cases, seconds. wanted: the layout that the user named. model: name of
        `config` in the entry."""
        begun = time.monotonic()
        layout = scale_down_layout(wanted)
        cases = []
        for case in self._choose_cases(wanted, layout, config):
            started = time.monotonic()
            found = self.compare(case, layout)
            cases.append((case, found, time.monotonic() - started))
        # The reported errors are those of cases in the requested dtype; the others have other tolerances.
        main = [found for case, found, _ in cases if case.problem.dtype == self.dtype]
        worst = max(main, key=lambda found: found.worst_error)
        failed = next(((case, found) for case, found, _ in cases if not found.passed), None)
        failure = None
        if failed is not None:
            case, found = failed
            failure = found.failure if case is cases[0][0] else f"{case.name}: {found.failure}"
        entry: dict[str, Any] = {
            "layout": str(wanted),
            "verified_as": str(layout),
            "model": model,
            "passed": failed is None,
            "worst": {"name": worst.worst_name, "relative_error": worst.worst_error},
            "loss_error": max(found.loss_error for found in main),
            "gradient_norm_error": max(found.gradient_norm_error for found in main),
            "failure": failure,
            "cases": [
                {
                    "name": case.name,
                    "passed": found.passed,
                    "tolerance": choose_tolerance(case.problem),
                    "compile_backend": case.problem.compile_backend,
                    "relative_error": found.worst_error,
                    "seconds": round(seconds, 2),
                }
                for case, found, seconds in cases
            ],
            "seconds": round(time.monotonic() - begun, 2),
        }
        self.entries.append(entry)
        verdict = "ok" if failed is None else f"FAILED: {failure}"
        if self.compiled:
            backends = [case.problem.compile_backend for case, *_ in cases if case.problem.compile_backend]
            verdict += (
                f"  (compiled: {len(backends)} of {len(cases)} cases{', by ' * bool(backends)}{', '.join(backends)})"
            )
        shown = str(wanted) if wanted == layout else f"{wanted} (as {layout})"
        self.log(f"{shown:<32} {model:<14} worst {worst.worst_error:.1e}  loss {entry['loss_error']:.1e}  {verdict}")
        return entry

    def mutate(self, wanted: Layout, config: ModelConfig, planted: set[tuple[str, ...]]) -> dict[str, Any]:
        """Plant every fault (deliberate bug) that this layout can have, one at a time; return the report of
        `plant_all_faults`. wanted: the layout that the user named. config: the model. planted: keys of faults that were
        already planted with another model, which are skipped."""
        layout = scale_down_layout(wanted)
        ranks = self.get_ranks(layout.world_size)
        maker = CaseBuilder(layout, config, self.dtype, self.preference, self.teaching, overlap=self.overlap)
        return plant_all_faults(maker, self.get_reference, ranks, self.log, self.collectives, planted)

    def compare(self, case: Case, layout: Layout) -> Comparison:
        """Run one case on `layout`, compare the results with the reference, and check the order of the ranks' calls. If
        the case has a `resume_layout`, run its last steps on that layout, from the checkpoint saved by `layout`."""
        problem = case.problem
        reference = self.get_reference(problem)  # before the ranks: their server is still loading torch
        ranks = self.get_ranks(layout.world_size)
        with tempfile.TemporaryDirectory(prefix="meshwright-verify-") as directory:

            def run(layout: Layout, span: StepRange) -> Comparison:
                """Train the steps of `span` on `layout` and compare the results with the reference."""
                collectives = self.collectives if layout is not case.resume_layout else None
                timeout = None if problem.compile_backend is None else 3 * COMPILING_SECONDS
                earlier = _read_calls(ranks)
                results = ranks.run(
                    run_rank, problem, str(layout), collectives, (None,), directory, span, timeout=timeout
                )
                found = compare(reference, [result for (result,) in results], layout)
                wait = find_circular_wait(_read_calls(ranks), earlier)
                return found if wait is None or not found.passed else dataclasses.replace(found, failure=wait)

            if case.resume_layout is None:
                return run(layout, WHOLE)
            last = problem.resumed_at[-1]
            before = run(layout, StepRange(0, last))
            return run(case.resume_layout, StepRange(last)) if before.passed else before

    def _choose_cases(self, wanted: Layout, layout: Layout, config: ModelConfig) -> list[Case]:
        """Choose the verification cases for a layout. wanted: the layout that the user named; layout: the same layout
        scaled down to few ranks; config: the model."""
        # Over the grid, one batch size that suits most layouts, so that references are shared.
        losses, batch = (self.preference, self.teaching), 24 if self.many else 8
        maker = CaseBuilder(layout, config, self.dtype, *losses, batch, self.compiled, self.overlap)
        if self.thorough:
            return maker.make_all_cases()
        cases = [*maker.make_default_cases(), *([maker.make_bf16_case()] if wanted.precision == "bf16" else [])]
        return cases if not self.many else [cases[0], *(cases[1:2] if 1 < layout.cp <= 4 else [])]

    def get_ranks(self, world_size: int) -> LocalRanks:
        """Return `world_size` running local rank processes: the processes of the last call if their number is the same;
        otherwise stop those processes and start new ones."""
        if self._ranks is None or self._ranks.world_size != world_size:
            if self._ranks is not None:
                self._ranks.close()
            self._ranks = LocalRanks(world_size)
        return self._ranks

    def get_reference(self, problem: Problem) -> Reference:
        """Return the single-device reference results of a problem, computed at the first call and then cached."""
        problem = dataclasses.replace(problem, late_completion=False, tensor_overlap="off")
        if problem not in self._references:
            self._references[problem] = Reference(problem)
        return self._references[problem]


def _resolve_arguments(layout: Any, model: Any) -> tuple[list[Layout], list[tuple[str, ModelConfig]], Recipe | None]:
    """Resolve the arguments `layout` and `model` of `verify`; return (layouts, [(model name, configuration)], recipe or
    None). The list of models is empty if neither `model` nor a recipe names one."""
    if isinstance(layout, str | Path) and str(layout).endswith(".toml"):
        layout = load_recipe(layout)
    if isinstance(model, str | Path) and str(model).endswith(".toml"):
        model = load_recipe(model)
    recipe = next((each for each in (layout, model) if isinstance(each, Recipe)), None)
    if isinstance(layout, Recipe):
        layouts, model = [layout.parsed_layout], model if model is not None else layout
    elif layout is None:
        layouts = list(GRID)
    else:
        layouts = [layout if isinstance(layout, Layout) else Layout.parse(str(layout))]
    for each in layouts:
        each.check_implemented()
        if recipe is not None:  # check before ranks are started
            load_named_programs(recipe.collectives, scale_down_layout(each), recipe.where)
    models = [] if model is None else [_resolve_model(model)]
    return layouts, models, recipe


def _read_calls(ranks: LocalRanks) -> list[RankCalls]:
    """Return the calls in the ring buffers of rank processes."""
    return [each.calls for each in ranks.calls().seen if each.calls is not None]


def _list_infeasibility_reasons(layout: Layout, models: list[tuple[str, ModelConfig]], recipe: Recipe) -> Iterator[str]:
    """Yield the reasons why models, in their own sizes (not scaled down), cannot be trained on `layout`. models: (name,
    configuration) pairs. recipe: its batch and sequence length are checked, too."""
    for _, config in models:
        # A recipe's vocabulary is known only when its tokenizer has been trained; this one suits every layout.
        known = dataclasses.replace(config, vocabulary=max(config.vocabulary, 2**16))
        try:
            refuse(layout, known, recipe.train.batch, recipe.data.sequence, planning=True)
        except UserError as error:
            yield str(error)


def _choose_default_models(layout: Layout, mixture: bool, one: bool = False) -> list[tuple[str, ModelConfig]]:
    """Return the (name, configuration) pairs of the default models for a layout. mixture: True to choose models with
    experts; one: True to return only one pair."""
    experts = layout.expert_parallel or mixture
    names: tuple[str, ...] = EXPERT_MODELS if experts else DEFAULT_MODELS
    if one:
        names = (EXPERT_MODEL_OF_ONE_LAYOUT if experts else MODEL_OF_ONE_LAYOUT,)
    return [(name, preset(name)) for name in names]


def _resolve_model(model: Any) -> tuple[str, ModelConfig]:
    """Return (name, configuration) of a model given as a configuration, recipe, path or preset name."""
    if isinstance(model, ModelConfig):
        return model.family, model
    if isinstance(model, Recipe):
        name = model.model.preset or model.model.family or str(model.model.from_path)
        # The vocabulary is replaced later, so no tokenizer needs to be trained.
        return name, config_from_recipe(model.model, model.data.sequence, 1, model.adapter)
    if Path(model).exists():
        return str(model), config_from_path(model)
    return str(model), preset(str(model))
