"""Run a collective program on local processes, check that its result equals torch.distributed's, and time both."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from meshwright.collectives.cutting import OWNED
from meshwright.comm.backend import group_backends
from meshwright.comm.local import LocalRanks
from meshwright.comm.programs import Executable
from meshwright.errors import CheckFailed, UserError
from meshwright.flight_recorder.call_ring import get_process_writer
from meshwright.names import unknown
from meshwright.program.check_collective import CheckedCollective

MOST_RANKS = 16  # processes on one machine
DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64")
COPIES = 6  # of the vector that a rank may hold: ours, theirs, results, buffers


def measure(
    checked: CheckedCollective,
    total_bytes: float,
    *,
    repeats: int = 20,
    dtype: str = "float32",
    timeout_seconds: float = 60.0,
    world: LocalRanks | None = None,
) -> dict[str, Any]:
    """Run a collective program on gloo processes of this machine, alternating with torch.distributed's own call.

    total_bytes: size of the operation's vector, rounded up to elements (and to equal shares where ranks own shares).
        repeats: number of timed runs. dtype: of the vector. world: local ranks to run on, as many as the program has;
        None: new ones, with one thread each.

    Returns a dict: exact (True: results were equal integers), measured_seconds and native_seconds (median over the runs
        of the slowest rank's time, of the program and of torch.distributed), ratio (median of native / measured; above
        1 the program is faster), total_bytes, bytes_sent (by rank, padding included), backend, native (name of the
        call), repeats.

    Raises UserError for what this machine cannot hold, CheckFailed where results differ, and RankLost when a rank ends
    or does not answer within `timeout_seconds`; its message says which rank waits for which, and in which step.
    """
    program = checked.program
    if dtype not in DTYPES:
        raise UserError(unknown("dtype", dtype, DTYPES))
    if repeats < 1:
        raise UserError(f"{repeats} repeats; there must be at least 1")
    if program.ranks > MOST_RANKS:
        raise UserError(
            f"{program.ranks} ranks: this machine runs a program on at most {MOST_RANKS} processes; take fewer ranks, "
            "or leave out the run"
        )
    numel = count_elements(checked, total_bytes, getattr(torch, dtype).itemsize)
    needed = program.ranks * numel * max(4, getattr(torch, dtype).itemsize) * COPIES
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise UserError(
            f"{program.ranks} ranks with {total_bytes:,.0f} bytes each need about {needed / 2**30:.1f} GiB, and this "
            f"machine has {memory / 2**30:.1f} GiB; take fewer bytes"
        )
    ranks = LocalRanks(program.ranks, timeout=timeout_seconds) if world is None else world
    try:
        # Every wait has its own time-out; all of them together may take longer.
        answers = ranks.run(measure_rank, checked, numel, repeats, dtype, timeout_seconds, timeout=repeats * 600.0)
    finally:
        if world is None:
            ranks.close()
    return combine_answers(checked, numel * getattr(torch, dtype).itemsize, answers)


def count_elements(checked: CheckedCollective, total_bytes: float, itemsize: int) -> int:
    """Return the number of elements of a vector of `total_bytes`, rounded up to equal shares where ranks own shares.

    itemsize: bytes of an element. Raises UserError for a negative size.
    """
    if total_bytes < 0:
        raise UserError(f"{total_bytes:g} bytes; there must be at least 0")
    numel = max(1, -int(-total_bytes // itemsize))
    ranks = checked.program.ranks
    return -(-numel // ranks) * ranks if checked.program.operation in OWNED else numel


def combine_answers(checked: CheckedCollective, total_bytes: int, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the results of `measure_rank` of all ranks, `answers`, to the dict that `measure` returns.

    total_bytes: size of the vector. Raises CheckFailed if a rank's result differs from torch.distributed's.
    """
    wrong = [rank for rank, answer in enumerate(answers) if not answer["exact"]]
    if wrong:
        named = f"{checked.program.operation} {checked.program.algorithm}"
        raise CheckFailed(
            f"{named}: rank {wrong[0]} has another result than torch.distributed's {answers[0]['native']}"
        )
    ours, native = ([max(runs) for runs in zip(*(a[key] for a in answers), strict=True)] for key in ("ours", "theirs"))
    return {
        "exact": True,
        "measured_seconds": statistics.median(ours),
        "native_seconds": statistics.median(native),
        "ratio": statistics.median(theirs / mine for mine, theirs in zip(ours, native, strict=True)),
        "total_bytes": total_bytes,
        "bytes_sent": [answer["bytes_sent"] for answer in answers],
        "backend": answers[0]["backend"],
        "native": answers[0]["native"],
        "repeats": len(ours),
    }


