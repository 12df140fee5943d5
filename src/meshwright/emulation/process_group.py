"""Process group of one emulated rank, with torch.distributed's interface, and its key-value store."""

from __future__ import annotations

from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from meshwright.emulation.call_matcher import CallMatcher, EmulatedWork, GroupKey, describe_tensor
from meshwright.emulation.exchange import RankCall, name_reduction
from meshwright.errors import UserError

# Typed as Any: the stubs declare overloads for arguments that torch.distributed never passes.
_ProcessGroup: Any = dist.ProcessGroup
_Store: Any = dist.Store  # type: ignore[attr-defined]


class EmulatedGroup(_ProcessGroup):
    """Process group of one emulated rank, with the interface of a torch.distributed backend: methods take the arguments
    that torch.distributed passes, and return handles. A collective call is complete when all ranks have made the call,
    a send when its message is received. Reductions add in the order of gloo's ring all-reduce.

    matcher: matches the calls of all ranks. key: (number of earlier `init_process_group` calls of the rank, name of the
    group), equal on all ranks of the group; the number is needed because names repeat after each such call. rank: index
    of this rank in the group. ranks: global ranks of the group."""

    def __init__(self, matcher: CallMatcher, key: GroupKey, rank: int, ranks: tuple[int, ...]) -> None:
        """Create the group. matcher: matches the calls of all ranks. key: identifies the group on all its ranks. rank:
        index of this rank in the group. ranks: global ranks of the group.
        """
        super().__init__(rank, len(ranks))
        self.matcher, self.key, self.ranks = matcher, key, ranks
        self._rank = rank
        self.calls = 0

    def rank(self) -> int:
        """Return the index of this rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return len(self.ranks)

    @property
    def group_name(self) -> str:
        """Name of the group, by which PyTorch's functional collectives find it."""
        return self.key[1]

    @property
    def _device_types(self) -> list[torch.device]:
        """Devices whose tensors the group accepts: the CPU."""
        return [torch.device("cpu")]

    def getBackendName(self) -> str:
        """Return the name of the emulated backend. (With the name of a real backend, such as "gloo", torch would look
        for a C++ backend object.)"""
        return "emulated"

    name = getBackendName

    def shutdown(self) -> None:
        """Do nothing: there are no connections to close."""

    def abort(self) -> None:
        """Do nothing: there are no connections to abort."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: the emulation detects deadlocks without timeouts."""

    # --- collectives

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> EmulatedWork:
        """All-reduce each of `tensors` over the ranks, in place. opts: torch.distributed's options, whose `reduceOp` is
        the reduction; None: sum. Returns the handle of the call.
        """
        op = "SUM" if opts is None else name_reduction(opts.reduceOp)
        call = RankCall(tensors, tensors, tensors[0], f"{op} {' '.join(map(describe_tensor, tensors))}")
        return self.matcher.join(self, "all_reduce", call, op)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> EmulatedWork:
        """Reduce tensors[0] of all ranks; the root (`opts.rootRank`) receives the result in its tensors[0].
        `opts.reduceOp` is the reduction. Returns the handle of the call.
        """
        op = name_reduction(opts.reduceOp)
        outputs = tensors if opts.rootRank == self._rank else []
        form = f"{op} {describe_tensor(tensors[0])} to {self.ranks[opts.rootRank]}"
        return self.matcher.join(self, "reduce", RankCall(tensors, outputs, tensors[0], form), op, opts.rootRank)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> EmulatedWork:
        """Overwrite the tensors of every rank with the tensors of the root (`opts.rootRank`; rank 0 if `opts` is None).
        Returns the handle of the call."""
        root = 0 if opts is None else opts.rootRank
        form = f"{tensors[0].dtype} {tensors[0].numel()} from {self.ranks[root]}"
        return self.matcher.join(self, "broadcast", RankCall(tensors, tensors, tensors[0], form), root=root)

    def allgather(
        self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any = None
    ) -> EmulatedWork:
        """Gather one tensor of each rank on all ranks: outputs[0][i] on every rank receives rank i's tensors[0].
        Returns the handle of the call. opts: ignored.
        """
        self._check_count(outputs[0], "all_gather")
        return self.matcher.join(self, "all_gather", RankCall(tensors, outputs[0], tensors[0], str(tensors[0].dtype)))

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> EmulatedWork:
        """Gather every rank's `tensor` on all ranks into `output`, concatenated in rank order. Returns the handle of
        the call. opts: ignored.
        """
        chunks = self._slice_evenly(output, tensor.numel(), "all_gather")
        return self.matcher.join(self, "all_gather", RankCall([tensor], chunks, tensor, describe_tensor(tensor)))

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any = None
    ) -> EmulatedWork:
        """Gather each tensor tensors[k] of every rank on all ranks: outputs[k] receives the ranks' tensors,
        concatenated in rank order. Returns one handle for all. opts: ignored."""
        return self._join_works([self.all_gather_single(*pair) for pair in zip(outputs, tensors, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _allgather_base = all_gather_single

    def gather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any) -> EmulatedWork:
        """Gather one tensor of each rank on the root (`opts.rootRank`): there outputs[0][i] receives rank i's
        tensors[0]. Returns the handle of the call."""
        mine = outputs[0] if opts.rootRank == self._rank else []
        form = f"{describe_tensor(tensors[0])} to {self.ranks[opts.rootRank]}"
        return self.matcher.join(self, "gather", RankCall(tensors, mine, tensors[0], form), root=opts.rootRank)

    def scatter(self, outputs: list[torch.Tensor], tensors: list[list[torch.Tensor]], opts: Any) -> EmulatedWork:
        """Scatter tensors of the root (`opts.rootRank`), one to each rank: outputs[0] on rank i receives the root's
        tensors[0][i]. Returns the handle of the call."""
        mine = tensors[0] if opts.rootRank == self._rank else []
        form = f"{describe_tensor(outputs[0])} from {self.ranks[opts.rootRank]}"
        return self.matcher.join(self, "scatter", RankCall(mine, outputs, outputs[0], form), root=opts.rootRank)

    def reduce_scatter(self, outputs: list[torch.Tensor], tensors: list[list[torch.Tensor]], opts: Any) -> EmulatedWork:
        """Reduce over the ranks and scatter: outputs[0] on rank i receives the reduction (`opts.reduceOp`) of all
        ranks' tensors[0][i]. Returns the handle of the call.
        """
        self._check_count(tensors[0], "reduce_scatter")
        op = name_reduction(opts.reduceOp)
        form = f"{op} {' '.join(map(describe_tensor, tensors[0]))}"
        return self.matcher.join(self, "reduce_scatter", RankCall(tensors[0], outputs, outputs[0], form), op)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> EmulatedWork:
        """Reduce over the ranks and scatter: `output` on rank i receives the reduction of the i-th of n equal slices of
        all ranks' `tensor`. opts: torch.distributed's options, whose `reduceOp` is the reduction; None: sum. Returns
        the handle of the call.
        """
        op = "SUM" if opts is None else name_reduction(opts.reduceOp)
        chunks = self._slice_evenly(tensor, output.numel(), "reduce_scatter")
        form = f"{op} {describe_tensor(tensor)}"
        return self.matcher.join(self, "reduce_scatter", RankCall(chunks, [output], tensor, form, sliced=True), op)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any = None
    ) -> EmulatedWork:
        """Reduce each tensor tensors[k] over the ranks and scatter the result: outputs[k] on rank i receives the i-th
        of n equal slices of the result. opts: torch.distributed's options, whose `reduceOp` is the reduction; None:
        sum. Returns one handle for all reductions."""
        pairs = zip(outputs, tensors, strict=True)
        return self._join_works([self.reduce_scatter_single(output, tensor, opts) for output, tensor in pairs])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _reduce_scatter_base = reduce_scatter_single

    def alltoall(self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any = None) -> EmulatedWork:
        """Send tensors[i] to rank i of the group, and receive outputs[i] from it. Returns the handle of the call. opts:
        ignored.
        """
        self._check_count(outputs, "all_to_all")
        self._check_count(tensors, "all_to_all")
        return self.matcher.join(self, "all_to_all", RankCall(tensors, outputs, tensors[0], str(tensors[0].dtype)))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: list[int],
        sizes: list[int],
        opts: Any = None,
    ) -> EmulatedWork:
        """Send slice i of `tensor` (along dim 0) to rank i, and receive slice i of `output` from it. sizes,
        output_sizes: rows of each slice of `tensor` and `output`; empty: equal slices. opts: ignored. Returns the
        handle of the call.
        """
        call = RankCall(
            self._slice_rows(tensor, sizes), self._slice_rows(output, output_sizes), tensor, str(tensor.dtype)
        )
        return self.matcher.join(self, "all_to_all", call)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> EmulatedWork:
        """Let all ranks of the group wait for each other; return the handle of the call, complete once all ranks have
        called. opts: ignored.
        """
        return self.matcher.join(self, "barrier", RankCall((), (), None))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks of the group have called this method. timeout, wait_all_ranks: ignored."""
        self.barrier().wait()

    # --- messages

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> EmulatedWork:
        """Send tensors[0] to the rank at index `peer` of the group; `tag` must equal the receiver's. Returns the handle
        of the call."""
        return self.matcher.send(self, RankCall(tensors, (), tensors[0]), peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> EmulatedWork:
        """Receive into tensors[0] from the rank at index `peer` of the group; `tag` must equal the sender's. Returns
        the handle of the call."""
        return self.matcher.receive(self, RankCall((), tensors, tensors[0]), peer, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> EmulatedWork:
        """Receive into tensors[0] from any rank of the group: the first message sent to this rank with this `tag`.
        Returns the handle of the call."""
        return self.matcher.receive(self, RankCall((), tensors, tensors[0]), -1, tag)

    def split_group(self, *_: Any, **__: Any) -> Any:
        """Raise UserError: programs can make groups only with `torch.distributed.new_group`."""
        raise UserError("split_group is not emulated; use torch.distributed.new_group")

    merge_remote_group = split_group

    def _slice_evenly(self, whole: torch.Tensor, part: int, operation: str) -> list[torch.Tensor]:
        """Split the contiguous tensor `whole` into n equal slices, one per rank of the group; return flattened views of
        them.

        part: number of elements that each slice must have (the number of elements of the call's other tensor).
        operation: name of the collective for the error. Raises ValueError if `whole` does not have n times `part`
        elements.
        """
        if whole.numel() != part * len(self.ranks):
            raise ValueError(f"{operation}: {whole.numel()} elements are not {len(self.ranks)} ranks x {part}")
        return list(whole.data.view(-1).view(len(self.ranks), -1).unbind()) if part else [whole.data] * len(self.ranks)

    def _slice_rows(self, tensor: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
        """Return views of a tensor's slices along dim 0, one per rank. sizes: number of rows of each slice; empty:
        equal slices. Raises ValueError if these numbers do not add up to the tensor's rows.
        """
        if not sizes and tensor.shape[0] % len(self.ranks):
            raise ValueError(f"all_to_all: {tensor.shape[0]} rows are not divisible by {len(self.ranks)} ranks")
        sizes = list(sizes) or [tensor.shape[0] // len(self.ranks)] * len(self.ranks)
        ends = list(accumulate(sizes))
        if len(sizes) != len(self.ranks) or ends[-1] != tensor.shape[0]:
            raise ValueError(f"all_to_all: sizes {sizes} are not {len(self.ranks)} parts of {tensor.shape[0]} rows")
        return [tensor.data[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def _check_count(self, tensors: list[torch.Tensor], operation: str) -> None:
        """Raise ValueError unless `tensors` has one tensor for each rank of the group. operation: named in errors."""
        if len(tensors) != len(self.ranks):
            raise ValueError(f"{operation}: {len(tensors)} tensors for {len(self.ranks)} ranks")

    def _join_works(self, works: list[EmulatedWork]) -> EmulatedWork:
        """Combine the handles `works` of several calls into one handle, which is complete when all calls are
        complete."""
        return EmulatedWork(
            self.matcher,
            lambda: all(work.is_success() for work in works),
            lambda: next(work._describe() for work in works if not work.is_success()),
            lambda: [work.wait() for work in works] and (),
        )


class EmulatedStore(_Store):
    """Emulation of `torch.distributed.Store`: key-value store that all emulated ranks share. A rank that waits for a
    key lets other ranks run. matcher: object whose `store` holds the values and whose scheduler lets other ranks run.
    """

    def __init__(self, matcher: CallMatcher) -> None:
        """Use the values of `matcher.store`."""
        super().__init__()
        self._matcher, self._values = matcher, matcher.store

    def set(self, key: str, value: str | bytes) -> None:
        """Store `value`, text as UTF-8, under a key."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """Return the value of a key; if the key is missing, let other ranks run until one of them stores it."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the integer stored under a key (0 if the key is missing); return the sum."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key to `desired` if its value is `expected` (or if it is missing and `expected` is empty); return the
        value that the key has afterwards, b"" if the key is missing."""
        current = self._values.get(key, b"")
        if current == (expected.encode() if isinstance(expected, str) else expected):
            self.set(key, desired)
        return self._values.get(key, b"")

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys are stored."""
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Let other ranks run until all keys are stored. timeout: ignored."""
        self._matcher.scheduler.wait(lambda: self.check(keys), lambda: f"store.wait for {', '.join(keys)}")

    def delete_key(self, key: str) -> bool:
        """Remove a key; return True if it was stored."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of stored keys."""
        return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: the emulation detects deadlocks without timeouts."""
