"""Logits that stay on a GPU: sampling reads a few figures of each row (`summarize_logits`), and copies a whole row only
where options need all of it.

Shapes: R output rows, V vocabulary, K most likely tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from meshwright.serving.logit_rows import Draw, LogitRow, Logits

MAX_RANKED = 1024
"""Most likely tokens of a row that are copied, at most."""


class DeviceLogits:
    """Logits of one step's R output rows (tokens whose logits are wanted) on a GPU, an iterable of `DeviceRow`. The
    rows are valid until the runner's next step.

    logits_RV: float32 [R, V], V vocabulary. draws: sampling inputs of each row. operations: module with the kernel
    `summarize_logits`. buffers: pinned host buffer and device buffer for the sampling inputs, each float64 [at least 3
    R]. Kernels and copies are queued on the current CUDA stream; iteration waits for them.

    Attributes:
        logits: The logits on the device [R, V].
        vocabulary: Number of vocabulary entries, V.
        decided: True if the GPU has sampled the token of every row itself (greedy, or temperature without top-k, top-p
            or penalties), so that the host need not read any logits.
    """

    def __init__(
        self, logits_RV: torch.Tensor, draws: Sequence[Draw], operations: ModuleType, buffers: Sequence[torch.Tensor]
    ) -> None:
        """Launch the kernel that reduces each row and queue the copy of its results to the host; arguments: see the
        class."""
        self.logits, self._draws = logits_RV, draws
        self.decided = all(draw.decides and not draw.ranked for draw in draws)
        rows, self.vocabulary = logits_RV.shape
        staged, used = (each[: 3 * rows].view(3, rows) for each in buffers)
        staged.copy_(torch.tensor([each[:3] for each in draws], dtype=torch.float64).T)
        used.copy_(staged, non_blocking=True)
        figures_R7 = operations.summarize_logits(logits_RV, used)
        self._drawn_R, self._figures = figures_R7[:, 4], figures_R7.to("cpu", non_blocking=True)
        self._ranked = torch.empty(rows, 0), torch.empty(rows, 0, dtype=torch.int64)  # values and tokens [R, K]
        if most := max(draw.ranked for draw in draws):
            above = max(32, 1 << most.bit_length())  # more than `most`, if not capped, so that ties are seen
            values, tokens = logits_RV.topk(min(self.vocabulary, MAX_RANKED, above))
            self._ranked = values.to("cpu", non_blocking=True), tokens.to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream(logits_RV.device).record_event() if logits_RV.is_cuda else None

    def copy_tokens_to(self, tokens: torch.Tensor) -> None:
        """Queue a copy of the token IDs that the GPU has sampled into `tokens`, int32 [R] for R output rows, the input
        of the runner's next step. Allowed only if `decided` is true, as the next step overwrites the logits."""
        tokens.copy_(self._drawn_R.int().clamp_(0, self.vocabulary - 1))  # undefined if logits are NaN

    def wait(self) -> None:
        """Block the host until the results of the kernel `summarize_logits` have been copied to host memory."""
        if self._copied is not None:
            self._copied.synchronize()

    def __iter__(self) -> Iterator[DeviceRow]:
        """Yield the `DeviceRow` of each output row, in order."""
        self.wait()
        figures, (values, tokens) = self._figures.tolist(), (each.numpy() for each in self._ranked)
        if (values[:, 1:] == values[:, :-1]).any():
            order = np.lexsort((tokens, -values))  # equal logits by token ID
            values, tokens = (np.take_along_axis(each, order, 1) for each in (values, tokens))
        for row, draw in enumerate(self._draws):
            yield DeviceRow(self, row, draw, figures[row], (values[row], tokens[row]))


class DeviceRow(LogitRow):
    """Logits of one output row (a token whose logits are wanted) on a GPU. Any value that is not in `figures` or
    `ranked` is read from a copy of the row in host memory, which is made at most once.

    logits: logits of all output rows; a view of this row would take longer to make than this object. row: index of this
    row. draw: sampling inputs, such as the temperature, with which the GPU computed the figures. figures: [7], summary
    of the row by `device_operations.summarize_logits` (most likely token, its logit, softmax denominators, drawn token
    ...). ranked: (values float32 [K], token IDs int64 [K]) of the K highest logits, in descending order, equal logits
    by token ID; K may be 0."""

    def __init__(
        self, logits: DeviceLogits, row: int, draw: Draw, figures: Sequence[float],
        ranked: tuple[Logits, npt.NDArray[np.int64]],
    ) -> None:  # fmt: skip
        """Store references; no logits are copied yet. Arguments: see the class."""
        self._all, self._row, self.size = logits, row, logits.vocabulary
        self._draw, self._figures = draw, figures
        self.best, self.highest = int(figures[0]), np.float32(figures[1])
        self._host_V: Logits | None = None
        self._values, self._tokens = ranked
        # Number of tokens whose rank is certain: tokens that tie with the last one may be missing.
        self._certain = len(self._values)
        if self._certain and self._certain < self.size:
            self._certain = int(np.count_nonzero(self._values > self._values[-1]))

    def on_host(self) -> Logits:
        """Return a copy of the logits [V] in host memory; must not be modified. The copy is made at the first call."""
        if self._host_V is None:
            self._host_V = self._all.logits[self._row].cpu().numpy()
        return self._host_V

    def logit(self, token: int) -> float:
        """Return the logit of a token ID."""
        _, highest, _, _, drawn, drawn_logit, target_logit = self._figures
        for known, logit in ((self.best, highest), (drawn, drawn_logit), (self._draw.target, target_logit)):
            if token == known:
                return logit
        place = np.flatnonzero(self._tokens == token)
        return float(self._values[place[0]]) if len(place) else super().logit(token)

    def softmax_denominator(self, temperature: float) -> float:
        """Return the sum over the vocabulary of exp((logit - highest) / temperature), the softmax denominator; highest:
        the row's largest logit. temperature: more than 0."""
        known = {self._draw.temperature: self._figures[3], 1: self._figures[2]}
        return known[temperature] if temperature in known else super().softmax_denominator(temperature)

    def draw(self, temperature: float, uniform: float) -> int:
        """Return the ID of the token at quantile `uniform`, in [0, 1), of the softmax of logits / temperature, tokens
        ordered by ID (inverse-CDF sampling). Both arguments must be equal to the fields of the `Draw` with which the
        row was prepared."""
        assert (temperature, uniform) == (self._draw.temperature, self._draw.uniform), "another draw was prepared"
        return int(self._figures[4])

    def count_at_least(self, least: np.float32) -> int:
        """Return the number of logits that are at least `least`."""
        if self._certain == self.size or (len(self._values) and self._values[-1] < least):
            return int(np.count_nonzero(self._values >= least))
        return super().count_at_least(least)

    def highest_logits(self, count: int) -> Logits:
        """Return the `count` highest logits in descending order."""
        return self._values[:count] if count <= len(self._values) else super().highest_logits(count)

    def most_likely(self, count: int) -> list[int]:
        """Return the IDs of the `count` most likely tokens, most likely first, the lower ID first among equals."""
        return super().most_likely(count) if count > self._certain else [int(each) for each in self._tokens[:count]]

    def token_at(self, rank: int, values: Logits) -> int:
        """Return the ID of the token at index `rank` (0: the most likely) when tokens are sorted by descending logit,
        equal logits by ascending ID. values: result of `highest_logits` for more than `rank` logits."""
        return int(self._tokens[rank]) if rank < self._certain else super().token_at(rank, values)
