"""Recipe tables [run], [model], [train], [collectives], [checkpoint] and [track]."""

from __future__ import annotations

import math
import re
from typing import Annotated, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from meshwright.names import (
    ALGORITHM_ALIASES,
    CHECKPOINT_DTYPES,
    COLLECTIVE_ALGORITHMS,
    DEVICES,
    ENCODER_FAMILIES,
    FAMILIES,
    LEARNING_RATE_SCHEDULES,
    OBJECTIVES,
    OPTIMIZERS,
    TENSOR_OVERLAPS,
    unknown,
)
from meshwright.tables import (
    Count,
    CountOrZero,
    Fraction,
    Name,
    NotNegative,
    Positive,
    Size,
    Table,
    at_most,
    match_pattern,
    named,
)
from meshwright.toml import format_toml_value


def _check_power_of_two(value: float) -> float:
    """Check that `value` is a power of two of at least 1; return it unchanged. Raises `ValueError` otherwise."""
    if math.frexp(value)[0] != 0.5 or value < 1:
        raise ValueError(f"{value:g} is not a power of two that is at least 1: only those scale without rounding")
    return value


def _check_step_range(text: str) -> str:
    """Check that `text` is a step, such as "10", or a range of steps with first and last, such as "10:12"; return it
    unchanged. Raises `ValueError` otherwise."""
    found = re.fullmatch(r"([1-9][0-9]*)(?::([1-9][0-9]*))?", text)
    if found is None:
        raise ValueError(f'should be steps, as "10" or "10:12" (the first and the last), not {format_toml_value(text)}')
    if found[2] and int(found[2]) < int(found[1]):
        raise ValueError(f'"{text}" ends before it begins; write "{found[2]}:{found[1]}"')
    return text


def _program_validator(operation: str) -> AfterValidator:
    """Create the pydantic validator of a setting that selects the algorithm of the collective `operation`, such as
    "all-reduce". It accepts "native", "auto", an algorithm's name and "@FILE".
    """
    algorithms = (*COLLECTIVE_ALGORITHMS[operation], *ALGORITHM_ALIASES.get(operation, {}))

    def check(text: str) -> str:
        """Return `text`; raise ValueError if it names no algorithm of the collective."""
        if text == "native" or text in algorithms or re.fullmatch("@.+", text):
            return text
        raise ValueError(unknown(f"{operation} algorithm", text, ("native", "@FILE", *algorithms)))

    return AfterValidator(check)


RunName = Annotated[str, match_pattern(r"[^/\\.][^/\\]*", "a plain directory name")]
Rendezvous = Annotated[str, match_pattern(r"tcp://[^/:]+:[0-9]+|file:///.+", "tcp://HOST:PORT or file:///PATH")]
TrackerName = Annotated[str, match_pattern(r"[\w.-]+(:[\w.]+)?", "a tracker's name or module:Class")]
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a running average, which with 1 would never change


class RunRecipe(Table):
    """Table [run] of a recipe: name, seed, directory and devices of a run.

    Attributes:
        name: Name of the run; in a recipe file the default is the file's name without ".toml".
        directory: Run directory (default: runs/NAME).
        rendezvous: Address at which the ranks of several hosts meet (default: from the environment that torchrun or
            SLURM sets).
        device: "cpu", "cuda", or "auto": CUDA if available.
        threads: CPU threads per rank, None: chosen automatically.
        collective_timeout: Seconds that a rank waits for another rank before the run ends with an error.
    """

    name: RunName = "run"  # default in a file: the file's name
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    directory: Name | None = None  # default: runs/NAME
    rendezvous: Rendezvous | None = None  # default: from the environment (torchrun, SLURM)
    device: Annotated[str, named("device", DEVICES)] = "auto"
    threads: Annotated[int, Size("threads")] | None = None  # per rank; default: chosen by the size of the model
    collective_timeout: Annotated[Positive, at_most("seconds")] = 600.0  # seconds


