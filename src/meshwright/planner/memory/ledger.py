"""Memory ledger of one rank in a training step: all tensors at the memory peak, as the pipeline's program orders steps.
It was compared with PyTorch's allocator on a CPU, and on CUDA with tensors without memory (bench/gpu_ledger.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypedDict, Unpack

import numpy as np

from meshwright.collectives.quantities import GIB
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.names import check_options, unknown
from meshwright.planner.cost.cached import cached_method
from meshwright.planner.cost.dimensions import element_types
from meshwright.planner.cost.engines import ENGINES, Engine
from meshwright.planner.cost.micro_batch import DTYPES, MicroBatch, Routed, Starts
from meshwright.planner.memory import passes
from meshwright.planner.memory.compiled_blocks import can_predict_compiled
from meshwright.planner.memory.passes import StagePass
from meshwright.planner.memory.saved import position_tables
from meshwright.planner.memory.snapshot import Allocation, count_bytes
from meshwright.planner.memory.stage_snapshots import RankStep, StageSnapshots
from meshwright.planner.memory.states import PassState, Reduction, flats_of, list_states
from meshwright.planner.memory.teacher import TeacherMemory
from meshwright.program.order import Integers
from meshwright.schedules.transfers import with_transfers
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameter_entries import REDUCTIONS_IN_FLIGHT
from meshwright.spec.parameters import parameter_table
from meshwright.spec.partition import Partition
from meshwright.spec.refuse import refuse
from meshwright.spec.stage_times import program_for
from meshwright.spec.teacher import TeacherWork

CATEGORIES = (
    *("parameters", "gradients", "optimizer", "activations", "communication", "logits", "workspace", "framework"),
    "unexplained",
)
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "workspace")
"""Categories of the peak in JSON answers, in which "workspace" includes communication and logits."""
_HELD = {
    passes.SENT: ("communication", "pipeline tensor to send"),
    passes.RECEIVED: ("communication", "received pipeline tensor"),
    passes.QUEUE: ("activations", "queue of weight gradients"),
}
"""Category and name of what stays allocated between passes, except saved activations."""

REPEATING = (
    "1f1b", "interleaved", "interleaved-zb", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe", "dualpipe-v",
    "chimera", "gems",
)  # fmt: skip
ROUNDS, ROUNDS_OF_FEW_RANKS = 3, 4
"""Micro-batches per pipeline rank after which the memory of these schedules only repeats, as a test checks: on more
than 8 pipeline ranks, and on up to 8, where gradient reductions stay in flight for a larger part of a round."""

CUDA_CONTEXT_BYTES = int(0.9 * 2**30)
"""Most bytes that a process takes on a CUDA device before its first tensor; 0.5 GiB at least (stas00/ml-engineering,
training performance, "preloaded CUDA kernels memory usage"). PyTorch's allocator does not count them."""

CUBLAS_WORKSPACE = 8 * (1 << 20) + 128 * (1 << 10)
CUBLAS_WORKSPACES = {
    "Hopper": 32 << 20, "Hopper+Grace": 32 << 20, "CDNA2": 32 << 20, "CDNA3": 128 << 20, "CDNA4": 128 << 20,
}  # fmt: skip
"""Bytes of cuBLAS's workspace, allocated by the first matrix product of the forward's and of the backward's thread: of
these architectures, and of all others (aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`)."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Itemised memory of one rank at the peak of a training step.

    Attributes:
        items: Tensors at the peak.
        peak_bytes: Sum of the items.
        peak_snapshot: Name of the memory snapshot (point in time) at the peak.
        between_steps: Bytes of persistent memory.
        compiled: True if every layer is predicted as compiled by torch.compile.
        pp_rank: Pipeline rank.
        framework_bytes: Most bytes of the CUDA context, which torch's allocator does not count; on a CPU those of
            interpreter and libraries, if known.
        slack_bytes: Allowance for memory without a known tensor, such as fragmentation.
        nccl_bytes: Most bytes that NCCL's buffers take, which are not in `device_bytes`; 0 on a CPU.
    """

    items: tuple[Allocation, ...]
    peak_bytes: int
    peak_snapshot: str
    between_steps: int = 0
    compiled: bool = False
    pp_rank: int = 0
    framework_bytes: int = 0
    slack_bytes: int = 0
    nccl_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        """Bytes needed on the device: tensors, framework and what cannot be itemised."""
        return self.peak_bytes + self.framework_bytes + self.slack_bytes

    def by_category(self) -> dict[str, int]:
        """Return the bytes at the peak by category, with "framework" and "unexplained"; every category is a key."""
        found = dict.fromkeys(CATEGORIES, 0)
        for item in self.items:
            found[item.category] += item.bytes
        return found | {"framework": self.framework_bytes, "unexplained": self.slack_bytes}

    def gib(self) -> dict[str, float]:
        """Return {category: GiB}. "peak" is the sum over tensors; "framework" and "unexplained" come in addition to the
        peak, "nccl" in addition to all. "workspace" includes communication and logits."""
        found = self.by_category()
        parts = {name: found[name] / GIB for name in MEMORY_PARTS}
        parts["workspace"] += (found["communication"] + found["logits"]) / GIB
        outside = {"framework": self.framework_bytes, "unexplained": self.slack_bytes, "nccl": self.nccl_bytes}
        return parts | {name: size / GIB for name, size in {"peak": self.peak_bytes, **outside}.items()}

    def document(self) -> dict[str, Any]:
        """Return the ledger as a JSON object. nccl_bytes: maximum bytes of NCCL's buffers, in no other entry.

        Keys of an item: name, category; shape, dtype: of one tensor; bytes: of all tensors equal to this one together;
        stage: pipeline stage, null if it belongs to none; first, last: events between which it is allocated."""
        return {
            "pp": self.pp_rank, "when": self.peak_snapshot, "peak_bytes": self.peak_bytes,
            "framework_bytes": self.framework_bytes, "unexplained_bytes": self.slack_bytes,
            "nccl_bytes": self.nccl_bytes, "items": [item._asdict() for item in self.items],
        }  # fmt: skip


