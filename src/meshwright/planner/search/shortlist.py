"""Candidates of a search in the order of their exact predictions: seconds by the simulator, memory by the ledger."""

from __future__ import annotations

from bisect import insort

import numpy as np

from meshwright.layout import Layout
from meshwright.planner.cost.communication import Array
from meshwright.planner.cost.step_time import StepPredictor
from meshwright.planner.memory.rank_memory import context_bytes, expected_peak_bytes, peak_device_bytes, slack_fraction
from meshwright.planner.problem import Problem
from meshwright.planner.search.estimate import Estimate, estimate_layout
from meshwright.planner.search.screen import ScreenedLayouts
from meshwright.program.makespan import MakespanCache

MOST_PRICED = 128
"""Maximum number of layouts that a search predicts exactly."""

DOUBT_ABOVE, DOUBT_BELOW = 1.15, 1 / 0.9
"""Largest ratios of closed-form memory to the ledger's, and of the ledger's to it, assumed for layouts without a
similar one whose ledger is known (tests/planner/search/test_search.py)."""
DOUBT_OF_EQUAL_SIZES = 1.03
"""The first of these ratios for layouts whose ranks have equal numbers of tokens, and that otherwise differ only in dp
and cp, from one whose ledger is known (same test)."""


def add_device_overhead(problem: Problem, peak: Array) -> Array:
    """Return the bytes used on a device for tensors of `peak` bytes (array): the CUDA context and fragmentation are
    added."""
    return peak * (1.0 + slack_fraction(problem.cluster)) + context_bytes(problem)


