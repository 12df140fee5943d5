"""Predicted cost of a layout: time, memory, and if it fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.limits import is_finite_number, make_limit_error, shorten_repr
from meshwright.names import check_options
from meshwright.planner.cost import engines
from meshwright.planner.cost.engines import Engine
from meshwright.planner.cost.reference_step import measured_step_factors
from meshwright.planner.cost.step_time import StepPredictor, StepTime, default_precision
from meshwright.planner.hardware.cluster import Cluster, cluster
from meshwright.planner.hardware.machine_profile import find_process_items
from meshwright.planner.hardware.values import read_count
from meshwright.planner.memory.compiled_blocks import version_warning
from meshwright.planner.memory.ledger import Ledger
from meshwright.planner.memory.rank_memory import fullest_rank
from meshwright.planner.memory.states import optimizer_kinds
from meshwright.planner.models import config_of, find_recipe, model_of, model_substitution_note
from meshwright.planner.problem import Problem, parse_reserve
from meshwright.spec.config import ModelConfig
from meshwright.spec.flops import FLOPS_CONVENTION, training_flops_per_token
from meshwright.spec.teacher import make_teacher_work
from meshwright.spec.work import MASKED_SHARE

if TYPE_CHECKING:
    from meshwright.recipe import Recipe


_EXAMPLES = {"sequence": "sequence length in tokens, such as 4096", "batch": "global batch in sequences, such as 512"}

TIGHT = 0.05
"""Fraction of a device's memory; if less stays free, a small prediction error may decide whether a layout fits."""

