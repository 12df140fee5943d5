"""Forward and backward of a training step as one CUDA graph, which the host launches by one call.

As Megatron-LM's full-iteration graphs (`--cuda-graph-impl full_iteration`) and torchtitan's, the graph spans all micro-
batches of the step. Its inputs are tokens, targets, document boundaries and divisor of the loss, its results the loss
and the gradients, which lie in the flat buffers of the ZeRO engine. The calls of tensor parallelism within layers are
in the graph; a replay records and watches them as one call. The calls of data parallelism stay outside of it:
all-gathers of parameters end before a replay, reductions of gradients begin after it. So do gradient norm, clipping and
update, with a learning rate that changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
import torch.nn.functional as F

from meshwright.comm.record import Record
from meshwright.errors import UserError
from meshwright.flight_recorder.wrapped_calls import CallRecorder, WrappedCalls
from meshwright.model import varlen_attention
from meshwright.model.documents import Documents, MicroBatch, move
from meshwright.monitoring.clock import IN_GRAPH
from meshwright.parallel.stage_compute import Divisor
from meshwright.parallel.step import ForwardBackward
from meshwright.recipe import Recipe
from meshwright.spec.chunks import pad_document_count
from meshwright.spec.config import ModelConfig
from meshwright.training.batch_prefetch import list_tensors

CAPTURING_DEVICES = ("cuda",)
"""Types of devices on which `train.cuda_graphs` has an effect."""

UNCAPTURED_STEPS = 2
"""Steps before the capture: they compile kernels, fill tables of positions and make cuBLAS's handles, none of which a
capture can."""

MULTIPROCESSORS = 256
"""More than a GPU has (H100: 132, B200: 148)."""

GROUPED_CAPABILITIES = (9, 10)
"""Major compute capabilities for which PyTorch's grouped product of bf16 does not read on the host how many tokens each
expert gets (aten/src/ATen/native/cuda/GroupedBlas.cpp)."""

RunPasses = Callable[[Sequence[MicroBatch], Divisor], torch.Tensor]
"""Function (micro-batches, divisor of the loss) -> float64 [1 + metrics]: `Task.forward_backward`."""


GRAPH_SITE = "layers"
"""Site under which the flight recorder lists a replay of a graph's collective calls."""


class _CapturedCalls(WrappedCalls):
    """Recorder of calls during a capture, in which no call is made: nothing but groups is recorded in `calls`, the
    recorder of this process. A replay makes the captured calls, and is recorded as one call of each process group,
    because the host cannot observe the end of a call inside a graph.

    `payloads`: bytes of the captured calls, by (number of the process group, name of the mesh axis)."""

    def __init__(self, calls: CallRecorder) -> None:
        super().__init__(calls)
        self.payloads: Counter[tuple[int, str]] = Counter()

    def post(self, group: int, site: str, operation: str, axis: str, payload_bytes: int, dtype: Any, shape: Any) -> int:
        """Add the bytes of a captured call to `payloads`; return 0. Arguments: see `CallWriter.post`."""
        self.payloads[group, axis] += payload_bytes
        return 0

    def wait(self, number: int) -> None:
        """Do nothing: in a capture, streams wait, and the host does not."""

    def done(self, number: int) -> None:
        """Do nothing: captured calls have not been made."""


class _CapturedStep(NamedTuple):
    """CUDA graph of a step's forward and backward.

    graph: the graph. micro_batches: micro-batches that it reads. inputs: their tensors, then the divisor of the loss;
    each replay reads the values that these tensors hold. shares: result that each replay overwrites. reductions:
    functions that start the reductions of the gradients or wait for them, in the order of backward. record: calls and
    bytes in the graph by site. payloads: bytes by process group, for the flight recorder."""

    graph: torch.cuda.CUDAGraph
    micro_batches: Sequence[MicroBatch]
    inputs: list[torch.Tensor]
    shares: torch.Tensor
    reductions: list[Callable[[], None]]
    record: Record
    payloads: Counter[tuple[int, str]]