class ModelRecipe(Table):
    """Table [model] of a recipe: architecture of the model, given by exactly one of `preset` (name of a public model),
    `from` (Hugging Face directory or its config.json) and `family` (with layers, hidden and heads).

    The other fields change single values of that architecture, as in `spec.config.ModelConfig`; a field that is None
    keeps its value, or with `family` the family's default.

    Attributes:
        load_weights: Start from the weights of the directory `from` instead of random ones.
        dense_layers: Indices, from 0, of layers with an MLP instead of experts.
        shared_intermediate: Intermediate size of the shared expert; 0: no shared expert.
        router_loss: Weight of the load-balancing loss of experts.
        prediction_layers: Number of modules for multi-token prediction (DeepSeek-V3), 0 or 1; the module predicts the
            token after the next.
        prediction_loss: Weight of the loss of these modules.
        mup_base_hidden: Hidden size for which initial values and learning rate were chosen; at another hidden size they
            are scaled by the maximal update parametrization (µP). None: no scaling.
    """

    preset: Name | None = None
    from_path: Name | None = Field(default=None, alias="from")  # a directory or a config.json
    load_weights: bool = False  # with `from`: start from its weights
    family: Annotated[str, named("family", (*FAMILIES, *ENCODER_FAMILIES))] | None = None
    layers: Annotated[int, Size("layers")] | None = None
    hidden: Annotated[int, Size("hidden")] | None = None
    heads: Annotated[int, Size("heads")] | None = None
    kv_heads: Annotated[int, Size("kv_heads")] | None = None
    head_dim: Annotated[int, Size("head_dim")] | None = None
    intermediate: Annotated[int, Size("intermediate")] | None = None
    vocabulary: Annotated[int, Size("vocabulary")] | None = None  # default: the tokenizer's
    max_positions: Annotated[int, Size("max_positions")] | None = None  # default: data.sequence
    rope_theta: Positive | None = None
    rope_scaling: dict[str, bool | int | float | str] | None = None
    sliding_window: Annotated[int, Size("sliding_window")] | None = None
    tied: bool | None = None
    norm_epsilon: Positive | None = None
    experts: Annotated[int, Size("experts")] | None = None  # of each layer; families with experts only
    experts_per_token: Annotated[int, Size("experts_per_token")] | None = None
    expert_intermediate: Annotated[int, Size("expert_intermediate")] | None = None
    shared_intermediate: Annotated[int, Size("shared_intermediate", 0)] | None = None  # 0: no shared expert
    dense_layers: list[Annotated[int, Size("layers", 0)]] | None = None  # layers without experts
    router_loss: NotNegative | None = None  # weight of the loss that balances experts
    prediction_layers: Annotated[int, Size("layers", 0)] | None = None  # modules of multi-token prediction: 0 or 1
    prediction_loss: NotNegative | None = None  # weight of their loss
    mup_base_hidden: Annotated[int, Size("hidden")] | None = None  # µP: hidden size that the settings were tuned at

    @model_validator(mode="after")
    def _check_architecture(self) -> Self:
        """Check that exactly one of preset, from and family is given, with all fields that it needs; return the table.
        Raises ValueError otherwise.
        """
        given = [
            key for key, value in (("preset", self.preset), ("from", self.from_path), ("family", self.family)) if value
        ]
        if not given:
            raise ValueError("has no architecture: give preset, from, or family with layers, hidden and heads")
        if len(given) > 1:
            raise ValueError(f"has two architectures, by {given[0]} and by {given[1]}: keep one")
        if self.family:
            missing = [key for key in ("layers", "hidden", "heads") if getattr(self, key) is None]
            if missing:
                raise ValueError(f"family {self.family} needs {' and '.join(missing)} as well")
        if self.load_weights and not self.from_path:
            raise ValueError("load_weights needs from: the directory of the weights")
        return self


