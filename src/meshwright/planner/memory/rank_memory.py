"""Memory of every pipeline rank, including the framework's memory and fragmentation.

For the engine `meshwright` it is the ledger's, tensor by tensor. For another engine it is computed from published
figures: bytes per parameter, saved activations of a layer, micro-batches in flight under the schedule, and logits.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from meshwright.collectives.nccl_buffers import estimate_buffer_bytes
from meshwright.layout import Layout
from meshwright.names import BIDIRECTIONAL_SCHEDULES
from meshwright.planner.cost.blocks import layer_operators
from meshwright.planner.cost.bubbles import in_flight
from meshwright.planner.cost.communication import count_parameters, group_of
from meshwright.planner.cost.layer_times import micro_batch_of_layout
from meshwright.planner.cost.micro_batch import LayerKind, layer_examples, layer_kinds
from meshwright.planner.cost.operators import sum_parameters
from meshwright.planner.cost.pipeline_times import place_stages
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.memory.activation_bytes import state_bytes_per_parameter
from meshwright.planner.memory.ledger import CUDA_CONTEXT_BYTES, MEMORY_PARTS, Ledger, StepReplay, replay_step
from meshwright.planner.memory.published import loss_bytes, published_layer
from meshwright.planner.memory.snapshot import Allocation, count_bytes
from meshwright.planner.problem import Problem
from meshwright.schedules.library import SYNCHRONOUS, find_file_version
from meshwright.spec.stage_times import program_for
from meshwright.spec.stages import Stage

SLACK = 0.05
"""Memory that CUDA's allocator reserves beyond the peak because of fragmentation, as a fraction of the peak (published
figures: 3 to 7%)."""


def slack_fraction(cluster: Cluster) -> float:
    """Return (memory use of a device - predicted peak) / predicted peak. On CUDA it is allocator fragmentation; the
    excess measured in finished runs on the cluster is added."""
    found = cluster.calibration
    shown = 0.0 if found is None or found.unexplained_share is None else found.unexplained_share
    return max(0.0, (SLACK if cluster.kind == "cuda" else 0.0) + shown)


def context_bytes(problem: Problem) -> int:
    """Return the bytes that a rank's process holds in addition to tensors. On CUDA it is an upper bound of the CUDA
    context; on a CPU it is interpreter and libraries, as measured on this machine."""
    return CUDA_CONTEXT_BYTES if problem.cluster.kind == "cuda" else sum(size for _, size in problem.process)


def merge_layers(items: Iterable[Allocation]) -> list[Allocation]:
    """Merge ledger items that differ only in the number of their layer, such as `layers.0.mlp.up.input`, and sum their
    bytes. Return the merged items, largest first."""
    found: dict[tuple[object, ...], list[tuple[int, Allocation]]] = {}
    for item in items:
        layer = re.match(r"layers\.(\d+)\.?(.*)", item.name)
        key = item.category, item.shape, item.dtype, *((layer[2],) if layer else (item.name, item.first))
        found.setdefault(key, []).append((int(layer[1]) if layer else -1, item))
    merged = []
    for (_, _, _, name, *_), same in found.items():
        layers, (_, first) = sorted({number for number, _ in same}), same[0]
        title = first.name if len(layers) == 1 else f"{name}, {len(layers)} layers ({layers[0]} to {layers[-1]})"
        merged.append(first._replace(name=title, bytes=sum(item.bytes for _, item in same)))
    return sorted(merged, key=lambda item: -item.bytes)


def memory_of(problem: Problem, layout: Layout, pp_rank: int) -> Ledger:
    """Return the memory of the pipeline rank `pp_rank` at its peak. Raises `UserError` for an infeasible layout."""
    if problem.engine.name == "meshwright":
        replay = _replay(problem, layout, pp_rank, find_file_version(layout))
        found, sub_axes = replay.ledger(), replay.partition.list_sub_axes(layout, pp_rank)
    else:
        items = tuple(_published(problem, layout, pp_rank))
        found, sub_axes = Ledger(items, count_bytes(items), "most micro-batches in flight"), {}
    cluster, slack = problem.cluster, round(slack_fraction(problem.cluster) * found.peak_bytes)
    nccl = estimate_buffer_bytes(layout, cluster.devices_per_node, sub_axes) if cluster.kind == "cuda" else 0
    return replace(found, pp_rank=pp_rank, framework_bytes=context_bytes(problem), slack_bytes=slack, nccl_bytes=nccl)


def _device_bytes(problem: Problem, layout: Layout, pp_rank: int, messages: bool = True) -> int:
    """Return the bytes that the pipeline rank `pp_rank` needs on a device at its peak. messages: as of
    `StepReplay.peak_bytes`."""
    if problem.engine.name != "meshwright":
        return memory_of(problem, layout, pp_rank).device_bytes
    peak = _replay(problem, layout, pp_rank, find_file_version(layout)).peak_bytes(messages)
    return peak + context_bytes(problem) + round(slack_fraction(problem.cluster) * peak)


@lru_cache(maxsize=16)
def _replay(problem: Problem, layout: Layout, pp_rank: int, version: object) -> StepReplay:
    """Return the replay of the training step of the pipeline rank `pp_rank` under the engine `meshwright`. version: of
    the layout's schedule file, so that an edited file is replayed again."""
    return replay_step(
        problem.config, layout, batch=problem.batch, sequence=problem.sequence, pairs=problem.pairs,
        rank=pp_rank * layout.tp * layout.cp * layout.dp, optimizer=problem.optimizer, precision=problem.precision,
        documents=problem.documents > 1, device=problem.cluster.kind, compile=problem.compile, graphs=problem.graphs,
        teacher=problem.teacher, architecture=problem.cluster.device.architecture, engine=problem.engine,
    )  # fmt: skip