def measure_rank(
    checked: CheckedCollective,
    numel: int,
    repeats: int,
    dtype: str,
    timeout_seconds: float,
    device: str = "cpu",
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Run and time a collective program on this rank, alternating with torch.distributed's own call.

    numel: elements of the vector. repeats: number of timed runs. dtype: such as "float32". timeout_seconds: limit of
        one wait. device: of the vector. group: process group of the program's ranks (None: the world).
    Returns a dict: exact (True if both gave the same integers), ours and theirs (seconds of each run of the program and
        of torch.distributed), bytes_sent, backend, native (name of the torch.distributed call).
    """
    executable = Executable(checked, group, timeout_seconds, device=device)
    name, native = NATIVE[checked.program.operation]
    exact = _matches_native(executable, native, numel, device)
    vector = torch.ones(numel, dtype=getattr(torch, dtype), device=device)
    output = torch.empty_like(vector) if checked.program.has_output else None
    calls: dict[str, Callable[[], Any]] = {
        "ours": lambda: _run_program(executable, None if checked.program.operation == "barrier" else vector, output),
        "theirs": lambda: _run_native(executable, native, vector),
    }
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for turn in range(repeats + 2):
        for which, call in calls.items():
            vector.fill_(1)
            dist.barrier(group)
            begun = time.perf_counter()
            call()
            if vector.is_cuda:
                torch.cuda.synchronize()
            if turn >= 2:  # the first ones make connections and buffers
                seconds[which].append(time.perf_counter() - begun)
    return {
        "exact": exact,
        **seconds,
        "bytes_sent": executable.sent_bytes(numel, vector.element_size()),
        "backend": group_backends(group)[torch.device(device).type],
        "native": name,
    }


def _run_program(executable: Executable, vector: torch.Tensor | None, output: torch.Tensor | None) -> None:
    """Run the collective program once on `vector` (None: barrier), recorded as one call in the flight recorder. output:
    receives the result of an operation that does not work in place (all-to-all), else None."""
    calls = get_process_writer()
    size, form = (0, ("", ())) if vector is None else (vector.nbytes, (vector.dtype, vector.shape))
    number = calls.post(calls.group(executable.ranks), executable.name, "program", "world", size, *form)
    calls.wait(number)
    executable.run(vector, output)
    calls.done(number)


def _matches_native(executable: Executable, native: Callable[..., Any], numel: int, device: str) -> bool:
    """Return True if the program and torch.distributed's call `native` give equal results on integers.

    numel: elements of the vector. device: its device.
    """
    program = executable.program
    if program.operation == "barrier":
        _run_program(executable, None, None)
        return True
    dtype = torch.float64 if program.reduction == "mean" else torch.int32
    start = (torch.arange(numel, device=device) * 7 + 13 * executable.rank).remainder_(31).sub_(15).to(dtype)
    mine, theirs = start.clone(), start.clone()
    output = torch.empty_like(mine) if program.has_output else None
    _run_program(executable, mine, output)
    result = _run_native(executable, native, theirs)
    place = find_defined_slice(executable, numel)
    return torch.equal((mine if output is None else output)[place], result[place])


def _run_native(executable: Executable, native: Callable[..., Any], vector: torch.Tensor) -> torch.Tensor:
    """Run torch.distributed's call `native` on `vector`, or on a copy in host memory where gloo needs that; return the
    result on the vector's device."""
    there = vector if vector.is_cpu or executable.batched else vector.cpu()
    result = native(executable, there)
    return (there if result is None else result).to(vector.device)


def find_defined_slice(executable: Executable, numel: int) -> slice:
    """Return the part of a vector of `numel` elements that the operation defines on this rank, such as this rank's
    share after a reduce-scatter; the other elements are undefined."""
    program, rank = executable.program, executable.rank
    if program.operation in ("reduce-scatter", "scatter"):
        share = numel // program.ranks
        return slice(rank * share, (rank + 1) * share)
    if program.operation in ("reduce", "gather") and rank != program.root:
        return slice(0)
    if program.operation == "send-receive" and rank != _find_receiver(executable):
        return slice(0)
    return slice(0, numel)


# --- torch.distributed's own calls on a whole vector: in place, or they return the result


def _find_receiver(executable: Executable) -> int:
    """Return the destination rank of a send-receive program: the last rank, or rank 0 if the last one is the root."""
    last = executable.program.ranks - 1
    return last if executable.program.root != last else 0


def _get_reduce_op(executable: Executable) -> Any:
    """Return the `torch.distributed.ReduceOp` of the program's reduction."""
    operations = {"minimum": dist.ReduceOp.MIN, "maximum": dist.ReduceOp.MAX}
    return operations.get(executable.program.reduction, dist.ReduceOp.SUM)


def _divide_if_mean(executable: Executable, result: torch.Tensor) -> torch.Tensor:
    """Divide `result`, a sum over ranks, by their number in place if the program's reduction is `mean`; return it."""
    return result.div_(executable.program.ranks) if executable.program.reduction == "mean" else result


def _view_rank_share(executable: Executable, vector: torch.Tensor) -> torch.Tensor:
    """Return the view of this rank's share of the vector, the rank-th of as many equal parts as there are ranks."""
    return vector.view(executable.program.ranks, -1)[executable.rank]


def _all_reduce(e: Executable, vector: torch.Tensor) -> torch.Tensor:
    """Run torch.distributed's all_reduce on the vector in place and return it. e: prepared program, whose process group
    is used."""
    dist.all_reduce(vector, op=_get_reduce_op(e), group=e.group)
    return _divide_if_mean(e, vector)


def _reduce(e: Executable, vector: torch.Tensor) -> torch.Tensor:
    """Run torch.distributed's reduce to the root in place and return the vector. e: prepared program, whose process
    group and root are used."""
    dist.reduce(vector, group_dst=e.program.root, op=_get_reduce_op(e), group=e.group)
    return _divide_if_mean(e, vector)


def _reduce_scatter(e: Executable, vector: torch.Tensor) -> torch.Tensor:
    """Run torch.distributed's reduce-scatter; return the vector with the result in this rank's share. e: prepared
    program, whose process group is used."""
    share = torch.empty_like(_view_rank_share(e, vector))
    _native_reduce_scatter(share, vector, op=_get_reduce_op(e), group=e.group)
    _view_rank_share(e, vector).copy_(_divide_if_mean(e, share))
    return vector


def _all_gather(e: Executable, vector: torch.Tensor) -> None:
    """Run torch.distributed's all-gather of the ranks' shares into `vector`, [elements], in which this rank's share is
    already in place. e: prepared program, whose process group is used."""
    _native_all_gather(vector, _view_rank_share(e, vector).clone(), group=e.group)


def _broadcast(e: Executable, vector: torch.Tensor) -> None:
    """Run torch.distributed's broadcast from the root into the vector in place. e: prepared program, whose process
    group and root are used."""
    dist.broadcast(vector, group_src=e.program.root, group=e.group)


def _scatter(e: Executable, vector: torch.Tensor) -> None:
    """Run torch.distributed's scatter of the root's vector; each rank receives its share in place. e: prepared program,
    whose process group and root are used."""
    parts = list(vector.clone().view(e.program.ranks, -1)) if e.rank == e.program.root else None
    dist.scatter(_view_rank_share(e, vector), parts, group_src=e.program.root, group=e.group)


def _gather(e: Executable, vector: torch.Tensor) -> None:
    """Run torch.distributed's gather of the ranks' shares; the root receives all in its vector. e: prepared program,
    whose process group and root are used."""
    parts = list(vector.view(e.program.ranks, -1)) if e.rank == e.program.root else None
    dist.gather(_view_rank_share(e, vector).clone(), parts, group_dst=e.program.root, group=e.group)


def _all_to_all(e: Executable, vector: torch.Tensor) -> torch.Tensor:
    """Run torch.distributed's all_to_all_single on the vector and return the result as a new tensor. e: prepared
    program, whose process group is used."""
    result = torch.empty_like(vector)
    dist.all_to_all_single(result, vector, group=e.group)
    return result


def _send_receive(e: Executable, vector: torch.Tensor) -> None:
    """Run torch.distributed's send on the root, and recv into the vector on the destination rank. e: prepared program,
    whose process group and root are used."""
    if e.rank == e.program.root:
        dist.send(vector, group_dst=_find_receiver(e), group=e.group)
    elif e.rank == _find_receiver(e):
        dist.recv(vector, group_src=e.program.root, group=e.group)


def _barrier(e: Executable, vector: torch.Tensor) -> None:
    """Run torch.distributed's barrier over the process group of the prepared program `e`; the vector is unused."""
    dist.barrier(group=e.group)


# torch 2.13 renamed these two.
_native_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_native_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

NATIVE: dict[str, tuple[str, Callable[[Executable, torch.Tensor], torch.Tensor | None]]] = {
    "all-reduce": ("all_reduce", _all_reduce),
    "reduce": ("reduce", _reduce),
    "reduce-scatter": ("reduce_scatter_single", _reduce_scatter),
    "all-gather": ("all_gather_single", _all_gather),
    "broadcast": ("broadcast", _broadcast),
    "scatter": ("scatter", _scatter),
    "gather": ("gather", _gather),
    "all-to-all": ("all_to_all_single", _all_to_all),
    "send-receive": ("send and recv", _send_receive),
    "barrier": ("barrier", _barrier),
}
"""operation -> (name in torch.distributed, call)"""