class LedgerOptions(TypedDict, total=False):
    """Keyword options of `ledger`.

    Attributes:
        optimizer: Such as "adamw", the default.
        precision: Such as "bf16"; the layout's, else "fp32", unless given.
        parameter_dtype: Torch's type name that replaces the precision ("float64" in tests).
        documents: True if sequences pack several documents (for CPU attention the worst case is assumed), or for each
            of this rank's sequences the token positions at which documents begin.
        device: "cpu" (gloo), the default, or "cuda" (NCCL).
        routed: Numbers of token copies by index of the layer with experts; equal load unless given.
        pairs: True for training on response pairs (DPO).
        teacher: The teacher of distillation; None: none.
        compile: True if layers, norm and loss are compiled; `Ledger.compiled` is True if this can be predicted.
        architecture: Architecture of CUDA devices, such as "Hopper".
        graphs: True if forward and backward are a CUDA graph, which has its own copy of the batch and, captured on its
            own stream, its own workspaces of cuBLAS.
        engine: The engine `meshwright`, or its variant with another overlap of products.
    """

    optimizer: str
    precision: str | None
    parameter_dtype: str | None
    documents: bool | Starts
    device: str
    routed: Mapping[int, Routed] | None
    pairs: bool
    teacher: TeacherWork | None
    compile: bool
    architecture: str
    graphs: bool
    engine: Engine


def ledger(
    config: ModelConfig, layout: Layout, *, batch: int, sequence: int, rank: int = 0, **options: Unpack[LedgerOptions]
) -> Ledger:
    """Return the itemised memory of a rank at the peak of a training step; arguments and errors: as of
    `replay_step`."""
    return replay_step(config, layout, batch=batch, sequence=sequence, rank=rank, **options).ledger()


def replay_step(
    config: ModelConfig, layout: Layout, *, batch: int, sequence: int, rank: int = 0, **options: Unpack[LedgerOptions]
) -> StepReplay:
    """Return the replay of the training step of `rank`, with `batch` sequences (over all ranks) of `sequence` tokens.

    options: fields of `LedgerOptions`. Raises `UserError` for an infeasible layout.
    """
    check_options(ledger, options, LedgerOptions)
    refuse(layout, config, batch, sequence, planning=True)
    if (teacher := options.get("teacher")) is not None:
        teacher.refuse(layout, batch, sequence)
    name = options.get("precision") or layout.precision or "fp32"
    dtype = options.get("parameter_dtype")
    if dtype is None and name not in DTYPES:
        raise UserError(f"{unknown('precision', name, DTYPES)}: memory is priced for these")
    micro_batch = MicroBatch.of(
        config, layout, batch // (layout.dp * layout.micro_batches), sequence, dtype=dtype or DTYPES[name],
        packed=options.get("documents", False), device=options.get("device", "cpu"),
        responses=int(options.get("pairs", False)), routed=options.get("routed") or {},
        engine=options.get("engine", ENGINES["meshwright"]),
    )  # fmt: skip
    return StepReplay(micro_batch, rank, options)


