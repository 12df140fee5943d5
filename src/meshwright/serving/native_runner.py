"""Forward steps by the compiled kernels, without torch but for collective calls.

Shapes: T tokens of a step, R rows of logits, H hidden, V vocabulary, P ranks of tp.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from meshwright.comm.collectives import all_gather
from meshwright.comm.mesh import Mesh
from meshwright.kernels.library import Kernels
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.serving.lowering import Lowering, Segment
from meshwright.serving.scheduler import StepBatch
from meshwright.serving.weights import RankWeights

SUM_SITE, LOGITS_SITE = "serving.sum", "serving.logits"


class NativeRunner:
    """Runner of serving steps on a CPU by the compiled kernels: executes the list of kernel operations of one rank's
    pipeline stage. It implements the interface `Runner`.

    kernels: compiled library. weights: reader of this rank's weights. mesh: gives the axes tp, pp and ep. dtype:
    "float32" or "bfloat16", of packed weights and KV cache. sizes: sizes of KV pool and buffers.
    """

    def __init__(self, kernels: Kernels, weights: RankWeights, mesh: Mesh, dtype: str, sizes: ServingSizes) -> None:
        """Lower the stage to kernel operations and load them into the library; arguments: see the class."""
        self.config, self.instruction_set, self.version = weights.config, kernels.instruction_set, kernels.version
        lowered = Lowering(kernels, weights, mesh, dtype, sizes)
        self._ops, self._segments, self._memory = lowered.ops, lowered.segments, lowered.nbytes
        self._states, self._logits, self._sizes, self._tensor = lowered.states, lowered.logits, sizes, mesh.tp
        widest = max(self._states.size, 0 if self._logits is None else self._logits.size)
        self._gathered = torch.empty(0 if mesh.tp.trivial else mesh.tp.size * widest)
        if not mesh.tp.trivial:
            self._memory["communication"] = self._gathered.nbytes

    def memory(self) -> dict[str, int]:
        """Return {kind: bytes}: `weights` (embeddings, norms, biases), `packed` (weight matrices), `workspace`, `kv`
        (cache), `logits`, and on tensor-parallel ranks `communication`."""
        return dict(self._memory)

    def run(self, batch: StepBatch, hidden: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
        """Compute this rank's pipeline stage for a batch of T tokens. The last stage returns the logits of the R output
        rows (tokens whose logits are wanted), [R, V] for V vocabulary entries. Any other stage returns the hidden
        states, [T, H] with hidden size H. The result is valid until the next call. `hidden`: the previous stage's
        hidden states [T, H]; None on the first stage."""
        tokens, rows = len(batch.tokens), len(batch.output_rows)
        assert tokens <= self._sizes.token_budget and rows <= self._sizes.logit_rows, (tokens, rows)
        if hidden is not None:
            self._states[:tokens] = hidden
        begin = 0
        for segment in self._segments:
            self._ops.run(batch, begin, segment.end)
            if segment.partial is not None:
                reduce = self._normalise_over_ranks if segment.norms else self._sum_over_ranks
                reduce(segment, segment.partial[:tokens])
            begin = segment.end
        if self._logits is None:
            return self._states[:tokens]
        if self._tensor.trivial or not rows:
            return self._logits[:rows]
        slices_PRV = self._all_gather(self._logits[:rows], LOGITS_SITE)
        return np.concatenate(list(slices_PRV), axis=1)[:, : self.config.vocabulary]  # without vocabulary padding

    def _sum_over_ranks(self, segment: Segment, partial_TH: npt.NDArray[np.float32]) -> None:
        """All-reduce `partial_TH` over the tensor-parallel ranks, summed in rank order, and add the bias of `segment`.
        The result is added to the segment's residual; if it has none, the result overwrites `partial_TH`.

        partial_TH: this rank's partial result, [T, H] for T tokens of hidden size H."""
        first_TH = self._all_reduce(partial_TH)
        if segment.bias is not None:
            first_TH += segment.bias
        if segment.residual is None:
            partial_TH[:] = first_TH
        else:
            segment.residual[: len(partial_TH)] += first_TH

    def _normalise_over_ranks(self, segment: Segment, slices_TX: npt.NDArray[np.float32]) -> None:
        """Apply the RMSNorms of `segment` to the first columns of `slices_TX` in place, this rank's slices of T rows.
        The sums of squares are all-reduced over the tensor-parallel ranks, which have equal numbers of columns."""
        widths = np.cumsum([len(each) for each in segment.norms])
        bounds = range(64, len(slices_TX), 64)  # of blocks of rows, so that temporaries are small
        blocks = [np.split(rows, widths, axis=1)[:-1] for rows in np.split(slices_TX, bounds)]  # views
        own = [np.stack([np.square(part).sum(axis=1) for part in parts], axis=1) for parts in blocks]
        for parts, sums_TN in zip(blocks, np.split(self._all_reduce(np.concatenate(own)), bounds), strict=True):
            for part, weight, sum_T in zip(parts, segment.norms, sums_TN.T, strict=True):
                mean_T = sum_T / np.float32(part.shape[1] * self._tensor.size)
                part *= weight / np.sqrt(mean_T + np.float32(self.config.norm_epsilon))[:, None]

    def _all_reduce(self, own: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the sum of the array `own` of each tensor-parallel rank, added in rank order. The sum is valid until
        the next collective call."""
        first, *others = self._all_gather(own, SUM_SITE)
        for part in others:
            first += part
        return first

    def _all_gather(self, own: npt.NDArray[np.float32], site: str) -> npt.NDArray[np.float32]:
        """All-gather the array `own` of each of the P tensor-parallel ranks; return [P, ...] in rank order. site: label
        of the call in traces."""
        parts = self._gathered[: self._tensor.size * own.size].view(self._tensor.size, *own.shape)
        all_gather(parts, torch.from_numpy(own), self._tensor, site)
        return parts.numpy()