class TrainRecipe(Table):
    """Table [train] of a recipe: steps, batch, objective, optimizer, learning-rate schedule, loss scaling, validation,
    logging and profiling.

    Attributes:
        batch: Sequences per optimizer step, over all ranks.
        objective: "next-token", or "dpo", "ipo", "simpo", "orpo" for preference records, "kto" for unpaired ones; None:
            "dpo" for preference records, "kto" for unpaired ones, else "next-token".
        preference_beta: beta of DPO, IPO, SimPO and KTO, lambda of ORPO; None: 0.1, for SimPO 2.
        preference_margin: gamma of SimPO; None: 1.
        preference_smoothing: Label smoothing of DPO.
        desirable_weight, undesirable_weight: lambda of KTO for desirable and for undesirable responses.
        betas, epsilon: Constants of Adam.
        weight_decay: Coefficient of decoupled weight decay, of matrices only.
        momentum: Momentum of SGD; 0 for other optimizers.
        router_bias_rate: Amount by which each step changes the biases that balance the load of experts.
        learning_rate: Peak learning rate.
        minimum_learning_rate: Learning rate at the end, as a fraction of the peak.
        warmup, decay: Optimizer steps of the warm-up, and of the final decay of the schedule "wsd".
        clip: Maximum global gradient norm, 0: off.
        validate_every: Steps between validations, 0: never.
        validation_sequences: Number of sequences in each validation.
        maximum_skipped: Steps in a row that may be skipped for a loss or gradient that is not finite.
        loss_scale: Initial value for fp16, doubled after `loss_scale_every` finite steps in a row.
        compile: Run layers under torch.compile.
        deterministic: Use deterministic GPU kernels only.
        cuda_graphs: On a GPU, launch forward and backward of a step as one CUDA graph.
        tensor_overlap: Overlap of tensor-parallel products with their collectives: "off"; "auto": on GPUs, by symmetric
            memory or in chunks; "chunks": in chunks on any device.
        log_every: Steps between log lines.
        slow_rank_factor: Report a rank slower than the median rank by this factor.
        profile: Steps to trace, "10" or "10:12" (inclusive).
        profile_ranks: Ranks whose operators are traced; empty: all.
    """

    steps: Annotated[int, Size("steps")]
    batch: Annotated[int, Size("batch")]  # sequences in a step, over all ranks
    objective: Annotated[str, named("objective", OBJECTIVES)] | None = None  # default: "dpo" for preferences
    preference_beta: Positive | None = None  # dpo, ipo, simpo, orpo, kto; default: by the objective
    preference_margin: NotNegative | None = None  # simpo: gamma; default 1.0
    preference_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0  # dpo: assumed fraction of swapped pairs
    desirable_weight: Positive = 1.0  # kto: lambda of desirable responses
    undesirable_weight: Positive = 1.0  # kto: lambda of undesirable responses
    optimizer: Annotated[str, named("optimizer", OPTIMIZERS)] = "adamw"
    learning_rate: Positive  # at the peak
    betas: Annotated[list[Decay], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    momentum: Decay = 0.0  # sgd
    router_bias_rate: NotNegative = 0.001  # change per step of the biases that balance experts
    schedule: Annotated[str, named("schedule", LEARNING_RATE_SCHEDULES)] = "cosine"
    warmup: Annotated[int, Size("steps", 0)] = 0  # steps
    decay: Annotated[int, Size("steps", 0)] = 0  # steps of the wsd tail
    minimum_learning_rate: Fraction = 0.1  # of the peak
    clip: NotNegative = 1.0  # global gradient norm; 0 = off
    compile: bool = False
    deterministic: bool = False
    cuda_graphs: bool = False
    tensor_overlap: Annotated[str, named("tensor_overlap", TENSOR_OVERLAPS)] = "off"  # products with their collectives
    validate_every: CountOrZero = 0  # steps; 0 = never
    validation_sequences: Annotated[int, Size("documents")] = 64
    maximum_skipped: CountOrZero = 10  # steps in a row whose loss or gradient is not finite
    loss_scale: Annotated[Positive, AfterValidator(_check_power_of_two)] = 65536.0  # fp16: at the start
    loss_scale_every: Count = 2000  # fp16: finite steps in a row after which it is doubled
    log_every: Count = 1
    slow_rank_factor: Annotated[float, Field(gt=1)] = 1.5  # times the median rank
    profile: Annotated[str, AfterValidator(_check_step_range)] | None = None  # steps, "10" or "10:12" (inclusive)
    profile_ranks: list[Annotated[int, Size("ranks", 0)]] = []  # ranks whose operators are traced; empty: all

    @property
    def planned_optimizer(self) -> str:
        """Name of the optimizer in the planner, which prices SGD with momentum as "momentum"."""
        return "momentum" if self.momentum else self.optimizer

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        """Check that warm-up and decay fit into the number of steps, that profiled steps exist, and that options such
        as momentum belong to the chosen objective and optimizer; return the table. Raises ValueError otherwise.
        """
        if self.warmup + self.decay > self.steps:
            parts = f"warmup = {self.warmup}" + (f" and decay = {self.decay}" if self.decay else "")
            raise ValueError(
                f"{parts} do not fit into steps = {self.steps}"
                if self.decay
                else f"{parts} is more than steps = {self.steps}; set train.warmup=0, or up to {self.steps}"
            )
        if self.schedule == "wsd" and not self.decay:
            raise ValueError('schedule "wsd" needs decay: the number of steps of its tail')
        if self.decay and self.schedule != "wsd":
            raise ValueError(f'decay is the tail of schedule "wsd"; schedule "{self.schedule}" has none')
        if self.profile and int(self.profile.rpartition(":")[2]) > self.steps:
            raise ValueError(f'profile = "{self.profile}" ends after the last step: steps = {self.steps}')
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f'momentum belongs to optimizer "sgd"; "{self.optimizer}" has betas')
        return self