# Cached, as all ranks share them.
_table = lru_cache(maxsize=16)(parameter_table)
_add_transfers = lru_cache(maxsize=32)(with_transfers)


def shorten_repeating_schedule(layout: Layout) -> Layout:
    """Return the layout with fewer micro-batches and an equal memory peak, if its schedule repeats a pattern; otherwise
    return the layout itself."""
    enough = layout.pp * (ROUNDS if layout.pp > 8 else ROUNDS_OF_FEW_RANKS)
    enough += layout.pp * (enough % 2)  # bidirectional schedules need an even number
    if layout.schedule not in REPEATING or layout.micro_batches % layout.pp or layout.micro_batches <= enough:
        return layout
    return layout.with_(micro_batches=enough)


class StepReplay:
    """Replay of a rank's training step, in the order of its pipeline schedule, that finds the memory peak. batch:
    micro-batch; rank: global rank; options: options of the function `ledger`."""

    def __init__(self, batch: MicroBatch, rank: int, options: LedgerOptions) -> None:
        config, layout, sequence = batch.config, batch.layout, batch.sequence
        self.batch, self.config, self.layout = batch, config, layout
        self.graphs = options.get("graphs", False)
        of_cublas = CUBLAS_WORKSPACES.get(options.get("architecture", ""), CUBLAS_WORKSPACE)
        self.workspace = of_cublas if batch.device == "cuda" else 0
        self._examples: dict[object, int] = {}
        self.place = layout.coordinates(rank)
        self.table = _table(config)
        self.program = program_for(shorten_repeating_schedule(layout), config, sequence)
        self.partition = Partition.of(self.program, config, self.table, sequence)
        self._units = {one.index: self.partition.units(one) for one in self.partition.stages_on(self.place["pp"])}
        flats = flats_of(self.table, layout, self.partition.units_on(self.place["pp"]))
        sums = element_types(batch.dtype)["wide"]
        self.states = list(list_states(flats, batch.dtype, sums, options.get("optimizer", "adamw")))
        steps = self.program.steps
        split = passes.INPUT_GRADIENT in steps.kind[steps.rank == self.place["pp"]]
        # What experts leave for later cuts a compiled block into pieces.
        pieces = split and any(map(config.has_experts, range(config.layers)))
        teacher = options.get("teacher")
        self.step = RankStep(
            batch, flats, self.table.tied, self.place["tp"], options.get("compile", False) and not pieces, split,
            None if teacher is None else TeacherMemory(teacher, batch),
        )  # fmt: skip
        self._stay = list(self._whole_step_items())

    def peak_bytes(self, messages: bool = True) -> int:
        """Return the bytes of all tensors at the step's memory peak. messages: False for a lower bound without messages
        between pipeline ranks, whose order takes long to compute."""
        return self._find_peak(messages)[2]

    def ledger(self) -> Ledger:
        """Return the ledger of all tensors at the step's memory peak."""
        at, state, total = self._find_peak(True)
        each = self._list_passes(True)[0][at]
        stage = self.stage(each.stage, each.at_once)
        peak = stage.find_peak(each.kind, state)
        framework = 0 if self.batch.device == "cpu" else CUDA_CONTEXT_BYTES
        compiled = self.step.compiled and can_predict_compiled(self.batch)
        items = *self._stay, *self._held_items(at), *stage.list_items(peak)
        assert count_bytes(items) == total
        return Ledger(items, total, peak.name, count_bytes(self._stay), compiled, framework_bytes=framework)

    def _whole_step_items(self) -> Iterator[Allocation]:
        """Yield the tensors allocated during the whole step: model states, position tables, batch, cuBLAS workspaces
        ..."""
        yield from (state for _, state in self.states)
        if any(stage.layers for stage in self.partition.stages_on(self.place["pp"])):
            yield from position_tables(self.config, self.batch.sequence, self.batch.dtype)
        yield from self.step.teacher.list_tensors(self.place["pp"]) if self.step.teacher else ()
        for way in (1 + self.graphs) * ("forward", "backward") if self.workspace else ():
            yield Allocation("workspace", f"cuBLAS, {way}", (self.workspace,), "uint8", self.workspace)
        shape = (1 + self.graphs) * self.layout.micro_batches * self.batch.rows, self.batch.tokens
        targets = (shape[0],) if self.config.head == "classes" else shape
        documents = [("batch.documents", (shape[0], self.batch.sequence))] if self.batch.masked else []
        for name, of in (("batch.tokens", shape), ("batch.targets", targets), *documents):
            yield Allocation("workspace", name, of, "int64", 8 * math.prod(of), None, "start of step", "end of step")

    def _list_passes(self, messages: bool) -> tuple[list[StagePass], list[tuple[int, int]], Integers]:
        """Return the rank's passes and the tensors that stay allocated between them, as the function `list_passes`.
        messages: True to count messages between pipeline ranks."""
        return passes.list_passes(_add_transfers(self.program) if messages else self.program, self.place["pp"])

    @cached_method
    def _find_peak(self, messages: bool) -> tuple[int, PassState, int]:
        """Return (index of the pass at the step's memory peak, state of its stage when it begins, bytes of all
        tensors). messages: True to count messages between pipeline ranks.

        Of passes of one kind through alike stages, in alike states, only the one with the most bytes outside it is
        computed."""
        steps, tensors, counts = self._list_passes(messages)
        sizes = [count_bytes(self._list_held(what, self._example(stage))) for what, stage in tensors]
        held = counts @ np.array(sizes, np.int64)  # bytes that stay allocated while each pass runs
        sharded = any(flat.zero >= 2 for flat in self.step.flats)  # else all reductions are alike
        kinds: dict[object, int] = {}
        reductions: dict[tuple[Reduction, ...], int] = {(): 0}  # numbered: hashing them for each pass takes long
        known: dict[tuple[StagePass, int], tuple[int, PassState, tuple[Reduction, ...], int]] = {}
        most: dict[int, tuple[int, int, PassState]] = {}
        in_flight, number = tuple[Reduction, ...](), 0
        for at, (each, size) in enumerate(zip(steps, held.tolist(), strict=True)):
            if (each, number) not in known:
                state = PassState(each.later and sharded, each.last, in_flight)
                alone = state._replace(before=tuple(one._replace(flat=one.flat._replace(unit="")) for one in in_flight))
                alike = self._example(each.stage), each.at_once, each.kind, alone
                after = self.step.start_reductions(each.kind, state, self._units[each.stage])[-REDUCTIONS_IN_FLIGHT:]
                numbers = kinds.setdefault(alike, len(kinds)), reductions.setdefault(after, len(reductions))
                known[each, number] = numbers[0], state, after, numbers[1]
            kind, state, in_flight, number = known[each, number]
            if kind not in most or size > most[kind][0]:
                most[kind] = size, at, state
        found = []
        for size, at, state in most.values():
            each = steps[at]
            stage = self.stage(self._example(each.stage), each.at_once)
            found.append((-size - stage.count_bytes(stage.find_peak(each.kind, state)), at, state))
        size, at, state = min(found, key=lambda one: one[:2])
        return at, state, count_bytes(self._stay) - size

    @cached_method
    def _list_held(self, what: int, stage: int) -> list[Allocation]:
        """Return the tensors of one kind that stay allocated between passes. what: such as `passes.SENT`; stage: index
        of the stage."""
        if what not in _HELD:
            return self.stage(stage, what == passes.SAVED_AT_ONCE).saved
        size = int(self.batch.stream_bytes)
        if what == passes.QUEUE:
            orders = (each.at_once for each in self._list_passes(False)[0] if each.stage == stage)
            size = self.stage(stage, next(orders)).queue
        category, name = _HELD[what]
        whole = Allocation(category, f"stage {stage}: {name}", bytes=size, first="forward", last="backward")
        return [whole] if size else []

    @cached_method
    def _example(self, index: int) -> int:
        """Return the index of a stage of the rank whose tensors have the same sizes as those of stage `index`, the same
        for all stages that are alike; of a stage on another rank its own."""
        if index not in self._units:
            return index
        stage = self.partition.stages[index]
        alike = stage.first, stage.last, tuple(map(self.step.likeness, self._units[index]))
        return self._examples.setdefault(alike, index)

    @cached_method
    def stage(self, index: int, at_once: bool) -> StageSnapshots:
        """Return the generator of memory snapshots of the stage with index `index`. at_once: True if each backward of
        the stage directly follows its forward."""
        return StageSnapshots(self.step, self.partition.stages[index], self._units[index], at_once)

    def _held_items(self, at: int) -> Iterator[Allocation]:
        """Yield the ledger items of the tensors that stay allocated while the pass with index `at` runs."""
        _, tensors, counts = self._list_passes(True)
        for (what, stage), count in zip(tensors, counts[at].tolist(), strict=True):
            for tensor in self._list_held(what, stage) if count else ():
                title = tensor.name if count == 1 or what in _HELD else f"{tensor.name} x {count}"
                yield tensor._replace(name=title, bytes=tensor.bytes * count, stage=stage)
