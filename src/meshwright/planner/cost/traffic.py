"""What each rank puts on the wire in a training step, by call site: from the parameter table, the layout, the shapes of
a batch and the pipeline's program. `comm/record.py` counts the same while a run goes on; the two are equal.

Bytes of an operation over n ranks on a vector of b bytes, which are also the least that each rank can send: all-reduce
2 b (n - 1) / n, reduce-scatter and all-gather b (n - 1) / n.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from meshwright.layout import Layout
from meshwright.planner.cost.data_calls import AXES_OF, DataCalls, Work, by_axis, by_site
from meshwright.program.pipeline import COMPUTING, Kind
from meshwright.schedules.transfers import with_transfers
from meshwright.spec.chunks import loss_chunks
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.partition import Partition
from meshwright.spec.stage_times import program_for
from meshwright.spec.stages import LOOKED_UP, Stage

ROUTED = tuple(f"experts.{what}{way}" for what in ("dispatch", "gather", "sum", "combine") for way in ("", ".backward"))
"""Sites of expert parallelism that send what routers choose: predicted as if every expert got equally many tokens."""


PREFERENCE_FIGURES = 5
"""Numbers that ranks add up of the responses of a step, beside its loss."""


def predicted_traffic(config: ModelConfig, layout: Layout, work: Work, rank: int = 0) -> dict[str, int]:
    """Return the bytes that `rank` sends in one training step, by call site such as "data.gradients", without sites
    that send nothing. work: sizes of the step.

    Exact, except for the sites of `ROUTED`, which assume equal load of experts.
    """
    return by_site(_Step(config, layout, work, rank).calls())


def predicted_traffic_by_axis(config: ModelConfig, layout: Layout, work: Work, rank: int = 0) -> dict[str, int]:
    """Return the bytes that `rank` sends in one training step, by mesh axis such as "data". work: sizes of the step."""
    return by_axis(_Step(config, layout, work, rank).calls())


class _Step(DataCalls):
    """Counter of the bytes that one rank sends in a training step of a transformer. work: sizes of the step; rank:
    global."""

    def __init__(self, config: ModelConfig, layout: Layout, work: Work, rank: int) -> None:
        table = parameter_table(config)
        self.program = with_transfers(program_for(layout, config, work.sequence))
        super().__init__(table, Partition.of(self.program, config, table, work.sequence), layout, work, rank)
        self.config = config
        self.place = layout.coordinates(rank)
        self.stages = self.partition.stages

        self.rows = work.batch // (layout.dp * layout.micro_batches)
        self.tokens = self.rows * work.sequence // layout.cp  # of a micro-batch, on this rank of cp
        self.hidden_bytes = self.tokens * config.hidden * work.parameter_bytes

    def calls(self) -> Counter[tuple[str, str]]:
        """Count all calls of the step; return bytes sent by (call site, axis)."""
        self.reduce("data.targets", "data", 1, 8)
        passes = self.passes()
        for stage, count in passes.items():
            self.tensor(self.stages[stage], count)
            self.context(self.stages[stage], count)
            self.experts(self.stages[stage], count)
        self.pipeline()
        units: Counter[str] = Counter()
        for stage, count in passes.items():
            for unit in self.partition.needed(self.stages[stage]):
                units[unit] += count
        for unit, count in units.items():
            self.gradients(unit, count)
        self.gathers()
        self.partial_gradients(units)
        self.verdict(PREFERENCE_FIGURES if self.work.responses else 0)
        if self.work.estimates_kl:
            self.sent.update(_Step(self.config, replace(self.layout, recompute="none"), self.work, self.rank).forward())
        return self.sent

    def forward(self) -> Counter[tuple[str, str]]:
        """Count the calls of the step's forward passes without gradients, from which KTO estimates the KL divergence,
        and of its sum; return bytes sent by (call site, axis)."""
        for stage, count in self.passes().items():
            self.tensor(self.stages[stage], count)
            self.context(self.stages[stage], count)
            self.experts(self.stages[stage], count)
        self.pipeline()
        self.gathers(forward_only=True)
        self.all_reduce("loss.kl", "world", self.layout.world_size, 16)
        backward = ("gradients", "backward", "router")
        return Counter({call: sent for call, sent in self.sent.items() if not any(at in call[0] for at in backward)})

    def steps(self) -> Iterator[tuple[Kind, int, tuple[int, int]]]:
        """Yield (kind, stage, (replica, micro-batch)) of each of this rank's steps of the pipeline program."""
        steps = self.program.steps
        for at in steps.of_rank(self.place["pp"]):
            yield Kind(int(steps.kind[at])), int(steps.stage[at]), (int(steps.replica[at]), int(steps.micro_batch[at]))

    def passes(self) -> Counter[int]:
        """Return the number of micro-batches that this rank runs through each of its stages, by stage index."""
        return Counter(stage for kind, stage, _ in self.steps() if kind == Kind.FORWARD)

    # --- activations: tensor parallelism, the loss, the pipeline

    def tensor(self, stage: Stage, count: int) -> None:
        """Count the bytes sent by the tensor-parallel collectives in the forward and backward of `count` micro-batches
        through a stage."""
        if self.layout.tp == 1:
            return
        sequence_parallel = self.layout.tensor_sequence_parallel
        again = self.layout.recompute
        entries, exits = Counter[str](), Counter[str]()
        if stage.first:
            exits["embedding"] += 1
        for layer in stage.layers:
            entries["attention.input"] += 1
            exits["attention.output"] += 1
            if not self.spread(layer) or self.config.shared_intermediate:  # spread experts meet otherwise
                entries["mlp.input"] += 1
                exits["mlp.output"] += 1
        if stage.last:
            entries["head.input"] += 1
        for site, times in entries.items():
            # Forward each rank is given all tokens, if it has not got them; backward its gradients are summed.
            repeated = times if again != "none" and site != "head.input" else 0
            self.meet(site, count * (times + repeated) if sequence_parallel else 0)
            self.meet(f"{site}.backward", count * times)
        for site, times in exits.items():
            # A block that is computed again stops before its last sum, which nobody needs.
            repeated = times if again == "full" and site == "attention.output" else 0
            self.meet(site, count * (times + repeated))
            self.meet(f"{site}.backward", count * times if sequence_parallel else 0)
        if stage.last:
            widest = min(-(-self.config.vocabulary // self.layout.tp), self.config.vocabulary)
            for chunk in loss_chunks(self.tokens, widest, self.work.device):
                for site in ("loss.target_logit", "loss.maximum", "loss.sum"):
                    self.all_reduce(site, "tp", self.layout.tp, chunk * max(4, self.work.parameter_bytes), count)

    def meet(self, site: str, times: int) -> None:
        """Count the bytes sent by `times` tp collectives on a micro-batch's hidden states: reduce-scatters or
        all-gathers with sequence parallelism, else all-reduces. site: label of the call, such as "mlp.output"."""
        if self.layout.tensor_sequence_parallel:
            self.half(site, "tp", self.layout.tp, self.hidden_bytes, times)
        else:
            self.all_reduce(site, "tp", self.layout.tp, self.hidden_bytes, times)

    def context(self, stage: Stage, count: int) -> None:
        """Count the bytes sent by the context-parallel calls for `count` micro-batches through a stage."""
        config, layout, ranks = self.config, self.layout, self.layout.cp
        if ranks == 1:
            return
        heads, kv_heads = config.heads // layout.tp, max(1, config.kv_heads // layout.tp)
        one = self.tokens * config.head_dim * self.work.parameter_bytes  # a head's part of a micro-batch
        wide = self.tokens * config.head_dim * max(4, self.work.parameter_bytes)
        if stage.last:
            self.all_reduce("loss.responses", "cp", ranks, 8 * self.rows * self.work.responses, count)
        layers = count * len(stage.layers)
        if layout.cp_method == "ring":  # keys and values go round, on the way back with their gradients
            forward = layers * (2 if layout.recompute == "full" else 1)
            self.sent["attention.ring", "cp"] += forward * (ranks - 1) * 2 * kv_heads * one
            self.sent["attention.ring.backward", "cp"] += layers * (ranks - 1) * 2 * kv_heads * one
            self.sent["attention.ring.gradients", "cp"] += layers * ranks * 2 * kv_heads * wide
        else:
            forward = layers * (1 if layout.recompute == "none" else 2)
            traded = {"attention.heads": heads + 2 * kv_heads * max(1, ranks // kv_heads), "attention.tokens": heads}
            for site, number in traded.items():
                self.half(site, "cp", ranks, number * one, forward)
                self.half(f"{site}.backward", "cp", ranks, number * one, layers)

    def spread(self, layer: int) -> bool:
        """Return True if a layer's experts are expert-parallel."""
        return self.layout.expert_parallel and self.config.has_experts(layer)

    def experts(self, stage: Stage, count: int) -> None:
        """Count the bytes sent by the calls of mixtures of experts for `count` micro-batches through a stage: expert
        loads, dispatch and combine."""
        config, layout = self.config, self.layout
        if not config.experts:
            return
        mixtures = count * sum(config.has_experts(layer) for layer in stage.layers)
        again = 2 if layout.recompute == "full" else 1
        if config.router_loss:
            counted = mixtures and not self.work.responses  # these are counted by every rank
            self.all_reduce("router.targets", "cp", layout.cp, 8 * self.rows, count if counted else 0)
            load = 4 * self.rows * config.experts
            self.all_reduce("router.load.cp", "cp", layout.cp, load, mixtures * again)
            if layout.expert_parallel:
                self.all_reduce("router.load.tp", "tp", layout.tp, load, mixtures * again)
        if not layout.expert_parallel:
            return
        ep, etp = layout.ep, layout.etp
        repeated = mixtures * (1 if layout.recompute == "none" else 2)  # what is not kept
        self.sent["experts.counts", "ep"] += 8 * (ep - 1) * (config.experts // ep + 1) * repeated
        self.sent["experts.counts", "etp"] += 8 * (etp - 1) * (config.experts + 1) * repeated
        rows = self.tokens // layout.tp * config.experts_per_token
        bytes_of_rows = rows * config.hidden * self.work.parameter_bytes
        away, shared = bytes_of_rows * (ep - 1) // ep, bytes_of_rows * (etp - 1)
        for what, axis, size, times in (
            ("dispatch", "ep", away, mixtures * again),
            ("gather", "etp", shared, repeated),
            ("sum", "etp", shared, mixtures * again),
            ("combine", "ep", away, mixtures * again),
        ):
            self.sent[f"experts.{what}", axis] += size * times
            self.sent[f"experts.{what}.backward", axis] += size * mixtures
        if not layout.tensor_sequence_parallel:
            # Without a shared expert after it, a block that is computed again stops before its last gather.
            last = mixtures if not config.shared_intermediate else repeated
            self.half("experts.output", "tp", layout.tp, self.hidden_bytes, last)
            self.half("experts.input.backward", "tp", layout.tp, self.hidden_bytes, mixtures)

    def pipeline(self) -> None:
        """Count the bytes sent by the messages of activations and gradients to other pipeline stages."""
        size = self.hidden_bytes // (self.layout.tp if self.layout.tensor_sequence_parallel else 1)
        kinds = Counter(kind for kind, *_ in self.steps())
        self.sent["pipeline.activations", "pp"] += kinds[Kind.SEND_FORWARD] * size
        self.sent["pipeline.gradients", "pp"] += kinds[Kind.SEND_BACKWARD] * size

    # --- parameters

    def gathers(self, forward_only: bool = False) -> None:
        """Count the bytes sent by ZeRO-3's all-gathers of parameters. forward_only: those of a step's forward passes
        alone."""
        if self.layout.zero < 3:
            return
        gathered: Counter[str] = Counter()
        before = None
        for kind, stage, of in self.steps():
            units = self.partition.units(self.stages[stage])
            if kind == Kind.FORWARD:
                gathered.update(self.partition.needed(self.stages[stage]))
            elif kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT) and not forward_only:
                gathered.update(
                    {need for unit in units if unit not in LOOKED_UP for need in self.table.needed_by(unit)}
                )
                if before == (stage, of):  # it follows its forward at once, which keeps the last unit for it
                    gathered.subtract(self.table.needed_by(units[-1]))
            if kind in COMPUTING:
                before = (stage, of) if kind == Kind.FORWARD else None
        for unit, times in gathered.items():
            for part in self.table.unit_buffers(unit, self.layout):
                if self.zero(part):
                    numel = self.padded(unit, part)
                    self.shard("data.parameters", "all_gather", part, numel, self.work.parameter_bytes, times)

    def partial_gradients(self, units: Counter[str]) -> None:
        """Count the bytes sent by the all-reduces over tp of gradients that each rank has only partially, one for all
        FSDP units together. units: the rank's units, as keys."""
        layout, found = self.layout, Counter[int]()
        for entry in self.table.entries:
            if entry.unit not in units or "tp" not in entry.gradient_axes(layout):
                continue
            start, stop = self.table.entry_range(entry, layout)
            part = entry.buffer_kind(layout)
            if self.zero(part):
                shards, shard = self.on(AXES_OF[part][1])
                length = self.padded(entry.unit, part) // shards
                start, stop = max(start, shard * length), min(stop, (shard + 1) * length)
            found[entry.replicas(layout)] += max(0, stop - start)
        for copies, numel in found.items():
            site = "tensor.gradients" if copies == layout.tp else "tensor.gradients.shared_heads"
            self.all_reduce(site, "tp", copies, numel * self.work.master_bytes)
