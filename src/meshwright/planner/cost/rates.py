"""Seconds of an operation on a device and of a collective on a cluster: from a few constants (rates.toml) that scale
the data sheet's peaks, or, on a machine that `meshwright probe` measured, from its measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from meshwright.errors import UserError
from meshwright.planner.cost.cached import cached_method
from meshwright.planner.cost.engines import AttentionKernel, Engine, Fusion
from meshwright.planner.cost.measured_rates import MeasuredCost, MeasuredRates, measured_cost
from meshwright.planner.cost.micro_batch import Number
from meshwright.planner.cost.operators import Collective, Operation, in_eight_bits
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.hardware.devices import Device, Link, architecture_share, compare_eight_bit_shares
from meshwright.program.durations import Floats
from meshwright.spec.config import ModelConfig
from meshwright.toml import read_packaged_toml

Sizes = TypeVar("Sizes", float, Floats)

BEFORE_HOPPER = ("Volta", "Ampere", "Ada", "Turing", "Pascal")


def constants() -> Mapping[str, Any]:
    """Return the parsed tables of rates.toml, the constants of the time model, such as efficiencies and latencies."""
    return read_packaged_toml("planner/cost/rates.toml")


def attention_kernel(engine: Engine, cluster: Cluster, config: ModelConfig) -> AttentionKernel:
    """Return the attention kernel that a training engine uses for a model on a cluster's devices, such as "flash-2".

    The engine `meshwright` uses attention in plain torch, tile by tile (`model/tiled_attention.py`), for models with a
    softcap and on CPUs. On CPUs `meshwright probe` times it as a single kernel."""
    if config.attention_softcap is not None and engine.name == "meshwright" and cluster.kind != "cpu":
        return "tiled"
    if engine.hopper_attention is None or cluster.device.architecture in BEFORE_HOPPER:
        return engine.attention
    return engine.hopper_attention


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds of a device in one precision, from which the seconds of operations are predicted.

    Attributes:
        product: FLOP/s that large matrix products reach.
        wide_product: In fp8 training, FLOP/s of the large matrix products that are computed in 16 bits; in other
            precisions equal to `product`.
        float32: FLOP/s that large matrix products in float32 reach.
        wide_peak: Sustained peak FLOP/s in the precision; in fp8 training, in 16 bits.
        memory: Achieved memory bandwidth in bytes a second.
        architecture: Architecture of the device, such as "Hopper".
        measured: Rates measured by `meshwright probe`, which take precedence; None if not measured.
    """

    product: float
    wide_product: float
    float32: float
    wide_peak: float
    memory: float
    architecture: str
    measured: MeasuredRates | None = None

    @classmethod
    def of(cls, cluster: Cluster, precision: str, fusion: Fusion = "eager") -> Rates:
        """Return the rates of a cluster's device. precision: "fp32", "tf32", "bf16", "fp16" or "fp8"; fusion: how the
        training engine fuses elementwise operations, "eager", "kernels" or "compiled".

        Raises `UserError` if the device lacks the precision, or its memory bandwidth is unknown.
        """
        device, sustained = cluster.device, constants()["products"]["sustained"]
        wide = "bf16" if precision == "fp8" else precision
        sustained = sustained.get(architecture_family(device.architecture), sustained["other"])
        peak, wide_peak = (sustained * cluster.peak(each) for each in (precision, wide))
        single = peak if precision == "tf32" else sustained * (device.peak("fp32") or cluster.peak(wide))
        if not device.memory_bandwidth:
            raise UserError(f"{device.name}: its memory bandwidth is unknown")
        own = MeasuredRates.of(cluster.measured, precision, fusion == "eager")
        memory = constants()["memory"]["efficiency"] * device.memory_bandwidth if own is None else own.memory
        product, wide_product, float32 = (
            each * share_of_peak(device, name)
            for each, name in ((peak, precision), (wide_peak, wide), (single, "fp32"))
        )
        return cls(product, wide_product, float32, wide_peak, memory, device.architecture, own)

    def seconds(self, operation: Operation, kernel: AttentionKernel = "flash-2") -> Number:
        """Return the seconds of all `count` calls of an operation: a number, or an array if its sizes are arrays.
        kernel: attention kernel, such as "flash-2"."""
        known = None if self.measured is None else self.measured.seconds(operation)
        if known is not None:
            return known
        if operation.kind == "product":
            rate = self.product if in_eight_bits(operation.name) else self.wide_product
        elif operation.kind == "float32 product":
            rate = self.float32
        elif operation.kind == "attention":
            share = attention_rates(kernel, self.architecture)[operation.phase == "input"]
            ring = constants()["step"]["ring"] if operation.name.endswith(".ring") else 1.0
            rate = share / ring * self.wide_peak
        else:
            rate = math.inf
        computing, moving = operation.flops / rate, operation.bytes / self.memory
        taken = computing + moving if operation.kind == "attention" else np.hypot(computing, moving)
        return operation.count * (launch_seconds(operation) + taken)


