"""The layout notation: how many ranks each axis has, what is sharded, and which ranks form each group."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from meshwright.errors import UserError
from meshwright.limits import limit_of, shorten
from meshwright.names import (
    ASYNCHRONOUS_SCHEDULES,
    BIDIRECTIONAL_SCHEDULES,
    CONTEXT_METHODS,
    OFFLOADS,
    PRECISIONS,
    RECOMPUTE,
    SCHEDULE_CHUNKS,
    SCHEDULES,
    ZERO_LEVELS,
    nearest,
    unknown,
)

AXES = ("tp", "cp", "dp", "pp")  # inner to outer: neighbours on the first axis are neighbouring ranks
EXPERT_GROUPS = ("ep", "etp", "expert_data", "expert_shard", "expert_replica")
GROUPS = (*AXES, "data", "shard", "replica", *EXPERT_GROUPS, "world")

# What each numbered part of the notation sets, in the order of the canonical print.
_COUNTS = {
    "dp": "dp",
    "zero": "zero",
    "hs": "hybrid",
    "tp": "tp",
    "cp": "cp",
    "pp": "pp",
    "mb": "micro_batches",
    "ep": "ep",
}
_WORDS = {"ac": "recompute", "offload": "offload"}
_EXAMPLES = {
    "dp": "dp2",
    "zero": "zero1",
    "hs": "hs2",
    "tp": "tp2, tp2:nosp",
    "cp": "cp2, cp2:ulysses",
    "pp": "pp4, pp4:zb-v, pp4:interleaved:2, pp4:@FILE",
    "mb": "mb8",
    "ep": "ep8, ep8:etp2",
}

_ZERO_TAKES = f"zero takes {', '.join(map(str, ZERO_LEVELS[:-1]))} or {ZERO_LEVELS[-1]}"
LARGEST_COUNT = limit_of("ranks")
"""The most ranks of an axis and of all axes, micro-batches and chunks; published clusters have 200,000 devices."""
LEAST_MICRO_BATCHES = {"dualpipe": 2, "dualpipe-v": 2, "pipedream-2bw": 1}
"""For each rank of the pipeline, where a schedule needs some."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a job is spread over its ranks. Every combination that cannot exist is refused with the reason.

    dp: replicas; zero: what is sharded over dp x cp (0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters);
    hybrid: ZeRO shards inside groups of this many ranks and replicates across them; tp: tensor; cp: context;
    pp: pipeline stages; micro_batches: per step and pipeline; ep, etp: expert and expert-tensor ranks, taken from
    tp x cp x dp.
    `precision` None means: to be resolved before the run.
    """

    dp: int = 1
    zero: int = 0
    hybrid: int | None = None
    tp: int = 1
    tensor_sequence_parallel: bool = True
    cp: int = 1
    cp_method: str = "ring"
    pp: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    micro_batches: int = 1
    ep: int = 1
    etp: int = 1
    recompute: str = "none"
    offload: str | None = None
    precision: str | None = None

    def __post_init__(self) -> None:
        # What an axis of one rank cannot express goes back to its default: equal layouts print and compare equal.
        if self.tp == 1:
            object.__setattr__(self, "tensor_sequence_parallel", True)
        if self.cp == 1:
            object.__setattr__(self, "cp_method", "ring")
        if self.schedule in SCHEDULE_CHUNKS and self.chunks == 1:
            object.__setattr__(self, "chunks", SCHEDULE_CHUNKS[self.schedule][0])
        if self.pp == 1 and self.schedule == "gpipe":  # one stage: the same order of steps
            object.__setattr__(self, "schedule", "1f1b")
        reason = self._impossible()
        if reason:
            raise UserError(f"impossible layout: {reason}")

    def _impossible(self) -> str | None:
        """Why no job can have this layout, or None."""
        for part, field in _COUNTS.items():
            if part not in ("zero", "hs") and getattr(self, field) < 1:
                return f"{part}{getattr(self, field)}: {part} counts from 1"
            if part != "hs" and getattr(self, field) > LARGEST_COUNT:
                return f"{part}{getattr(self, field)}: {part} counts to {LARGEST_COUNT:,} at most"
        if self.world_size > LARGEST_COUNT:
            return f"dp x tp x cp x pp = {self.world_size:,} ranks: at most {LARGEST_COUNT:,}"
        if self.zero not in ZERO_LEVELS:
            return f"zero{self.zero}: {_ZERO_TAKES}"
        if self.recompute not in RECOMPUTE:
            return unknown("recomputation", self.recompute, RECOMPUTE)
        if self.offload is not None and self.offload not in OFFLOADS:
            return unknown("place to offload to", self.offload, OFFLOADS)
        if self.precision is not None and self.precision not in PRECISIONS:
            return unknown("precision", self.precision, PRECISIONS)
        if self.cp_method not in CONTEXT_METHODS:
            return unknown("context method", self.cp_method, CONTEXT_METHODS)
        return self._impossible_hybrid() or self._impossible_expert() or self._impossible_pipeline()

    def _impossible_hybrid(self) -> str | None:
        if self.hybrid is None:
            return None
        part, data = f"hs{self.hybrid}", self.dp * self.cp
        if self.hybrid < 1:
            return f"{part}: hs counts from 1"
        if self.zero == 0:
            return f"{part} with zero0: nothing is sharded inside groups of {self.hybrid}; add zero1, zero2 or zero3"
        if self.hybrid == 1:
            return "hs1: groups of one rank shard nothing; write zero0 instead"
        if data % self.hybrid:
            return f"{part}: groups of {self.hybrid} do not divide dp x cp = {data} ranks"
        return None

    def _impossible_expert(self) -> str | None:
        if self.etp < 1:
            return f"etp{self.etp}: etp counts from 1"
        stage, experts = self.tp * self.cp * self.dp, self.ep * self.etp
        if stage % experts:
            return f"ep{self.ep}:etp{self.etp}: ep x etp = {experts} does not divide tp x cp x dp = {stage}"
        if self.hybrid is not None and self.expert_parallel:
            sharing = self.hybrid * self.tp
            if sharing % experts and experts % sharing:
                return (
                    f"hs{self.hybrid}: the {sharing} ranks of a sharding group (hs x tp) and the {experts} that hold "
                    "all experts once (ep x etp) do not divide each other: experts would be sharded across groups"
                )
        return None

    def _impossible_pipeline(self) -> str | None:
        name = self.schedule
        if self.chunks > LARGEST_COUNT:
            return f"pp{self.pp}:{name}:{self.chunks}: chunks count to {LARGEST_COUNT:,} at most"
        if self.chunks < 1:
            return f"pp{self.pp}:{name}:{self.chunks}: chunks count from 1"
        if name == "@":
            return f"pp{self.pp}:@: the name of the schedule's file is missing"
        if not name.startswith("@") and name not in SCHEDULES:
            return unknown("schedule", name, SCHEDULES)
        if self.pp == 1 and name != "1f1b":
            return f"pp1:{name}: a pipeline schedule needs at least two stages"
        if name.startswith("@"):
            return (
                None
                if self.chunks == 1
                else f"pp{self.pp}:{name}: a schedule's file says itself how many chunks there are"
            )
        _, least, most = SCHEDULE_CHUNKS[name]
        if self.chunks < least or (most is not None and self.chunks > most):
            holds = f"exactly {least}" if least == most else f"at least {least}"
            return f"pp{self.pp}:{name}:{self.chunks}: {name} has {holds} chunk{'s' if least > 1 else ''} a rank"
        two_ways = name in BIDIRECTIONAL_SCHEDULES
        if name in ("dualpipe", "chimera") and self.pp % 2:
            near = f"pp{self.pp - 1} or pp{self.pp + 1} would do" if self.pp > 1 else "pp2 would do"
            return f"pp{self.pp}:{name}: {name} pairs the stages from both ends; pp must be even: {near}"
        a_rank = LEAST_MICRO_BATCHES.get(name, 0)
        if self.micro_batches < a_rank * self.pp:
            enough = f"{'an even mb' if two_ways else 'mb'} from mb{a_rank * self.pp} ({a_rank} x pp) on"
            return f"pp{self.pp}:{name}: mb{self.micro_batches} is too few micro-batches to fill it; take {enough}"
        if two_ways and self.micro_batches % 2:
            half = f"half of the mb{self.micro_batches} micro-batches would run in each direction"
            below, above = self.micro_batches - 1, self.micro_batches + 1
            near = f"mb{below} or mb{above} would do" if below else f"mb{above} would do"
            return f"pp{self.pp}:{name}: {half}; mb must be even: {near}"
        return None

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read `dp4 zero1 tp2 pp4:zb-v mb8 bf16`. `UserError` names the part that is unknown or impossible."""
        values: dict[str, object] = {}
        written: dict[str, str] = {}  # which part said it, by field
        parts = text.split()
        if not parts:
            raise UserError('the layout is empty; a single device is written "dp1"')
        try:
            for part in parts:
                for field, value in _read_part(part).items():
                    if field in values:
                        raise UserError(f"{part} after {written[field]}: this is said twice")
                    values[field], written[field] = value, part
            layout = cls(**values)  # type: ignore[arg-type]
            if values.get("chunks", layout.chunks) != layout.chunks:  # an explicit 1, which the schedule cannot mean
                raise UserError(f"{written['chunks']}: {layout.schedule} has at least {layout.chunks} chunks a rank")
        except UserError as error:
            raise UserError(f'layout "{shorten(text, 40)}": {str(error).removeprefix("impossible layout: ")}') from None
        return layout

    def __str__(self) -> str:
        """The canonical print: parts in the order of the notation, defaults dropped. `Layout.parse` reads it back."""
        parts = [f"dp{self.dp}"] if self.dp > 1 else []
        if self.zero:
            parts.append(f"zero{self.zero}")
        if self.hybrid is not None:
            parts.append(f"hs{self.hybrid}")
        if self.tp > 1:
            parts.append(f"tp{self.tp}" + ("" if self.tensor_sequence_parallel else ":nosp"))
        if self.cp > 1:
            parts.append(f"cp{self.cp}" + ("" if self.cp_method == "ring" else f":{self.cp_method}"))
        if self.pp > 1:
            parts.append(f"pp{self.pp}{self._schedule_suffix()}")
        if self.micro_batches > 1:
            parts.append(f"mb{self.micro_batches}")
        if self.ep > 1 or self.etp > 1:
            parts.append(f"ep{self.ep}" + ("" if self.etp == 1 else f":etp{self.etp}"))
        if self.recompute != "none":
            parts.append(f"ac:{self.recompute}")
        if self.offload is not None:
            parts.append(f"offload:{self.offload}")
        if self.precision is not None:
            parts.append(self.precision)
        return " ".join(parts) or "dp1"

    def _schedule_suffix(self) -> str:
        if self.schedule in SCHEDULE_CHUNKS and self.chunks != SCHEDULE_CHUNKS[self.schedule][0]:
            return f":{self.schedule}:{self.chunks}"
        return "" if self.schedule == "1f1b" else f":{self.schedule}"

    @property
    def world_size(self) -> int:
        """Number of ranks: dp x tp x cp x pp."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def expert_parallel(self) -> bool:
        """Whether experts are spread over axes of their own; if not, they are split over tp as all else is."""
        return self.ep > 1 or self.etp > 1

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis, inner to outer: tp, cp, dp, pp; and, once more, on etp and ep."""
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        place, position = rank, {}
        for axis in AXES:
            place, position[axis] = divmod(place, getattr(self, axis))
        place, position["etp"] = divmod(rank % (self.tp * self.cp * self.dp), self.etp)
        position["ep"] = place % self.ep
        return position

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """All groups of an axis: a partition of the ranks, each group in the order of its members' positions.

        tp cp dp pp: ranks that differ in that coordinate alone; data: dp x cp; shard: what ZeRO shards over (data, or
        groups of N consecutive members with hsN); replica: equal positions across the sharding groups; ep, etp,
        expert_data: the ranks of a stage once more, as blocks of ep x etp with etp innermost; expert_shard,
        expert_replica: expert_data once more, as the parts that lie inside a sharding group (with all its ranks of tp)
        and equal positions across those; world: everyone.
        """
        if axis in AXES:
            return self._together(axis)
        if axis == "data":
            return self._together("cp", "dp")
        if axis == "world":
            return [tuple(range(self.world_size))]
        if axis in ("shard", "replica"):
            blocks = [_cut(group, self.hybrid or len(group)) for group in self.groups("data")]
            if axis == "shard":
                return [block for group in blocks for block in group]
            return [members for group in blocks for members in zip(*group, strict=True)]
        if axis in ("ep", "etp", "expert_data"):
            stages = [_cut(stage, self.ep * self.etp) for stage in self._together("tp", "cp", "dp")]
            if axis == "expert_data":
                return [members for stage in stages for members in zip(*stage, strict=True)]
            rows = [_cut(block, self.etp) for stage in stages for block in stage]
            if axis == "etp":
                return [row for block in rows for row in block]
            return [members for block in rows for members in zip(*block, strict=True)]
        if axis in ("expert_shard", "expert_replica"):
            # How often the ranks of a sharding group, with all of theirs on tp, hold each expert.
            copies = self.hybrid and max(1, self.hybrid * self.tp // (self.ep * self.etp))
            blocks = [_cut(group, copies or len(group)) for group in self.groups("expert_data")]
            if axis == "expert_shard":
                return [block for group in blocks for block in group]
            return [members for group in blocks for members in zip(*group, strict=True)]
        raise ValueError(unknown("group", axis, GROUPS))

    def group_size(self, axis: str) -> int:
        """Ranks in a group of an axis (as `groups` names them), without making the groups."""
        if axis in (*AXES, "ep", "etp"):
            return int(getattr(self, axis))
        if axis == "world":
            return self.world_size
        if axis in ("data", "shard", "replica"):
            data = self.cp * self.dp
            shard = self.hybrid or data
            return {"data": data, "shard": shard, "replica": data // shard}[axis]
        experts = self.ep * self.etp
        data = self.tp * self.cp * self.dp // experts
        shard = max(1, self.hybrid * self.tp // experts) if self.hybrid else data
        return {"expert_data": data, "expert_shard": shard, "expert_replica": data // shard}[axis]

    def _together(self, *axes: str) -> list[tuple[int, ...]]:
        """Groups of the ranks that agree on every coordinate except `axes`."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            fixed = tuple(
                position for axis, position in self.coordinates(rank).items() if axis in AXES and axis not in axes
            )
            groups.setdefault(fixed, []).append(rank)
        return [tuple(group) for group in groups.values()]

    def refuse_unbuilt(self) -> None:
        """`UserError` for a part that is a valid layout but that this version of Meshwright cannot run yet."""
        schedule = f"pp{self.pp}:{self.schedule}"
        unbuilt = [
            (self.schedule in ASYNCHRONOUS_SCHEDULES, schedule, "asynchronous pipelines"),
            (self.offload is not None, f"offload:{self.offload}", "offloading"),
            (self.precision == "fp8", f"{self.precision}", "this precision"),
        ]
        for present, part, what in unbuilt:
            if present:
                runs = (
                    "fp32, tf32, bf16 and fp16"
                    if what == "this precision"
                    else "dp, zero, hs, tp, cp, pp, ep, mb, ac, fp32, tf32, bf16 and fp16"
                )
                raise UserError(f'layout "{self}": {part}: this version cannot run {what} yet; it runs {runs}')

    def with_(self, **changes: object) -> Layout:
        """A copy with some fields replaced, checked like any other layout."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def _cut(ranks: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]


def _read_part(part: str) -> dict[str, object]:
    """The fields that one part of the notation sets."""
    if part in PRECISIONS:
        return {"precision": part}
    match = re.fullmatch(r"([A-Za-z]+)([^:]*)(?::(.*))?", part)
    name, number, options = match.groups() if match else (part, "", None)
    if name in _WORDS:
        known = RECOMPUTE if name == "ac" else OFFLOADS
        if number or not options:
            raise UserError(f"{part}: {name} is written {' or '.join(f'{name}:{word}' for word in known)}")
        return {_WORDS[name]: options}
    if name not in _COUNTS:
        raise UserError(_unknown_part(part, name, number))
    if not re.fullmatch(r"[0-9]+", number):
        raise UserError(f"{part}: {name} takes a whole number, as in {_EXAMPLES[name]}")
    return {_COUNTS[name]: _count(part, name, number), **_read_options(part, name, options)}


def _count(part: str, name: str, digits: str) -> int:
    """The number that digits say. `UserError` above `LARGEST_COUNT`; how long they are does not matter."""
    digits = digits.lstrip("0") or "0"
    if len(digits) > len(str(LARGEST_COUNT)) or int(digits) > LARGEST_COUNT:
        if name == "zero":
            raise UserError(f"{shorten(part, 40)}: {_ZERO_TAKES}")
        raise UserError(f"{shorten(part, 40)}: {name} counts to {LARGEST_COUNT:,} at most")
    return int(digits)


def _read_options(part: str, name: str, options: str | None) -> dict[str, object]:
    """What follows the colon of tp, cp, ep and pp."""
    if options is None:
        return {}
    if name == "tp" and options == "nosp":
        return {"tensor_sequence_parallel": False}
    if name == "cp" and options:
        return {"cp_method": options}
    if name == "ep" and (match := re.fullmatch(r"etp([0-9]+)", options)):
        return {"etp": _count(part, "etp", match[1])}
    if name == "pp" and options.startswith("@"):
        return {"schedule": options}
    if name == "pp" and (match := re.fullmatch(r"([^:]+)(?::([0-9]+))?", options)):
        return {"schedule": match[1], **({"chunks": _count(part, "chunks", match[2])} if match[2] else {})}
    raise UserError(f"{part}: {name} is written {_EXAMPLES[name]}")


def _unknown_part(part: str, name: str, number: str) -> str:
    close = nearest(part, PRECISIONS) or nearest(part, [*(f"{word}{number}" for word in _COUNTS), *_WORDS])
    if close in _WORDS:
        close = f"{close}:"
    if close is None and (word := nearest(name, [*_COUNTS, *_WORDS])):
        close = f"{word}{number}"
    suggestion = f'; did you mean "{close}"?' if close else ""
    known = ", ".join([*(f"{word}N" for word in _COUNTS), *(f"{word}:" for word in _WORDS), *PRECISIONS])
    return f'unknown part "{part}"{suggestion} (known: {known})'