class CollectivesRecipe(Table):
    """Table [collectives] of a recipe: algorithm of each collective on gradients and parameters over the data, shard
    and replica axes of the mesh.

    Values: "native" (the function of torch.distributed); a name such as "ring"; "auto" (fastest algorithm for each
    vector size); "@FILE" (a file with a collective program, which lists each rank's sends and receives).
    """

    all_reduce: Annotated[str, _program_validator("all-reduce")] = "native"
    reduce_scatter: Annotated[str, _program_validator("reduce-scatter")] = "native"
    all_gather: Annotated[str, _program_validator("all-gather")] = "native"


class TrackRecipe(Table):
    """Table [track] of a recipe: experiment trackers that receive the metrics of `metrics.jsonl`.

    to: "tensorboard", "mlflow", the name of an entry point, or "module:Class". options: tracker name -> options passed
    to that tracker.
    """

    to: list[TrackerName] = []  # tensorboard, mlflow, an entry point's name, or module:Class
    options: dict[str, dict[str, bool | int | float | str]] = {}  # tracker name -> its options

    @field_validator("to")
    @classmethod
    def _check_unique(cls, names: list[str]) -> list[str]:
        """Check that no tracker is listed twice in `names`; return `names` unchanged. Raises ValueError otherwise."""
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f'names "{name}" twice')
        return names


class CheckpointRecipe(Table):
    """Table [checkpoint] of a recipe: interval, retention and dtype of checkpoints.

    Attributes:
        every: Optimizer steps between checkpoints; 0: save only when the run ends or is stopped.
        keep: Number of newest checkpoints to retain.
        keep_best: Retain the checkpoint with the lowest validation loss too.
        dtype: "float32" or "bfloat16", of the exported model weights (optimizer state and master weights stay float32).
        background: Write in a thread while training continues.
    """

    every: CountOrZero = 0  # steps; 0 = at the end only
    keep: Count = 2
    keep_best: bool = True
    dtype: Annotated[str, named("dtype", CHECKPOINT_DTYPES)] = "float32"
    background: bool = True