EXPOSED = ("tensor", "context", "expert", "data", "pipeline")
"""Parts of a step in which devices wait for communication."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted time and memory of a layout.

    Attributes:
        problem: Model, cluster, sequence length, batch and engine.
        layout: Layout with its precision.
        time: Predicted time of a training step.
        memory: Memory of the pipeline rank with the highest peak.
        warnings: Lines of text, each about a prediction that is less certain.
    """

    problem: Problem
    layout: Layout
    time: StepTime
    memory: Ledger
    warnings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """True if the predicted memory is at most the device memory minus the reserve that must stay free."""
        return self.memory.device_bytes <= self.problem.usable_bytes

    @property
    def tight(self) -> bool:
        """True if the layout fits, but leaves less than the fraction `TIGHT` (5%) of the usable memory free."""
        return self.fits and self.memory.device_bytes > (1 - TIGHT) * self.problem.usable_bytes

    @property
    def exposed_seconds(self) -> float:
        """Seconds of a step in which devices wait for communication (exposed communication, not overlapped with
        computation)."""
        return sum(self.time.breakdown[part] for part in EXPOSED)

    @property
    def communication_seconds(self) -> float:
        """Seconds of a step during which the busiest rank communicates, overlapped communication included."""
        data = self.problem.cluster.time_factor * predict_step(self.problem, self.layout).data_seconds()
        return self.exposed_seconds + max(0.0, data - self.time.breakdown["data"])

    @property
    def tokens_per_second_per_device(self) -> float:
        """Throughput of one device in tokens a second."""
        return self.problem.batch * self.problem.sequence / self.time.seconds / self.problem.cluster.devices

    @property
    def model_flops_per_device(self) -> float:
        """Model FLOP/s of one device (without recomputation), counted by `FLOPS_CONVENTION`."""
        seen = max(1, round(self.problem.sequence / self.problem.documents))  # tokens that attend to each other
        return training_flops_per_token(self.problem.config, seen) * self.tokens_per_second_per_device

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation, 0 to 1."""
        return self.model_flops_per_device / self.problem.cluster.peak(self.problem.precision)

    def document(self) -> dict[str, Any]:
        """Return the JSON entry that `meshwright plan --json` prints for this layout."""
        found = {
            "layout": str(self.layout), "fits": self.fits, "tight": self.tight, "memory_gib": self.memory.gib(),
            "step_seconds": self.time.seconds, "step_seconds_low": self.time.low, "step_seconds_high": self.time.high,
            "tokens_per_second_per_device": self.tokens_per_second_per_device,
            "model_tflops_per_device": self.model_flops_per_device / 1e12, "mfu": self.mfu,
            "flops_convention": FLOPS_CONVENTION, "breakdown_seconds": dict(self.time.breakdown),
            "communication_seconds": {"exposed": self.exposed_seconds, "total": self.communication_seconds},
            "fullest_rank": {"pp": self.memory.pp_rank, "when": self.memory.peak_snapshot},
        } | self.time.bounds.document()  # fmt: skip
        if self.problem.cluster.calibration is not None:
            found["calibration"] = self.problem.cluster.calibration.table()
        return found | ({"warnings": list(self.warnings)} if self.warnings else {})


class ProblemOptions(TypedDict, total=False):
    """Keyword options of `problem_of`.

    Attributes:
        engine: Training engine (framework) whose kernels and buffers are modelled; `"meshwright"` unless given.
        compile: True to predict for layers compiled by torch.compile; the recipe's `train.compile` if None.
        optimizer: `"adamw"`, `"adam"`, `"sgd"` or `"momentum"`; the recipe's if None, else `"adamw"`.
        precision: Such as `"bf16"`. If not given: the precision of the layout, else the cluster's default.
        documents: Average number of documents packed into one sequence; 1 unless given.
        reserve: Memory of a device to keep free: a fraction, `0.1`, or a size, `"8GiB"`; 0 unless given.
    """

    engine: str | Engine
    compile: bool | None
    optimizer: str | None
    precision: str | None
    documents: float
    reserve: str | float


def problem_of(
    model: ModelConfig | Recipe | str | Path | Mapping[str, Any], wanted: Cluster | str | Mapping[str, Any], *,
    sequence: int | None = None, batch: int | None = None, **options: Unpack[ProblemOptions],
) -> Problem:  # fmt: skip
    """Return the planning problem described by the arguments of `plan`, after checking them.

    model: preset, Hugging Face directory, config.json or its content, or recipe; wanted: cluster as object, shorthand,
    file or mapping; sequence: tokens of a sequence; batch: sequences of a step over all ranks; None: the recipe's;
    options: fields of `ProblemOptions`. Raises `UserError` for an unknown name (the message suggests the most similar
    one), a missing number, and numbers out of range."""
    check_options(problem_of, options, ProblemOptions)
    recipe = find_recipe(model)
    given: dict[str, Any] = {"sequence": sequence, "batch": batch, "optimizer": None, "compile": None} | options
    if recipe is not None:
        own = {name: getattr(recipe.train, name) for name in ("batch", "compile")}
        own |= {"sequence": recipe.data.sequence, "optimizer": recipe.train.planned_optimizer}
        given |= {name: value for name, value in own.items() if given[name] is None}
    for name, example in _EXAMPLES.items():
        if given[name] is None:
            raise UserError(f"{name} is missing: {example}")
        read_count(given[name], f"{name}:")
        if problem := make_limit_error(name, given[name]):
            raise UserError(problem)
    length, documents = given["sequence"], given.get("documents", 1.0)
    if not is_finite_number(documents) or documents < 1:
        raise UserError(f"documents: takes a number, at least 1, not {shorten_repr(documents)}")
    if documents > length:
        raise UserError(f"documents {documents:g}: a sequence of {length} tokens has at most {length} documents")
    optimizer, compile = given["optimizer"] or "adamw", bool(given["compile"])
    optimizer_kinds(optimizer)  # is it known?
    where = wanted if isinstance(wanted, Cluster) else cluster(wanted)
    engine = engines.engine(options.get("engine", "meshwright"), compile=compile)
    if recipe is None and isinstance(model, ModelConfig | str | Path | Mapping):
        config, assumed = model_of(model), model_substitution_note(model)
    else:
        assert recipe is not None
        config, assumed = config_of(recipe)
        engine = engine.overlapped(recipe.train.tensor_overlap, where.kind, recipe.train.cuda_graphs)
    chosen = options.get("precision") or default_precision(where)
    where.peak(chosen)
    threads = where.measured.threads if where.kind == "cpu" and where.measured is not None else None
    process = () if threads is None else find_process_items(chosen, where.device.name, threads, compile)
    if config.adapter is not None and engine.name != "meshwright":
        raise UserError(f'engine "{engine.name}": adapters are priced for engine "meshwright" alone')
    return Problem(
        config, where, length, given["batch"], engine, compile, optimizer, chosen, documents,
        pairs=recipe is not None and recipe.objective not in ("next-token", "distillation"),
        graphs=recipe is not None and recipe.train.cuda_graphs and where.kind == "cuda",
        teacher=None if recipe is None else make_teacher_work(recipe, config), assumed=assumed,
        reserve=parse_reserve(options.get("reserve", 0), where.device.memory_bytes), process=process,
    )  # fmt: skip


def estimate_layout(problem: Problem, layout: Layout, step: StepPredictor | None = None) -> Estimate:
    """Predict time and memory of a layout for a planning problem. step: predictor of the layout's step time, whose
    results are reused; None: a new one is made. Raises `UserError` with the reason if the layout cannot run."""
    layout = layout.with_(precision=problem.precision)
    problem.refuse(layout, problem.cluster.devices, planning=True)
    if layout.offload is not None:
        raise UserError(f'layout "{layout}": offloading is not priced yet; remove offload:{layout.offload}')
    time = (step or predict_step(problem, layout)).price()
    memory = fullest_rank(problem, layout)
    outside = [f"{line}, so the range of the step time is wider" for line in time.bounds.outside]
    return Estimate(problem, layout, time, memory, (*_warnings(problem, layout, memory), *outside))


@lru_cache(maxsize=4)  # time and communication of an estimate
def predict_step(problem: Problem, layout: Layout) -> StepPredictor:
    """Return the predictor of the step time of a layout for a planning problem."""
    return StepPredictor(problem, layout, measured_step_factors(problem.cluster, problem.precision, problem.engine))


def recipe_layout(problem: Problem, layout: Layout) -> Estimate | str:
    """Return the estimate of the layout that a recipe names, in the layout's precision. If it cannot run on the
    problem's cluster, return the reason as text instead."""
    try:
        return estimate_layout(replace(problem, precision=layout.precision or problem.precision), layout)
    except UserError as error:
        return str(error)