class Shortlist:
    """The fastest candidate layouts of a search that fit, predicted exactly: step time by the pipeline simulator, and
    memory by the ledger where the closed form is near the limit.

    screened: closed-form predictions of all candidates; wanted: number of layouts to find. The attribute `best` lists
    (seconds, candidate index, layout), fastest first.
    """

    def __init__(self, problem: Problem, screened: ScreenedLayouts, wanted: int) -> None:
        self.problem, self.every, self.room = problem, screened, problem.usable_bytes
        self.best: list[tuple[float, int, Layout]] = []
        self.difference: dict[int, float] = {}
        self.makespans = MakespanCache()
        self.kinds, self.sizes = self._find_alike()
        self._memory = screened.column("schedule", "recompute")  # closed-form memory has similar errors where it agrees
        self.factors: dict[int, float] = {}
        self.stopped = False
        self._wanted, self.budget = wanted, MOST_PRICED
        self._needed = add_device_overhead(problem, screened.bytes)
        # Closed-form seconds, corrected by simulations of the same kind; infinite once predicted exactly or excluded.
        self.pending = np.where(self._needed <= self.room * DOUBT_ABOVE, screened.seconds, np.inf)
        self._decide()

    def _decide(self) -> int:
        """Predict candidates exactly, in the order of their closed-form times, until no other can be among the wanted
        fastest or the budget of exact predictions is used. Return the number of candidates that were looked at."""
        closed_form, wanted, factors = self.every.seconds, self._wanted, self.factors
        for number in range(self.budget):
            at = int(self.pending.argmin())
            closed = self.pending[at]
            if closed == np.inf or (len(self.best) >= wanted and closed > self.best[wanted - 1][0]):
                return number + 1
            self.pending[at] = np.inf
            layout = self.every.layout(at)
            if not self.problem.accepts(layout):
                continue
            if self._needed[at] * DOUBT_BELOW > self.room:
                size = expected_peak_bytes(self.problem, layout, self.room)
                self._learn(at, size)
                if size > self.room:
                    continue
            seconds = self.seconds(at, layout)
            kind, ratio = int(self.kinds[at]), seconds / float(closed_form[at])
            if kind not in factors or abs(ratio / factors[kind] - 1) > 0.002:
                alike = np.flatnonzero((self.kinds == kind) & (self.pending < np.inf))
                self.pending[alike] = closed_form[alike] * ratio
                if kind not in factors and abs(ratio - 1) > 0.002:  # compared with the corrected closed form
                    closed = seconds
                factors[kind] = ratio
            self.difference[at] = closed / seconds - 1
            insort(self.best, (seconds, at, layout))
        self.stopped = True
        return self.budget

    def exclude(self, alike: Array, budget: int) -> int:
        """Exclude candidates, and find the fastest candidate that remains; it becomes the first entry of `best`. Return
        the number of exact predictions made. alike: bool array over all candidates, True for candidates to exclude;
        budget: maximum number of exact predictions."""
        self.pending[alike] = np.inf
        self._wanted, self.budget = 1, budget
        self.best = [entry for entry in self.best if not alike[entry[1]]]
        return self._decide()

    def _learn(self, index: int, exact: float) -> None:
        """Correct the closed-form memory of similar candidates by one exact prediction. The memory of all candidates
        with the schedule and recompute of candidate `index` is scaled by one factor, so that candidate `index` gets
        `exact` bytes. Candidates that are then too large are excluded."""
        alike = np.flatnonzero(self._memory == self._memory[index])
        self._needed[alike] *= exact / self._needed[index]
        doubt = np.where(self.sizes[alike] == self.sizes[index], DOUBT_OF_EQUAL_SIZES, DOUBT_ABOVE)
        self.pending[alike[self._needed[alike] > self.room * doubt]] = np.inf

    def _find_alike(self) -> tuple[Array, Array]:
        """Return two integers per candidate. Where the first are equal, closed-form times have similar errors: such
        candidates have the same pipeline, and equal numbers of micro-batches per pipeline rank after rounding to a
        power of two. Where the second are equal, closed-form memory has: such candidates have the same pipeline and
        number of micro-batches, and differ only in dp, cp and the sequences of a micro-batch."""
        every, ranks = self.every, self.every.column("ranks")
        inner = every.column("tp") * every.column("cp") / every.column("rows")
        micro = self.problem.batch / self.problem.cluster.devices * inner * ranks
        rounds = np.clip(np.log2(micro / ranks) + 16, 0, 63).astype(np.int64)
        same = every.column("zero", "tp", "tensor_sequence_parallel", "cp_method", "ep", "etp", "recompute")
        sizes = (same * len(every.pipelines) + every.pipe) * (self.problem.batch + 1) + np.rint(micro).astype(np.int64)
        return every.pipe * 64 + rounds, sizes

    def seconds(self, index: int, layout: Layout) -> float:
        """Return the seconds of a step of a candidate layout, predicted by the simulator. index: index of the
        candidate. layout: its layout."""
        return self._step(index, layout).price(parts=False).seconds

    def expected(self) -> Array:
        """Return the closed-form seconds of all candidates, corrected by the simulator's results for similar
        candidates."""
        factor = np.ones(int(self.kinds.max()) + 1)
        factor[list(self.factors)] = list(self.factors.values())
        return np.asarray(self.every.seconds * factor[self.kinds])

    def _step(self, index: int, layout: Layout) -> StepPredictor:
        """Return the step-time predictor of a candidate layout; it reuses results of earlier candidates. index: index
        of the candidate. layout: its layout."""
        return StepPredictor(
            self.problem, layout, layer_times=self.every.layer_times, index=int(self.every.candidate[index]),
            makespans=self.makespans,
        )  # fmt: skip

    def undecided(self, best: list[Estimate], top: int) -> int:
        """Return the number of candidates without exact prediction that may be faster than the last of `best`. best:
        estimates found; top: number of layouts asked for."""
        if not self.stopped:
            return 0
        return int((self.pending < (best[-1].time.seconds if len(best) >= top else np.inf)).sum())

    def estimates(self, top: int) -> list[Estimate]:
        """Return the estimates of the `top` fastest layouts that fit by the exact memory of all their ranks. A layout
        that does not fit is replaced by the next fastest."""
        found: dict[int, Estimate] = {}
        while True:
            fit: list[Estimate] = []
            too_large: dict[int, int] = {}
            for _, at, layout in self.best:
                if at not in found:
                    size = peak_device_bytes(self.problem, layout, self.room)
                    if size > self.room:
                        too_large[at] = size
                        continue
                    found[at] = estimate_layout(self.problem, layout, self._step(at, layout))
                fit.append(found[at])
                if len(fit) == top:
                    break
            self.best = [entry for entry in self.best if entry[1] not in too_large]
            if len(fit) == top or not too_large or self.stopped:
                return fit
            for at, size in too_large.items():
                self._learn(at, size)
            self._decide()