def launch_seconds(operation: Operation) -> float:
    """Return the seconds that the launch of one kernel takes. operation: the kernel."""
    multiplies = operation.kind in ("product", "float32 product", "attention")
    return float(constants()["products" if multiplies else "memory"]["launch_seconds"])


def architecture_family(architecture: str) -> str:
    """Return the first word of an architecture's name, such as "Hopper"."""
    return architecture.replace("+", " ").split(" ")[0]


@cache
def attention_rates(kernel: AttentionKernel, architecture: str) -> tuple[float, float]:
    """Return the fractions of the peak FLOP/s that a flash attention kernel reaches in (forward, backward). The first
    known rates count: those of the architecture, of its family, of Hopper (not for earlier families), of any device.

    kernel: such as "flash-2"; architecture: architecture of the device, such as "Blackwell Ultra"."""
    found = constants()["attention"]
    family = architecture_family(architecture)
    names = (architecture.replace(" ", "-"), family, *(() if family in BEFORE_HOPPER else ("hopper",)))
    rates = (found.get(f"{kernel}-{each.lower()}") for each in names)
    forward, backward = next(filter(None, rates), found[kernel])
    return forward, backward


def straggler_terms(cluster: Cluster) -> tuple[float, float]:
    """Return (factor, seconds) by which a step is slower than its operations, because all devices wait for the slowest
    device: step = factor x operations + seconds. (1, 0) on machines measured by `meshwright probe`."""
    if cluster.measured is not None:
        return 1.0, 0.0
    found, doublings = constants()["step"], math.log2(max(1, cluster.nodes))
    return 1 + found["straggler_share"] * doublings, found["seconds"] + found["straggler_seconds"] * doublings


def share_of_peak(device: Device, precision: str) -> float:
    """Return the fraction of a device's peak FLOP/s that large matrix products reach. It is computed from the fastest
    product measured on the device, else from products measured on its architecture, else it is a constant. If fp8 was
    not measured on the device, it is that of bf16, scaled by the ratio of both on devices of the family. precision:
    such as "bf16"."""
    products, shares, architecture = constants()["products"], device.shares, device.architecture
    measured = shares.get("bf16") or architecture_share(architecture)
    if precision == "fp8" and measured:
        measured = shares.get("fp8") or measured * compare_eight_bit_shares(architecture_family(architecture))
    return float(products["of_measured"] * measured if measured else products["of_peak"])