def distinct_ranks(problem: Problem, layout: Layout) -> list[int]:
    """Return the pipeline ranks whose memory must be computed to find the highest peak, first those that hold the most
    layers of micro-batches in flight. Of the ranks with equal stages these are the first, the last and the one with the
    most micro-batches in flight."""
    waiting, queued = in_flight(layout.schedule, layout.pp, layout.chunks, layout.micro_batches)
    held = (waiting + queued).max(axis=0)
    places, alike, kinds = stages_at(problem, layout), dict[object, list[int]](), layer_kinds(problem.config)
    for rank, place in enumerate(places):
        alike.setdefault(tuple(_find_kind(kinds, stage) for stage in place), []).append(rank)
    chosen = {rank for ranks in alike.values() for rank in (ranks[0], ranks[-1], max(ranks, key=held.__getitem__))}
    layers = {rank: sum(len(stage.layers) for stage in places[rank]) for rank in chosen}
    return sorted(chosen, key=lambda rank: (-held[rank] * layers[rank], -rank))


def _find_kind(kinds: Sequence[LayerKind], stage: Stage) -> object:
    """Return a value that is equal for stages of equal size. Windows do not count by layer: they matter only to the
    temporaries of the layer that has the most. kinds: kind of each layer of the model."""
    here = kinds[stage.layers.start : stage.layers.stop]
    counts, windows = Counter(kind._replace(window=None) for kind in here), frozenset(kind.window for kind in here)
    return frozenset(counts.items()), windows, stage.first, stage.last


def stages_at(problem: Problem, layout: Layout) -> list[list[Stage]]:
    """Return the pipeline stages of each pipeline rank, one list per rank. Under a bidirectional schedule a list has
    the stages of both replicas."""
    known = layout.schedule in SYNCHRONOUS  # of others only the program says where stages are
    program = None if known else program_for(layout, problem.config, problem.sequence)
    stages, places = place_stages(problem, layout, program)
    return [[stages[at] for at in place] for place in places]


