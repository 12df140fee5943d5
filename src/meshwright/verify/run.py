"""`verify`: run layouts on local ranks, compare with one device, and (mutate) show that a spoilt one is noticed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshwright.collectives.named import named_programs
from meshwright.comm.local import LocalRanks
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.model.config import ModelConfig, config_from_recipe
from meshwright.model.preference import Preference, preference_of
from meshwright.model.presets import preset
from meshwright.model.refuse import refuse
from meshwright.names import unknown
from meshwright.recipe import CollectivesRecipe, Recipe, load_recipe
from meshwright.schedules.library import program_of
from meshwright.verify.compare import TOLERANCES, Comparison, compare
from meshwright.verify.grid import MIXTURES, grid
from meshwright.verify.mutations import plant_all
from meshwright.verify.problem import Problem, scaled_down, scaled_layout, sequence_of
from meshwright.verify.ranks import run_rank
from meshwright.verify.reference import Reference

DEFAULT_MODELS = ("llama-3-8b", "qwen3-0.6b", "gpt2")
"""Verified when no model is named: an untied head; a tied one with query and key norms; biases, learned positions."""
EXPERT_MODELS = ("mixtral-8x7b-v0.1", "qwen1.5-moe-a2.7b", "dots-llm1")
"""And where a layout spreads experts, and in some of a grid that do not: nothing but them; with a shared one behind a
gate; a router that balances itself."""


def verify(
    layout: Recipe | Layout | str | Path | None = None,
    *,
    model: ModelConfig | str | Path | None = None,
    dtype: str = "float64",
    mutate: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Prove that a layout computes what one device computes, on a small model of the same kind.

    layout: a layout or its notation, a recipe or its file (its layout and its model), or None for a grid over every
    axis. model: a preset's name, a Hugging Face directory or config.json, a recipe's file or a configuration; made
    small, kept in kind. dtype: "float64" (errors up to 1e-10 pass) or "float32" (1e-5). mutate: spoil every collective
    call site, one at a time; each fault must be noticed.

    Returns the document of `meshwright verify --json`: passed, worst, loss_error, gradient_norm_error, layouts,
    mutations. Raises UserError for what cannot be run.
    """
    if dtype not in TOLERANCES:
        raise UserError(unknown("dtype", dtype, tuple(TOLERANCES)))
    begun = time.monotonic()
    layouts, models, collectives, preference = _what(layout, model)
    mutations = {"planted": 0, "caught": 0, "neutral": 0, "missed": [], "faults": []} if mutate else None
    with _Bench(dtype, log, collectives, preference) as bench:
        for number, wanted in enumerate(sorted(layouts, key=lambda each: each.world_size)):
            # Over a grid the models take turns, so that each meets every size and stage.
            fitting = models or _default_models(wanted, len(layouts) > 1 and wanted in MIXTURES)
            for name, config in fitting if len(layouts) == 1 else fitting[number % len(fitting) :][:1]:
                ran = bench.verify(wanted, name, config)
                if mutations is not None and ran["passed"]:
                    for key, found in bench.mutate(wanted, config).items():
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