class Group(NamedTuple):
    """Size of a process group. ranks: number of its ranks; in_node: number of its ranks on each node that it spans."""

    ranks: int
    in_node: int

    @property
    def nodes(self) -> int:
        """Number of nodes that the group spans."""
        return max(1, -(-self.ranks // self.in_node))


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a collective as a function of its bytes: start + byte x size + root x sqrt(size).

    start: latency in seconds; byte: seconds per byte (inverse bandwidth); root: coefficient of the square-root term,
    which lowers the bandwidth of small messages.
    """

    start: Floats | float
    byte: Floats | float
    root: Floats | float

    def seconds_at(self, size: Sizes) -> Sizes:
        """Return the seconds of the collective on a vector of `size` bytes (a number or an array); 0 for size 0."""
        seconds: Sizes = (self.start + self.byte * size + self.root * size**0.5) * (size > 0)
        return seconds

    @classmethod
    def stack(cls, costs: Sequence[Cost], which: Any) -> Cost:
        """Return one cost function for many candidate layouts: its fields are arrays [candidates]. costs: one cost for
        each distinct process group; which: index into `costs` for each candidate, [candidates]."""
        return cls(*(np.array([getattr(each, name) for each in costs])[which] for name in ("start", "byte", "root")))


class Collectives:
    """Predictor of the seconds of collectives on a cluster, by operation and process group."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    @cached_method
    def cost(self, operation: Collective, group: Group) -> Cost | MeasuredCost:
        """Return the cost function of a collective in a process group: seconds from bytes. The bytes are the full
        vector's; of an all-to-all one rank's input, of a send the message. operation: such as "all-reduce"."""
        measured, found = self.cluster.measured, None
        if measured is not None and group.ranks > 1:
            found = measured_cost(measured, operation, group.ranks, group.nodes)
        return _published_cost(self.cluster, operation, group) if found is None else found

    def overlap_slowdown(self, group: Group) -> float:
        """Return the seconds that computation loses for each second of communication in a group that overlaps it. 0 for
        a group of one rank; 1 on CPUs, where the same cores compute and communicate."""
        if group.ranks == 1:
            return 0.0
        if self.cluster.kind == "cpu":
            return 1.0
        return float(constants()["overlap"]["tax"]["inside" if group.nodes == 1 else "across"])


def _published_cost(cluster: Cluster, operation: Collective, group: Group) -> Cost:
    """Return the cost function of a collective in a group, from published bandwidths.

    For an all-reduce of s bytes over n ranks a rank sends 2 s (n - 1) / n bytes, for other collectives s (n - 1) / n,
    which is the minimum. Across nodes, the ranks of a node send over all of its network links at once; a ring crosses
    each node boundary once.
    """
    ranks = group.ranks
    if ranks <= 1:
        return Cost(0.0, 0.0, 0.0)
    found = constants()["collectives"]
    start = float(found["start_seconds"])
    if operation == "send":
        link = cluster.inside if group.nodes == 1 else cluster.across
        bandwidth = pair_bandwidth(cluster) if group.nodes == 1 else link.bandwidth * found["efficiency"]["across"]
        return Cost(float(found["pair_seconds"] + link.latency), 1 / bandwidth, 0.0)
    share = (ranks - 1) / ranks * (2 if operation == "all-reduce" else 1)
    if operation == "all-to-all" and group.nodes > 1:
        return _ramped_cost(start, 1 - group.in_node / ranks, _across_bandwidth(cluster.across, 1), "pairs")
    if group.nodes == 1:
        return _ramped_cost(start, share, _inside_bandwidth(cluster, operation, ranks), "inside")
    rings = 2 if operation == "all-reduce" else 1
    hops = rings * (group.nodes * cluster.across.latency + (ranks - group.nodes) * cluster.inside.latency)
    if operation == "all-reduce":  # a tree over nodes instead, where that is shorter
        hops = min(
            hops, 2 * math.log2(group.nodes) * cluster.across.latency + 2 * group.in_node * cluster.inside.latency
        )
    bandwidth = _across_bandwidth(cluster.across, group.in_node)
    if group.in_node > 1:  # the ring also runs inside of nodes
        bandwidth = min(bandwidth, _inside_bandwidth(cluster, "all-gather", ranks))
    return _ramped_cost(start + hops, share, bandwidth, "across")


def _ramped_cost(start: float, share: float, bandwidth: float, where: str) -> Cost:
    """Return the cost function start + w / bandwidth + sqrt(w x ramp / bandwidth) seconds of a collective in which a
    rank sends w = share x size bytes of a vector of `size` bytes. start: latency in seconds; bandwidth: bytes a second;
    where: "inside" or "across" nodes, which selects the constant `ramp` of rates.toml."""
    ramp = constants()["collectives"]["ramp_seconds"][where]
    return Cost(start, share / bandwidth, math.sqrt(share * ramp / bandwidth))


def _inside_bandwidth(cluster: Cluster, operation: Collective, ranks: int) -> float:
    """Return the bandwidth in bytes a second that large messages of a collective reach among `ranks` ranks of one node.
    operation: such as "all-reduce"."""
    found, device, links = constants()["collectives"], cluster.device, cluster.device.links
    # Bandwidths measured on the catalogue's device are scaled by this cluster's, relative to the catalogue's.
    known = cluster.inside.bandwidth / links.scaleup.bandwidth if links and links.scaleup.bandwidth else 0.0
    if operation == "all-reduce" and device.all_reduce_switch and ranks >= found["switch_ranks"]:
        return device.all_reduce_switch * known
    if device.all_reduce_ring and known:
        return device.all_reduce_ring * known
    return float(cluster.inside.bandwidth * found["efficiency"]["inside"])


def _across_bandwidth(link: Link, in_node: int) -> float:
    """Return the bandwidth from one node to other nodes in bytes a second, if `in_node` ranks of the node send at once.
    link: link of one device between nodes."""
    return float(link.bandwidth * in_node * constants()["collectives"]["efficiency"]["across"])


def pair_bandwidth(cluster: Cluster) -> float:
    """Return the bandwidth from one device to one other device of the same node, in bytes a second."""
    links, share = cluster.device.links, constants()["collectives"]["efficiency"]["pair"]
    pair = links.pair if links is not None and links.pair else cluster.inside.bandwidth
    return float(share * min(pair, cluster.inside.bandwidth))