def _published(problem: Problem, layout: Layout, pp_rank: int) -> Iterator[Allocation]:
    """Yield the memory items of the pipeline rank `pp_rank` under an engine other than `meshwright`, by the engine's
    published closed forms; their sum is the peak."""
    config, engine = problem.config, problem.engine
    place = stages_at(problem, layout)[pp_rank]
    batch = micro_batch_of_layout(problem, layout)
    x = batch.itemsize
    dense, experts = (sum(part) for part in zip(*(count_parameters(batch, stage) for stage in place), strict=True))
    each = state_bytes_per_parameter(problem)
    for kind, numel, axis in (("dense", dense, "shard"), ("experts", experts, "expert_shard")):
        ranks = group_of(layout, axis, problem.cluster).ranks
        for category, size in zip(MEMORY_PARTS, each.sharded(layout.zero, ranks), strict=False) if numel else ():
            yield Allocation(category, f"{kind} {category}", bytes=round(numel * size))
    waiting, _ = in_flight(layout.schedule, layout.pp, layout.chunks, layout.micro_batches)
    # Under a bidirectional schedule a micro-batch passes one of the rank's two stages.
    flying = float(waiting[:, pp_rank].max()) / (len(place) if layout.schedule in BIDIRECTIONAL_SCHEDULES else 1)
    again = 0.0
    for mixture, layers in Counter(config.has_experts(layer) for stage in place for layer in stage.layers).items():
        saved = published_layer(batch, mixture)
        for name, size in saved.items():
            title = f"{name} of {layers} layers x {flying:g}"
            yield Allocation("activations", title, bytes=round(size * x / 2 * layers * flying))
        again = max(again, sum(published_layer(batch.recomputed, mixture).values()) - sum(saved.values()))
    scores = config.head in ("next", "masked") and any(stage.last for stage in place)
    logits = loss_bytes(batch) if scores else 0.0
    # The loss has ended when a layer is recomputed, so the larger of the two counts.
    if again * x / 2 > logits:
        yield Allocation("activations", "a recomputed layer", bytes=round(again * x / 2))
    elif logits:
        yield Allocation("logits", "logits", bytes=round(logits))
    whole, once = dense + experts, engine.communicated_zero_stage(layout.zero, layout.pp) < layout.zero
    if once or (engine.holds_gradients and layout.zero > 1 and layout.micro_batches > 1):
        size = each.gradients * (1 if once else 1 - 1 / layout.group_size("shard"))
        yield Allocation("gradients", "unsharded gradients", bytes=round(whole * size))
    if layout.zero == 3:
        layer = max(sum(sum_parameters(layer_operators(batch, each))) for each in layer_examples(config).values())
        yield Allocation("communication", "gathered parameters", bytes=round(x * (whole if once else 2 * layer)))


def fullest_rank(problem: Problem, layout: Layout) -> Ledger:
    """Return the memory of the pipeline rank with the highest peak."""
    ranks = distinct_ranks(problem, layout)
    return memory_of(problem, layout, max(ranks, key=lambda rank: (_device_bytes(problem, layout, rank), -rank)))


def expected_peak_bytes(problem: Problem, layout: Layout, limit: float) -> int:
    """Return the bytes that the pipeline rank with the highest expected peak needs on a device. If they exceed `limit`
    even without messages between ranks, whose order takes long to compute, messages are left out."""
    rank = distinct_ranks(problem, layout)[0]
    least = _device_bytes(problem, layout, rank, messages=layout.pp == 1)
    return least if least > limit else _device_bytes(problem, layout, rank)


def peak_device_bytes(problem: Problem, layout: Layout, limit: float = math.inf) -> int:
    """Return the bytes that the pipeline rank with the highest peak needs on a device, without a list of its tensors.
    limit: as soon as a rank needs more bytes than this, they are returned, and the ranks after it are not computed."""
    largest = 0
    for rank in distinct_ranks(problem, layout):
        largest = max(largest, _device_bytes(problem, layout, rank))
        if largest > limit:
            break
    return largest