class _Bench:
    """Local ranks, kept from layout to layout of one size, and one device's answers, computed once each."""

    def __init__(
        self, dtype: str, log: Callable[[str], None], collectives: CollectivesRecipe, preference: Preference | None
    ) -> None:
        self.dtype, self.log, self.collectives, self.preference = dtype, log, collectives, preference
        self.entries: list[dict[str, Any]] = []
        self._ranks: LocalRanks | None = None
        self._references: dict[tuple[Problem, frozenset[int]], Reference] = {}

    def __enter__(self) -> _Bench:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._threads)
        if self._ranks is not None:
            self._ranks.close()

    def verify(self, wanted: Layout, model: str, config: ModelConfig) -> dict[str, Any]:
        """Run one layout and note what came of it."""
        begun = time.monotonic()
        layout, problem = self._problem(wanted, config)
        found = self.compare(problem, layout)
        entry: dict[str, Any] = {
            "layout": str(wanted),
            "verified_as": str(layout),
            "model": model,
            "passed": found.passed,
            "worst": {"name": found.worst_name, "relative_error": found.worst_error},
            "loss_error": found.loss_error,
            "gradient_norm_error": found.gradient_norm_error,
            "failure": found.failure,
            "seconds": round(time.monotonic() - begun, 2),
        }
        self.entries.append(entry)
        verdict = "ok" if found.passed else f"FAILED: {found.failure}"
        shown = str(wanted) if wanted == layout else f"{wanted} (as {layout})"
        self.log(f"{shown:<32} {model:<14} worst {found.worst_error:.1e}  loss {found.loss_error:.1e}  {verdict}")
        return entry

    def mutate(self, wanted: Layout, config: ModelConfig) -> dict[str, Any]:
        """Plant every fault that this layout can have, one at a time."""
        layout, problem = self._problem(wanted, config, layers=3)
        ranks = self.ranks(layout.world_size)
        return plant_all(problem, layout, self.reference, ranks, self.log, self.collectives)

    def compare(self, problem: Problem, layout: Layout) -> Comparison:
        reference = self.reference(problem)  # the first one while the server of local ranks loads torch
        results = self.ranks(layout.world_size).run(run_rank, problem, str(layout), self.collectives)
        return compare(reference, [result for (result,) in results], layout)

    def ranks(self, world_size: int) -> LocalRanks:
        if self._ranks is None or self._ranks.world_size != world_size:
            if self._ranks is not None:
                self._ranks.close()
            self._ranks = LocalRanks(world_size)
        return self._ranks

    def reference(self, problem: Problem, skipped: frozenset[int] = frozenset()) -> Reference:
        key = (problem, skipped)
        if key not in self._references:
            self._references[key] = Reference(problem, skipped)
        return self._references[key]

    def _problem(self, wanted: Layout, config: ModelConfig, layers: int = 5) -> tuple[Layout, Problem]:
        layout = scaled_layout(wanted)
        layers = max(layers, program_of(layout).stages + (layout.pp > 1))  # one stage longer than the others
        ulysses = layout.cp if layout.cp_method == "ulysses" else 1
        config = scaled_down(config, layout.tp, ulysses, layers, layout.ep, layout.etp)
        sequence = sequence_of(layout)
        share = layout.dp * layout.micro_batches
        # One batch for as many layouts as possible, so that one device has to answer once.
        batch = share * math.ceil(8 / share) if 24 % share else 24
        refuse(layout, config, batch, sequence, layout.world_size)
        return layout, Problem(config, batch, self.dtype, sequence, preference=self.preference)


def _what(
    layout: Any, model: Any
) -> tuple[list[Layout], list[tuple[str, ModelConfig]], CollectivesRecipe, Preference | None]:
    """The layouts, the models if any are named, the programs that are asked for, and what pairs are to teach."""
    if isinstance(layout, str | Path) and str(layout).endswith(".toml"):
        layout = load_recipe(layout)
    if isinstance(model, str | Path) and str(model).endswith(".toml"):
        model = load_recipe(model)
    recipe = next((each for each in (layout, model) if isinstance(each, Recipe)), None)
    if isinstance(layout, Recipe):
        layouts, model = [layout.parsed_layout], model if model is not None else layout
    elif layout is None:
        layouts = grid()
    else:
        layouts = [layout if isinstance(layout, Layout) else Layout.parse(str(layout))]
    for each in layouts:
        each.refuse_unbuilt()
        if recipe is not None:  # refused before ranks are started
            named_programs(recipe.collectives, scaled_layout(each), recipe.where)
    models = [] if model is None else [_model(model)]
    collectives = CollectivesRecipe() if recipe is None else recipe.collectives
    return layouts, models, collectives, None if recipe is None else preference_of(recipe)


def _default_models(layout: Layout, mixture: bool) -> list[tuple[str, ModelConfig]]:
    names = EXPERT_MODELS if layout.expert_parallel or mixture else DEFAULT_MODELS
    return [(name, preset(name)) for name in names]


def _model(model: Any) -> tuple[str, ModelConfig]:
    if isinstance(model, ModelConfig):
        return model.family, model
    if isinstance(model, Recipe):
        name = model.model.preset or model.model.family or str(model.model.from_path)
        # The vocabulary is replaced anyway: no tokenizer need be trained to verify a layout.
        return name, config_from_recipe(model.model, model.data.sequence, tokenizer_vocabulary=1)
    if Path(model).exists():
        return str(model), ModelConfig.from_path(model)
    return str(model), preset(str(model))