def _warnings(problem: Problem, layout: Layout, memory: Ledger) -> list[str]:
    """Return lines of text that warn of uncertain predictions: for layouts that `meshwright train` refuses, and for
    axes and schedules that the engine (training framework) does not have. memory: memory of the pipeline rank with the
    highest peak."""
    config, engine = problem.config, problem.engine
    ours, on_cpu = engine.name == "meshwright", problem.cluster.kind == "cpu"
    refusal: UserError | None = None
    if ours and not config.planning_only:
        try:
            problem.refuse(layout, problem.cluster.devices, planning=False)
        except UserError as error:
            refusal = error
    outside = [axis for axis in ("tp", "cp", "pp", "ep") if getattr(layout, axis) > 1 and axis not in engine.axes]
    outside += [f"zero{layout.zero}"] if layout.zero not in engine.zero else []
    outside += [layout.schedule] if layout.pp > 1 and not ours and layout.schedule not in engine.schedules else []
    other_latent = config.latent is not None and (problem.compile or engine.name not in ("meshwright", "hai-llm"))
    length, positions, several = problem.sequence, config.max_positions, problem.documents > 1
    lines = (
        (config.planning_only, f"{config.family} can be planned but not run: {config.planning_only}"),
        (refusal, f"meshwright train refuses it: {refusal}"),
        (outside and ours, "meshwright train refuses it: train.cuda_graphs supports only tp, dp, zero0 and zero1"),
        (outside and not ours, f"{engine.name} is not known to have {' and '.join(outside)}; priced as if it had"),
        (other_latent, "latent attention: kernels and memory are those of this engine's uncompiled blocks"),
        (config.attention_sinks and problem.compile,
         "attention sinks and clamped SwiGLU: memory is that of compiled blocks without them"),
        (config.head == "masked",
         f"assumed that {MASKED_SHARE:.0%} of the tokens are masked: the head computes only these"),
        (problem.assumed, problem.assumed),
        (length > positions, f"sequence {length} is longer than the model's {positions} positions"),
        (problem.precision == "fp8" and not engine.eight_bit_activations,
         "memory is that of bf16: fp8 copies and fp8 saved activations are not priced"),
        (several and on_cpu and ours, "memory is the maximum over all document boundaries within sequences"),
        (on_cpu and not problem.process,
         "memory is that of tensors alone: that of a process was not measured on this machine"),
        (problem.compile and not memory.compiled, "memory is that of uncompiled blocks"),
        (line := problem.compile and memory.compiled and version_warning(), line),
    )  # fmt: skip
    return [str(line) for occurs, line in lines if occurs]