class FixedDocuments:
    """Document boundaries of packed micro-batches whose shapes, and what the host reads of them, stay the same as long
    as no micro-batch has more documents than those before it, padded (`spec.chunks.pad_document_count`).

    heads: query heads of a rank; if given, gradients have the same bits however many documents are padded, as a resumed
    run begins with fewer. (A deterministic backward of flash attention adds up in an order that depends on documents x
    heads, while these are fewer than the multiprocessors: flash_attn/flash_api.cpp, `nsplits`.)"""

    def __init__(self, heads: int | None = None) -> None:
        least = 0 if heads is None else pad_document_count(-(-MULTIPROCESSORS // heads))
        self._ends = least + 1  # documents to which boundaries are padded, and 1 for the first boundary

    def fix(self, documents: Documents, tokens_BS: torch.Tensor) -> Documents:
        """Return `documents` with boundaries `bounds` of fixed shape, also if each sequence is one document. tokens_BS:
        the micro-batch's tokens [B, S], of which shape and device are read."""
        rows, sequence = tokens_BS.shape
        starts_BS = documents.on_host().starts_BS
        if starts_BS is None:
            starts_BS = torch.zeros(rows, sequence, dtype=torch.int64)
            documents = replace(documents, starts_BS=move(starts_BS, tokens_BS.device), host_starts_BS=starts_BS)
        cu_seqlens, _ = varlen_attention.find_lengths(starts_BS[:, None], (0,))
        self._ends = max(self._ends, cu_seqlens.shape[1])
        cu_seqlens = F.pad(cu_seqlens, (0, self._ends - cu_seqlens.shape[1]), value=rows * sequence)
        # The longest document is an argument of the kernels' launch: the greatest that a batch may have.
        return replace(documents, bounds=(move(cu_seqlens, tokens_BS.device), torch.tensor([sequence])))


class GraphedForwardBackward:
    """Function (micro-batches, divisor of the loss) that runs forward and backward of a step, from the third step on as
    a replay of a CUDA graph. A step in which a profile is recorded runs without the graph, since the profile needs each
    pass. So does a step whose micro-batches have other shapes than those before it (`FixedDocuments`); then another
    graph is captured.

    run: runs forward and backward without a graph. For tensors of the same shapes it must launch the same kernels and
    collective calls, without a wait of the host, and all-gather each parameter and reduce each gradient once
    (`launcher.recipe_checks.check_cuda_graphs`).
    passes: object that marks the phases of the step for the trainer's clock."""

    def __init__(self, run: RunPasses, passes: ForwardBackward) -> None:
        self._run, self._passes = run, passes
        self._uncaptured = UNCAPTURED_STEPS
        self._captured: _CapturedStep | None = None
        self._shapes: list[torch.Size] = []
        """Shapes of the tensors in the last micro-batches."""
        weak = WeakMethod(self.release)  # an axis of a mesh that is never closed holds its communicator

        def release() -> None:
            """Release the graph, unless this object has been freed."""
            if (method := weak()) is not None:
                method()

        passes.engine.mesh.communicator.release_graphs = release

    def release(self) -> None:
        """Release the captured graph; the next step captures another. NCCL closes a communicator only when no graph
        contains calls over it."""
        self._captured = None

    def __call__(self, micro_batches: Sequence[MicroBatch], divisor: Divisor) -> torch.Tensor:
        """Run forward and backward of `micro_batches`, whose summed loss is divided by `divisor`; return what the
        function `run` returns. The next call overwrites the returned tensor."""
        if self._passes.watched is not None:
            return self._run(micro_batches, divisor)
        if (shapes := [tensor.shape for tensor in list_tensors(micro_batches)]) != self._shapes:
            # More documents than before: compiled blocks are compiled anew, without the memory of the old graph.
            self._shapes, self._captured, self._uncaptured = shapes, None, max(self._uncaptured, 1)
        if self._uncaptured:
            self._uncaptured -= 1
            return self._run(micro_batches, divisor)
        engine = self._passes.engine
        for unit in engine.shards:
            unit.unshard()
        given = [*list_tensors(micro_batches), self._evaluate(divisor)]
        if self._captured is None:
            self._captured = self._capture(micro_batches, given)
        captured = self._captured
        for tensor, value in zip(captured.inputs, given, strict=True):
            assert tensor.shape == value.shape and tensor.dtype == value.dtype, "a CUDA graph has inputs of fixed shape"
            tensor.copy_(value)
        self._replay(captured)
        self._passes.mark(IN_GRAPH)
        for reduce in captured.reductions:
            reduce()
        self._passes.mark("reduce")
        return captured.shares

    def _replay(self, captured: _CapturedStep) -> None:
        """Replay a graph and record its collective calls: in the byte counts each under its site, in the flight
        recorder as one call of each process group."""
        communicator = self._passes.engine.mesh.communicator
        calls, record = communicator.calls, communicator.record
        numbers = [
            calls.post(group, GRAPH_SITE, "CUDA graph", axis, payload, torch.uint8, (payload,))
            for (group, axis), payload in captured.payloads.items()
        ]
        captured.graph.replay()
        for number in numbers:
            calls.wait(number)
            calls.done(number)
        for each in captured.record.sites.values():
            record.count_call(each.site, each.operation, each.axis, each.payload_bytes, each.sent_bytes, each.calls)

    def _capture(self, micro_batches: Sequence[MicroBatch], inputs: list[torch.Tensor]) -> _CapturedStep:
        """Capture forward and backward of `micro_batches` without running them. inputs: the tensors of `micro_batches`,
        then the divisor of the loss, scalar; the graph keeps reading these tensors.

        Other threads may use the GPU meanwhile, as a background save does."""
        graph = torch.cuda.CUDAGraph()
        reductions: list[Callable[[], None]] = []
        reducer, communicator = self._passes.engine.gradients.reducer, self._passes.engine.mesh.communicator
        captured_calls, captured_record = _CapturedCalls(communicator.calls), Record()
        launch, reducer.launch = reducer.launch, reductions.append
        mark, self._passes.mark = self._passes.mark, lambda part: None  # a captured event has no time
        calls, communicator.calls = communicator.calls, captured_calls
        record, communicator.record = communicator.record, captured_record
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                shares = self._run(micro_batches, inputs[-1])
        finally:
            communicator.calls, communicator.record = calls, record
            self._passes.mark = mark
            reducer.launch = launch
        return _CapturedStep(graph, micro_batches, inputs, shares, reductions, captured_record, captured_calls.payloads)

    def _evaluate(self, divisor: Divisor) -> torch.Tensor:
        """Return the value of `divisor` as a scalar tensor on the device of the model, which waits for the all-reduce
        of the number of loss terms."""
        value = divisor() if callable(divisor) else divisor
        return torch.as_tensor(value, device=self._passes.engine.mesh.device)


def graph_passes(
    run: RunPasses, passes: ForwardBackward, recipe: Recipe, config: ModelConfig
) -> tuple[GraphedForwardBackward, FixedDocuments | None]:
    """Return the function that replays the passes of a run of `recipe` as a CUDA graph, and what fixes the boundaries
    of its packed documents (None: it packs none). Raises `UserError` for experts on a GPU whose grouped product no
    graph can capture.

    run, passes: see `GraphedForwardBackward`. config: architecture of the recipe's model."""
    device = passes.engine.mesh.device
    major, minor = torch.cuda.get_device_capability(device) if config.experts and device.type == "cuda" else (0, 0)
    if major not in (0, *GROUPED_CAPABILITIES):
        raise UserError(
            f"{recipe.where('train.cuda_graphs')}: train.cuda_graphs: a graph with experts needs a GPU of compute "
            f"capability 9 or 10 (Hopper, Blackwell), and this one has {major}.{minor}; set train.cuda_graphs=false"
        )
    heads = config.heads // passes.engine.mesh.tp.size if recipe.train.deterministic else None
    return GraphedForwardBackward(run, passes), FixedDocuments(heads) if recipe.data.document_mask else None
