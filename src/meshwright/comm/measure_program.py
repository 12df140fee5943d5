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
from meshwright.comm.backend import get_group_backends
from meshwright.comm.local import LocalRanks
from meshwright.comm.programs import Executable
from meshwright.comm.transport import native_all_gather, native_reduce_scatter
from meshwright.errors import CheckFailed, UserError
from meshwright.flight_recorder.call_ring import get_process_writer
from meshwright.program.check_collective import CheckedCollective

MAX_RANKS = 16  # processes on one machine
DTYPE = torch.float32  # of the vector
TIMEOUT_SECONDS = 60.0  # of one wait
COPIES = 6  # of the vector that a rank may hold: ours, theirs, results, buffers
NATIVE_NAMES = {
    "reduce-scatter": "reduce_scatter_single", "all-gather": "all_gather_single", "all-to-all": "all_to_all_single",
    "send-receive": "send and recv",
}  # fmt: skip
"""Operations that torch.distributed calls by another name."""


def measure(
    checked: CheckedCollective,
    total_bytes: float,
    *,
    repeats: int = 20,
    world: LocalRanks | None = None,
) -> dict[str, Any]:
    """Run a verified collective program on gloo processes of this machine, alternating with torch.distributed's own
    call, and return the measured times.

    checked: the program (each rank's sends, receives and reductions). total_bytes: size of the operation's float32
    vector. The size is rounded up to whole elements, and to equal slices if each rank owns a slice. repeats: number of
    timed runs. world: local ranks to run on, as many as the program has; None: start new ranks, with one thread each.

    Returns a dict with these keys. exact: always True: in a test run on integers the results were equal.
    measured_seconds, native_seconds: time of the program and of torch.distributed's call, the median over runs of the
    slowest rank's time. ratio: median over runs of native time / program time; above 1 the program is faster.
    bytes_sent: list by rank, padding included. native: name of torch.distributed's call. Further keys: total_bytes,
    backend, repeats.

    Raises UserError if this machine cannot hold the ranks or vectors, CheckFailed if results differ, and RankLost if a
    rank ends or does not answer within `TIMEOUT_SECONDS`; its message names the waiting ranks and the step.
    """
    program = checked.program
    if repeats < 1:
        raise UserError(f"repeats must be at least 1, not {repeats}")
    if program.ranks > MAX_RANKS:
        raise UserError(
            f"{program.ranks} ranks: this machine runs a program on at most {MAX_RANKS} processes; use fewer ranks, "
            "or do not run it"
        )
    numel = count_elements(checked, total_bytes)
    needed = program.ranks * numel * DTYPE.itemsize * COPIES
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise UserError(
            f"{program.ranks} ranks with {total_bytes:,.0f} bytes each need about {needed / 2**30:.1f} GiB, and this "
            f"machine has {memory / 2**30:.1f} GiB; use fewer bytes"
        )
    ranks = LocalRanks(program.ranks, timeout=TIMEOUT_SECONDS) if world is None else world
    try:
        # Every wait has its own timeout; all of them together may take longer.
        answers = ranks.run(measure_rank, checked, numel, repeats, timeout=repeats * 600.0)
    finally:
        if world is None:
            ranks.close()
    return combine_answers(checked, numel * DTYPE.itemsize, answers)


