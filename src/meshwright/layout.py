"""Layout notation: sizes of the parallel axes, what is sharded, and the process groups of ranks."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from meshwright.errors import UserError
from meshwright.limits import get_limit, shorten
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

# Field of each numbered part of the notation, in canonical order.
_FIELD_BY_PART = {
    "dp": "dp", "zero": "zero", "hs": "hybrid", "tp": "tp", "cp": "cp", "pp": "pp", "mb": "micro_batches", "ep": "ep",
}  # fmt: skip
_FIELD_BY_WORD = {"ac": "recompute", "offload": "offload"}
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
MAX_COUNT = get_limit("ranks")
"""Maximum ranks (of an axis and in total), micro-batches and chunks; published clusters have 200,000 devices."""
MIN_MICRO_BATCHES = {"dualpipe": 2, "dualpipe-v": 2, "pipedream-2bw": 1}
"""Minimum number of micro-batches for each pipeline rank, by schedule."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel layout of a job: sizes and options of the parallel axes. Impossible combinations raise `UserError`.

    dp: data-parallel replicas. zero: ZeRO stage over dp x cp (0: nothing is sharded; 1: optimizer state; 2: also
    gradients; 3: also parameters). hybrid: ranks in a ZeRO sharding group; groups are replicas (HSDP); None: one group.
    tp: tensor-parallel ranks, with Megatron's sequence parallelism if tensor_sequence_parallel. cp: context-parallel
    ranks, by cp_method "ring" or "ulysses". pp: pipeline ranks. schedule: pipeline schedule, a name or @FILE. chunks:
    model chunks on each pipeline rank. micro_batches: number per optimizer step in each pipeline, over both directions
    if the schedule is bidirectional. ep, etp: expert- and expert-tensor-parallel ranks; ep x etp divides a stage's tp x
    cp x dp ranks. recompute: activation checkpointing, "none", "selective" or "full". offload: "cpu", "nvme" or None.
    precision: such as "bf16"; None: chosen before the run.
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
        """Reset options without effect, so that equal layouts compare equal; raise `UserError` if impossible."""
        if self.tp == 1:
            object.__setattr__(self, "tensor_sequence_parallel", True)
        if self.cp == 1:
            object.__setattr__(self, "cp_method", "ring")
        if self.schedule in SCHEDULE_CHUNKS and self.chunks == 1:
            object.__setattr__(self, "chunks", SCHEDULE_CHUNKS[self.schedule][0])
        if self.pp == 1 and self.schedule == "gpipe":  # one stage: the same order of steps
            object.__setattr__(self, "schedule", "1f1b")
        reason = self._find_conflict()
        if reason:
            raise UserError(f"impossible layout: {reason}")

    def _find_conflict(self) -> str | None:
        """Return the reason why the combination of fields is impossible, as text; None if it is possible."""
        for part, field in _FIELD_BY_PART.items():
            if part not in ("zero", "hs") and getattr(self, field) < 1:
                return f"{part}{getattr(self, field)}: {part} must be at least 1"
            if part != "hs" and getattr(self, field) > MAX_COUNT:
                return f"{part}{getattr(self, field)}: {part} must be at most {MAX_COUNT:,}"
        if self.world_size > MAX_COUNT:
            return f"dp x tp x cp x pp = {self.world_size:,} ranks: at most {MAX_COUNT:,}"
        if self.zero not in ZERO_LEVELS:
            return f"zero{self.zero}: {_ZERO_TAKES}"
        if self.recompute not in RECOMPUTE:
            return unknown("recomputation", self.recompute, RECOMPUTE)
        if self.offload is not None and self.offload not in OFFLOADS:
            return unknown("offload target", self.offload, OFFLOADS)
        if self.precision is not None and self.precision not in PRECISIONS:
            return unknown("precision", self.precision, PRECISIONS)
        if self.cp_method not in CONTEXT_METHODS:
            return unknown("context method", self.cp_method, CONTEXT_METHODS)
        return self._find_hybrid_conflict() or self._find_expert_conflict() or self._find_pipeline_conflict()

    def _find_hybrid_conflict(self) -> str | None:
        """Return the reason why hybrid sharding (`hsN`) is impossible here, as text; None if it is possible."""
        if self.hybrid is None:
            return None
        part, data = f"hs{self.hybrid}", self.dp * self.cp
        if self.hybrid < 1:
            return f"{part}: hs must be at least 1"
        if self.zero == 0:
            return f"{part} with zero0: nothing is sharded inside groups of {self.hybrid}; add zero1, zero2 or zero3"
        if self.hybrid == 1:
            return "hs1: groups of one rank shard nothing; write zero0 instead"
        if data % self.hybrid:
            return f"{part}: groups of {self.hybrid} do not divide dp x cp = {data} ranks"
        return None

    def _find_expert_conflict(self) -> str | None:
        """Return the reason why expert parallelism (`epN:etpM`) is impossible here, as text; None if it is possible."""
        if self.etp < 1:
            return f"etp{self.etp}: etp must be at least 1"
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

    def _find_pipeline_conflict(self) -> str | None:
        """Return the reason why the pipeline schedule is impossible here, as text; None if it is possible."""
        name = self.schedule
        if self.chunks > MAX_COUNT:
            return f"pp{self.pp}:{name}:{self.chunks}: chunks must be at most {MAX_COUNT:,}"
        if self.chunks < 1:
            return f"pp{self.pp}:{name}:{self.chunks}: chunks must be at least 1"
        if name == "@":
            return f"pp{self.pp}:@: the name of the schedule's file is missing"
        if not name.startswith("@") and name not in SCHEDULES:
            return unknown("schedule", name, SCHEDULES)
        if self.pp == 1 and name != "1f1b":
            return f"pp1:{name}: a pipeline schedule needs at least two stages"
        if name.startswith("@"):
            problem = f"pp{self.pp}:{name}: the number of chunks is set by the schedule's file"
            return None if self.chunks == 1 else problem
        _, least, most = SCHEDULE_CHUNKS[name]
        if self.chunks < least or (most is not None and self.chunks > most):
            holds = f"exactly {least}" if least == most else f"at least {least}"
            return f"pp{self.pp}:{name}:{self.chunks}: {name} has {holds} chunk{'s' if least > 1 else ''} per rank"
        two_ways = name in BIDIRECTIONAL_SCHEDULES
        if name in ("dualpipe", "chimera") and self.pp % 2:
            near = f"use pp{self.pp - 1} or pp{self.pp + 1}"
            return f"pp{self.pp}:{name}: {name} pairs the stages from both ends; pp must be even: {near}"
        a_rank = MIN_MICRO_BATCHES.get(name, 0)
        if self.micro_batches < a_rank * self.pp:
            enough = f"{'an even mb of ' if two_ways else ''}at least mb{a_rank * self.pp} ({a_rank} x pp)"
            return f"pp{self.pp}:{name}: mb{self.micro_batches} cannot fill the pipeline; use {enough}"
        if two_ways and self.micro_batches % 2:
            half = f"half of the mb{self.micro_batches} micro-batches would run in each direction"
            below, above = self.micro_batches - 1, self.micro_batches + 1
            near = f"use mb{below} or mb{above}" if below else f"use mb{above}"
            return f"pp{self.pp}:{name}: {half}; mb must be even: {near}"
        return None

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse layout notation such as `dp4 zero1 tp2 pp4:zb-v mb8 bf16`: parts in any order, separated by spaces.
        Raises `UserError` that names the unknown, repeated or impossible part."""
        values: dict[str, object] = {}
        written: dict[str, str] = {}  # field -> part of the notation that set it
        if not (parts := text.split()):
            raise UserError('the layout is empty; a single device is written "dp1"')
        try:
            for part in parts:
                for field, value in _parse_part(part).items():
                    if field in values:
                        raise UserError(f"{part} after {written[field]}: this is set twice")
                    values[field], written[field] = value, part
            layout = cls(**values)  # type: ignore[arg-type]
            if values.get("chunks", layout.chunks) != layout.chunks:  # an explicit 1 with an interleaved schedule
                raise UserError(f"{written['chunks']}: {layout.schedule} has at least {layout.chunks} chunks per rank")
        except UserError as error:
            raise UserError(f'layout "{shorten(text, 40)}": {str(error).removeprefix("impossible layout: ")}') from None
        return layout

    def __str__(self) -> str:
        """Return the canonical notation, which `Layout.parse` reads back: parts in fixed order, defaults omitted."""
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
            parts.append(f"pp{self.pp}{self._format_schedule()}")
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

    def _format_schedule(self) -> str:
        """Format schedule and chunks as the text after `ppN`, such as `:zb-v` or `:interleaved:4`; "" for defaults."""
        if self.schedule in SCHEDULE_CHUNKS and self.chunks != SCHEDULE_CHUNKS[self.schedule][0]:
            return f":{self.schedule}:{self.chunks}"
        return "" if self.schedule == "1f1b" else f":{self.schedule}"

    @property
    def world_size(self) -> int:
        """Number of ranks: dp x tp x cp x pp."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def expert_parallel(self) -> bool:
        """True if experts have separate axes (ep, etp); False if they are sharded over tp like other weights."""
        return self.ep > 1 or self.etp > 1

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return {axis: coordinate of `rank`} for "tp", "cp", "dp" and "pp" (inner to outer), "etp" and "ep"."""
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        place, position = rank, {}
        for axis in AXES:
            place, position[axis] = divmod(place, getattr(self, axis))
        place, position["etp"] = divmod(rank % (self.tp * self.cp * self.dp), self.etp)
        position["ep"] = place % self.ep
        return position

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return all process groups of an axis: a partition of the ranks, each group in coordinate order.

        tp, cp, dp, pp: ranks that differ in this coordinate only. data: ranks that differ in dp and cp. world: all.
        shard: ranks over which ZeRO shards: a data group or, under hybrid sharding (hsN), blocks of N of its ranks.
        replica: ranks at equal positions in the shard groups of a data group.
        ep, etp, expert_data: axes of a grid expert_data x ep x etp (etp innermost), formed by a pipeline stage's ranks.
        expert_shard: ranks over which ZeRO shards experts: an expert_data group, or blocks of it under hsN.
        expert_replica: ranks at equal positions in the expert_shard groups of an expert_data group.
        """
        if axis in AXES:
            return self._group_ranks(axis)
        if axis == "data":
            return self._group_ranks("cp", "dp")
        if axis == "world":
            return [tuple(range(self.world_size))]
        if axis in ("shard", "replica"):
            blocks = [_split_blocks(group, self.hybrid or len(group)) for group in self.groups("data")]
            if axis == "shard":
                return [block for group in blocks for block in group]
            return [members for group in blocks for members in zip(*group, strict=True)]
        if axis in ("ep", "etp", "expert_data"):
            stages = [_split_blocks(stage, self.ep * self.etp) for stage in self._group_ranks("tp", "cp", "dp")]
            if axis == "expert_data":
                return [members for stage in stages for members in zip(*stage, strict=True)]
            rows = [_split_blocks(block, self.etp) for stage in stages for block in stage]
            if axis == "etp":
                return [row for block in rows for row in block]
            return [members for block in rows for members in zip(*block, strict=True)]
        if axis in ("expert_shard", "expert_replica"):
            # Number of copies of each expert on the ranks of a sharding group, with all their tp ranks.
            copies = self.hybrid and max(1, self.hybrid * self.tp // (self.ep * self.etp))
            blocks = [_split_blocks(group, copies or len(group)) for group in self.groups("expert_data")]
            if axis == "expert_shard":
                return [block for group in blocks for block in group]
            return [members for group in blocks for members in zip(*group, strict=True)]
        raise ValueError(unknown("group", axis, GROUPS))

    def group_size(self, axis: str) -> int:
        """Return the number of ranks in each group of an axis (see `groups`), without building the groups."""
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

    def _group_ranks(self, *axes: str) -> list[tuple[int, ...]]:
        """Return the groups, in rank order, of ranks whose coordinates are equal on all axes except `axes`."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coordinates = self.coordinates(rank)
            fixed = tuple(coordinates[axis] for axis in AXES if axis not in axes)
            groups.setdefault(fixed, []).append(rank)
        return [tuple(group) for group in groups.values()]

    def check_implemented(self) -> None:
        """Raise `UserError` if the layout, though valid, needs a feature that is not implemented."""
        schedule = f"pp{self.pp}:{self.schedule}"
        unbuilt = [
            (self.schedule in ASYNCHRONOUS_SCHEDULES, schedule, "asynchronous pipelines"),
            (self.offload is not None, f"offload:{self.offload}", "offloading"),
            (self.precision == "fp8", f"{self.precision}", "this precision"),
        ]
        for present, part, what in unbuilt:
            if present:
                axes = "" if what == "this precision" else "dp, zero, hs, tp, cp, pp, ep, mb, ac, "
                runs = f"{axes}fp32, tf32, bf16 and fp16"
                raise UserError(f'layout "{self}": {part}: this version cannot run {what} yet; it runs {runs}')

    def with_(self, **changes: object) -> Layout:
        """Return a copy of the layout with the fields in `changes` replaced; the copy is validated like any layout."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def _split_blocks(ranks: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """Split ranks into consecutive blocks of `size` ranks; the last block may be shorter."""
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]


def _parse_part(part: str) -> dict[str, object]:
    """Parse one part of the notation; return the `Layout` fields that it sets: {"pp": 4, "schedule": "zb-v"} for
    `pp4:zb-v`."""
    if part in PRECISIONS:
        return {"precision": part}
    match = re.fullmatch(r"([A-Za-z]+)([^:]*)(?::(.*))?", part)
    name, number, options = match.groups() if match else (part, "", None)
    if name in _FIELD_BY_WORD:
        known = RECOMPUTE if name == "ac" else OFFLOADS
        if number or not options:
            raise UserError(f"{part}: {name} is written {' or '.join(f'{name}:{word}' for word in known)}")
        return {_FIELD_BY_WORD[name]: options}
    if name not in _FIELD_BY_PART:
        raise UserError(_describe_unknown_part(part, name, number))
    if not re.fullmatch(r"[0-9]+", number):
        spaces = "; parts are separated by spaces" if re.search(r"[,;/|+]", number) else ""
        raise UserError(f"{part}: {name} takes a whole number, as in {_EXAMPLES[name]}{spaces}")
    return {_FIELD_BY_PART[name]: _parse_count(part, name, number), **_parse_options(part, name, options)}


def _parse_count(part: str, name: str, digits: str) -> int:
    """Parse `digits`, the number in a part of the layout notation ("4" in `dp4`). part: the whole part; name: its
    letters ("dp"), both for the error. Raises `UserError` above `MAX_COUNT`."""
    digits = digits.lstrip("0") or "0"
    if len(digits) > len(str(MAX_COUNT)) or int(digits) > MAX_COUNT:
        if name == "zero":
            raise UserError(f"{shorten(part, 40)}: {_ZERO_TAKES}")
        raise UserError(f"{shorten(part, 40)}: {name} must be at most {MAX_COUNT:,}")
    return int(digits)


def _parse_options(part: str, name: str, options: str | None) -> dict[str, object]:
    """Parse `options`, the text after the colon of a layout part (`ulysses` in `cp2:ulysses`); return the `Layout`
    fields that it sets, {} for None. part: the whole part, for the error. name: letters of the part ("cp")."""
    if options is None:
        return {}
    if name == "tp" and options == "nosp":
        return {"tensor_sequence_parallel": False}
    if name == "cp" and options:
        return {"cp_method": options}
    if name == "ep" and (match := re.fullmatch(r"etp([0-9]+)", options)):
        return {"etp": _parse_count(part, "etp", match[1])}
    if name == "pp" and options.startswith("@"):
        return {"schedule": options}
    if name == "pp" and (match := re.fullmatch(r"([^:]+)(?::([0-9]+))?", options)):
        return {"schedule": match[1], **({"chunks": _parse_count(part, "chunks", match[2])} if match[2] else {})}
    raise UserError(f"{part}: {name} is written {_EXAMPLES[name]}")


def _describe_unknown_part(part: str, name: str, number: str) -> str:
    """Return the error text for the unknown layout part `part`. name, number: letters and digits of the part."""
    parts = {word: f"{word}{number}" for word in _FIELD_BY_PART} | {word: f"{word}:" for word in _FIELD_BY_WORD}
    fsdp = f"dp{number} zero3" if number else "zero3"
    aliases = dict.fromkeys(parts, part.lower().replace("=", "")) | {"fsdp": fsdp, "ddp": f"dp{number}"}
    close = aliases.get(name.lower()) or nearest(part, PRECISIONS) or nearest(part, parts.values())
    close = close or parts.get(nearest(name, parts) or "")
    known = ", ".join([*(f"{word}N" for word in _FIELD_BY_PART), "ac:", *PRECISIONS[:-1]]) + "; fp8 in plans alone"
    suggestion = f'; did you mean "{close}"?' if close else ""
    return f'unknown part "{part}"{suggestion} (known: {known})'