def count_elements(checked: CheckedCollective, total_bytes: float) -> int:
    """Return the number of float32 elements of a vector of `total_bytes`, rounded up. checked: collective program that
    is to run on the vector. If each of its ranks owns a slice of the vector, the number is rounded up to equal slices.
    Raises UserError for a negative size."""
    if total_bytes < 0:
        raise UserError(f"bytes must be at least 0, not {total_bytes:g}")
    numel = max(1, -int(-total_bytes // DTYPE.itemsize))
    ranks = checked.program.ranks
    return -(-numel // ranks) * ranks if checked.program.operation in OWNED else numel


def combine_answers(checked: CheckedCollective, total_bytes: int, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the measurements of all ranks (`answers`, the dict that `measure_rank` returned on each rank) into the
    dict that `measure` returns.

    checked: the measured program. total_bytes: size of the vector. Raises CheckFailed if a rank's result differs from
    torch.distributed's.
    """
    wrong = [rank for rank, answer in enumerate(answers) if not answer["exact"]]
    if wrong:
        named = f"{checked.program.operation} {checked.program.algorithm}"
        native = answers[0]["native"]
        raise CheckFailed(f"{named}: the result of rank {wrong[0]} differs from that of torch.distributed's {native}")
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


def measure_rank(checked: CheckedCollective, numel: int, repeats: int, device: str = "cpu") -> dict[str, Any]:
    """Run and time the verified collective program `checked` on this rank of the world, alternating with
    torch.distributed's own call.

    numel: number of elements of the float32 vector. repeats: number of timed runs. device: device of the vector.
    Returns a dict with these keys. exact: True if the program and the call gave equal results on integers. ours,
    theirs: lists with the seconds of each run of the program and of torch.distributed's call. bytes_sent: by this rank.
    backend: name of the backend. native: name of torch.distributed's call.
    """
    executable, operation = (
        Executable(checked, timeout_seconds=TIMEOUT_SECONDS, device=device),
        checked.program.operation,
    )
    exact = _matches_native(executable, numel, device)
    vector = torch.ones(numel, dtype=DTYPE, device=device)
    output = torch.empty_like(vector) if checked.program.has_output else None
    calls: dict[str, Callable[[], Any]] = {
        "ours": lambda: _run_program(executable, None if operation == "barrier" else vector, output),
        "theirs": lambda: _run_native(executable, vector),
    }
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for turn in range(repeats + 2):
        for which, call in calls.items():
            vector.fill_(1)
            dist.barrier()
            begun = time.perf_counter()
            call()
            if vector.is_cuda:
                torch.cuda.synchronize()
            if turn >= 2:  # the first two turns create connections and buffers
                seconds[which].append(time.perf_counter() - begun)
    return {
        "exact": exact,
        **seconds,
        "bytes_sent": executable.sent_bytes(numel, vector.element_size()),
        "backend": get_group_backends(None)[torch.device(device).type],
        "native": NATIVE_NAMES.get(operation, operation.replace("-", "_")),
    }


def _run_program(executable: Executable, vector: torch.Tensor | None, output: torch.Tensor | None) -> None:
    """Run the prepared collective program `executable` once on `vector` (None: barrier) and record the run as one call
    in the flight recorder.

    output: receives the result of an all-to-all; None for other operations, which work in place."""
    calls = get_process_writer()
    size, form = (0, ("", ())) if vector is None else (vector.nbytes, (vector.dtype, vector.shape))
    number = calls.post(calls.register_group(executable.ranks), executable.name, "program", "world", size, *form)
    calls.wait(number)
    executable.run(vector, output)
    calls.done(number)


def _matches_native(executable: Executable, numel: int, device: str) -> bool:
    """Run the prepared program `executable`, and torch.distributed's call of the same operation, on a vector of
    integers; return True if their results are equal.

    numel: number of elements of the vector. device: device of the vector."""
    program = executable.program
    if program.operation == "barrier":
        _run_program(executable, None, None)
        return True
    dtype = torch.float64 if program.reduction == "mean" else torch.int32
    start = (torch.arange(numel, device=device) * 7 + 13 * executable.rank).remainder_(31).sub_(15).to(dtype)
    mine, theirs = start.clone(), start.clone()
    output = torch.empty_like(mine) if program.has_output else None
    _run_program(executable, mine, output)
    result = _run_native(executable, theirs)
    place = find_defined_slice(executable, numel)
    return torch.equal((mine if output is None else output)[place], result[place])


def _run_native(executable: Executable, vector: torch.Tensor) -> torch.Tensor:
    """Run torch.distributed's call of the same operation as `executable` (a prepared program) on `vector`, and return
    the result on the vector's device. With gloo, a CUDA vector is first copied to host memory."""
    there = vector if vector.is_cpu or executable.batched else vector.cpu()
    return _call_native(executable, there).to(vector.device)


def find_defined_slice(executable: Executable, numel: int) -> slice:
    """Return the slice of a vector of `numel` elements that the operation defines on this rank, such as the rank's own
    slice after a reduce-scatter; the other elements have arbitrary values.

    executable: prepared program, which gives operation and rank.
    """
    program, rank = executable.program, executable.rank
    if program.operation in ("reduce-scatter", "scatter"):
        share = numel // program.ranks
        return slice(rank * share, (rank + 1) * share)
    if program.operation in ("reduce", "gather") and rank != program.root:
        return slice(0)
    if program.operation == "send-receive" and rank != _find_receiver(executable):
        return slice(0)
    return slice(0, numel)


def _find_receiver(executable: Executable) -> int:
    """Return the rank that receives the vector in the operation "send-receive". It is the last rank, or rank 0 if the
    last rank is the sender (root). executable: the prepared program."""
    last = executable.program.ranks - 1
    return last if executable.program.root != last else 0


def _call_native(e: Executable, vector: torch.Tensor) -> torch.Tensor:
    """Run torch.distributed's call of the operation of `e`, a prepared program, on `vector` in place. Return the
    result: `vector`, or a new tensor for an all-to-all.
    """
    program, group, operation, root = e.program, e.group, e.program.operation, e.program.root
    shares = vector.view(program.ranks, -1).unbind() if operation in OWNED else (vector,) * program.ranks
    mine = shares[e.rank]
    op: Any = {"minimum": dist.ReduceOp.MIN, "maximum": dist.ReduceOp.MAX}.get(program.reduction, dist.ReduceOp.SUM)
    match operation:
        case "all-reduce":
            dist.all_reduce(vector, op=op, group=group)
        case "reduce":
            dist.reduce(vector, group_dst=root, op=op, group=group)
        case "reduce-scatter":
            total = torch.empty_like(mine)
            native_reduce_scatter(total, vector, op=op, group=group)
            mine.copy_(total)
        case "all-gather":
            native_all_gather(vector, mine.clone(), group=group)
        case "broadcast":
            dist.broadcast(vector, group_src=root, group=group)
        case "scatter":
            parts = list(vector.clone().view(program.ranks, -1)) if e.rank == root else None
            dist.scatter(mine, parts, group_src=root, group=group)
        case "gather":
            dist.gather(mine.clone(), list(shares) if e.rank == root else None, group_dst=root, group=group)
        case "all-to-all":
            result = torch.empty_like(vector)
            dist.all_to_all_single(result, vector, group=group)
            return result
        case "send-receive" if e.rank == root:
            dist.send(vector, group_dst=_find_receiver(e), group=group)
        case "send-receive" if e.rank == _find_receiver(e):
            dist.recv(vector, group_src=root, group=group)
        case "barrier":
            dist.barrier(group=group)
    if program.reduction == "mean" and "reduce" in operation:
        mine.div_(program.ranks)
    return vector
