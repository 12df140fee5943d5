"""Choice of the fastest algorithm for an operation, size and network, by simulation of all that apply.

Few rounds win for small vectors, few bytes for large ones; on shared links or two tiers, the placement of the traffic
matters too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace

from meshwright.collectives.bounds import compute_lower_bound_seconds
from meshwright.collectives.cost import compute_closed_form_seconds
from meshwright.collectives.library import ALGORITHMS, generate, list_options
from meshwright.collectives.quantities import format_seconds
from meshwright.errors import UserError
from meshwright.names import OPERATIONS, unknown
from meshwright.program.collective import CollectiveProgram, MatchedCollective
from meshwright.program.network import Network
from meshwright.program.simulate_collective import CollectiveSimulator

MAX_SEGMENTS = 256
_NEAR_BEST = 1.2  # maximum ratio to the best time for which other numbers of segments are tried
_MANY_RANKS, _MANY_SEGMENTS = 64, 16  # above, only algorithms with a closed form near the best are simulated


@dataclass(frozen=True)
class AlgorithmOptions:
    """Options of a collective algorithm; None: the algorithm's default.

    segments: number of segments of a pipelined algorithm. groups: number of ranks per node, for hierarchical
    algorithms. dims: sides of the grid, such as (4, 4), for tori and meshes.
    """

    segments: int | None = None
    groups: int | None = None
    dims: tuple[int, ...] | None = None

    def describe(self) -> str:
        """Return text with all options that are not None, such as `8 segments`, `nodes of 4` or `4x4`; empty if all
        options are None."""
        words = [f"{self.segments} segments" if self.segments else "", f"nodes of {self.groups}" if self.groups else ""]
        return ", ".join(part for part in [*words, "x".join(map(str, self.dims or ()))] if part)


@dataclass(frozen=True)
class Candidate:
    """A collective algorithm with its options, and its time for one size of the vector.

    algorithm: name, such as "ring". settings: the options. seconds: simulated time. closed_form_seconds: time by the
    algorithm's formula; None if there is no formula.
    """

    algorithm: str
    settings: AlgorithmOptions
    seconds: float
    closed_form_seconds: float | None


@dataclass(frozen=True)
class Choice:
    """Algorithms of one collective operation, ranked by simulated time for one size of the vector.

    Attributes:
        ranking: Candidates, fastest first.
        refused: {algorithm that does not accept the number of ranks: reason}.
        left_out: Algorithms that were not simulated, because their closed-form time is much longer than the best time.
        reason: Sentence on why the fastest candidate is the fastest.
    """

    ranking: tuple[Candidate, ...]
    refused: dict[str, str]
    left_out: tuple[str, ...]
    reason: str

    @property
    def best(self) -> Candidate:
        """Fastest candidate of the ranking."""
        return self.ranking[0]


@dataclass
class Chooser:
    """Chooser of the fastest algorithm of one collective operation on one network, by simulation; caches generated
    programs.

    Attributes:
        operation: Such as "all-reduce".
        network: Network that the programs run on.
        root: Source or destination rank.
        reduce_bytes_per_second: Rate of local reductions (default: infinite).
        requested: Options given by the user, which take precedence over defaults from the network (such as its ranks
            per node).
        _simulators: {(algorithm, options): simulator}.
        _refused: {algorithm that does not accept the number of ranks: reason}.
        _settings: {algorithm: its options on this network}.
    """

    operation: str
    network: Network
    root: int = 0
    reduce_bytes_per_second: float = float("inf")
    requested: AlgorithmOptions = AlgorithmOptions()
    _simulators: dict[tuple[str, AlgorithmOptions], CollectiveSimulator] = field(default_factory=dict)
    _refused: dict[str, str] = field(default_factory=dict)
    _settings: dict[str, AlgorithmOptions] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise UserError for an unknown operation or a root that is no rank of the network."""
        if self.operation not in OPERATIONS:
            raise UserError(unknown("operation", self.operation, OPERATIONS))
        if not 0 <= self.root < self.network.ranks:
            raise UserError(f"{self.operation}: root {self.root} is not one of ranks 0 to {self.network.ranks - 1}")
        for algorithm in ALGORITHMS[self.operation]:
            self._settings[algorithm] = self.resolve_settings(algorithm)

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Names of the operation's algorithms, without algorithms that are known not to accept the network's number of
        ranks."""
        return tuple(name for name in self._settings if name not in self._refused)

    def choose(self, total_bytes: float) -> Choice:
        """Simulate the operation's algorithms for a vector of `total_bytes` bytes and return them ranked by time.
        Algorithms of equal time keep the order in which the table `ALGORITHMS` lists them.

        An algorithm whose simulation is expensive is left out if its closed-form time (by formula) is much longer than
        the best time so far. Raises UserError if no algorithm accepts the number of ranks.
        """
        found: list[Candidate] = []
        left_out: list[str] = []
        inner, outer = self.network.tiers
        near = 1.5 if inner == outer else 2.5  # closed forms are less accurate with two tiers of links
        for algorithm in sorted(self.algorithms, key=lambda name: self.compute_closed_form(name, total_bytes)):
            best = min((one.seconds for one in found), default=float("inf"))
            segments = self._list_settings(algorithm, total_bytes)[0].segments or 1
            costly = self.network.ranks > _MANY_RANKS or segments > _MANY_SEGMENTS
            if costly and self.compute_closed_form(algorithm, total_bytes) > near * best:
                left_out.append(algorithm)
            elif (candidate := self.find_candidate(algorithm, total_bytes, near=_NEAR_BEST * best)) is not None:
                found.append(candidate)
        if not found:
            raise UserError(
                f"{self.operation} auto: no algorithm takes {self.network.ranks} ranks: "
                + "; ".join(self._refused.values())
            )
        place = {name: number for number, name in enumerate(ALGORITHMS[self.operation])}
        found.sort(key=lambda one: (float(f"{one.seconds:.9g}"), place[one.algorithm]))
        return Choice(tuple(found), dict(self._refused), tuple(left_out), self._explain_choice(found, total_bytes))

    def find_candidate(self, algorithm: str, total_bytes: float, near: float = 0.0) -> Candidate | None:
        """Simulate an algorithm with its best options on a vector of `total_bytes` bytes; return the candidate
        (algorithm, options, time), or None if the algorithm does not accept the network's number of ranks.

        A pipelined algorithm is simulated with the number of segments k for which its formula gives the lowest time.
        The formula is approximate: if the simulated time is at most `near` seconds, k/2 and 2k segments are simulated
        too. near: 0 (default): only k is simulated.
        """
        first, *others = self._list_settings(algorithm, total_bytes)
        best = self._simulate_candidate(algorithm, first, total_bytes)
        if best is None or best.seconds > near:
            return best
        for settings in others:
            other = self._simulate_candidate(algorithm, settings, total_bytes)
            if other is not None and other.seconds < best.seconds:
                return other
        return best

    def _simulate_candidate(self, algorithm: str, settings: AlgorithmOptions, total_bytes: float) -> Candidate | None:
        """Simulate an algorithm with the options `settings` for a vector of `total_bytes` bytes; return the candidate
        (algorithm, options, time), or None if the algorithm does not accept the network's number of ranks."""
        simulator = self._get_simulator(algorithm, settings)
        if simulator is None:
            return None
        form = self._compute_form(algorithm, settings, total_bytes)
        return Candidate(algorithm, settings, simulator.run(total_bytes).seconds, form)

    def compute_closed_form(self, algorithm: str, total_bytes: float) -> float:
        """Return the seconds of an algorithm for a vector of `total_bytes` bytes by its closed form (formula), with the
        options for which this time is lowest; infinite if the algorithm has no formula."""
        form = self._compute_form(algorithm, self._list_settings(algorithm, total_bytes)[0], total_bytes)
        return float("inf") if form is None else form

    def compute_lower_bound(self, total_bytes: float) -> float:
        """Return a lower bound in seconds of the time that any program for this operation needs on this network for a
        vector of `total_bytes` bytes."""
        return compute_lower_bound_seconds(self.operation, self.network, total_bytes, self.root)

    def resolve_settings(self, algorithm: str) -> AlgorithmOptions:
        """Return the options with which to generate an algorithm's program: each option as requested by the user, else
        the default from the network (such as its ranks per node), else None (the algorithm's default)."""
        has, n = list_options(self.operation, algorithm), self.network.ranks
        suggested = self.network.ranks_per_node
        groups = self.requested.groups or (suggested if 1 < (suggested or 0) < n else None)
        dims = self.requested.dims or self.network.dims
        wanted = 2 if algorithm.startswith("2d") else 3 if algorithm.startswith("3d") else len(dims or ())
        return AlgorithmOptions(
            self.requested.segments if "segments" in has else None,
            groups if "groups" in has else None,
            dims if "dims" in has and dims and len(dims) == wanted else None,
        )

    def _list_settings(self, algorithm: str, total_bytes: float) -> list[AlgorithmOptions]:
        """Return the options of an algorithm to simulate for a vector of `total_bytes` bytes, the best by formula
        first.

        For a pipelined algorithm without a requested number of segments: the power of two k with the lowest time by
        formula, then k/2 and 2k. For any other algorithm: a single entry.
        """
        settings = self._settings[algorithm]
        if "segments" not in list_options(self.operation, algorithm) or settings.segments is not None:
            return [settings]
        most = max(1, min(MAX_SEGMENTS, int(total_bytes)))
        tried = [replace(settings, segments=1 << bit) for bit in range(most.bit_length())]
        forms = [self._compute_form(algorithm, one, total_bytes) or 0.0 for one in tried]
        best = forms.index(min(forms))
        return [tried[best], *tried[max(0, best - 1) : best], *tried[best + 1 : best + 2]]

    def _compute_form(self, algorithm: str, settings: AlgorithmOptions, total_bytes: float) -> float | None:
        """Return the seconds of an algorithm for a vector of `total_bytes` bytes by its closed form (formula), with the
        options `settings`; None if the algorithm has no formula for this number of ranks."""
        try:
            return compute_closed_form_seconds(self.operation, algorithm, self.network, total_bytes, **asdict(settings))
        except UserError:  # the generator reports it with more detail
            return None

    def generate_program(self, algorithm: str, settings: AlgorithmOptions) -> CollectiveProgram:
        """Generate the program (steps of every rank) of an algorithm with the options `settings` for the network's
        number of ranks."""
        return generate(self.operation, algorithm, self.network.ranks, root=self.root, **asdict(settings))

    def _get_simulator(self, algorithm: str, settings: AlgorithmOptions) -> CollectiveSimulator | None:
        """Return the cached simulator of an algorithm with the options `settings`; None if the algorithm does not
        accept the network's number of ranks (the reason is then stored in `_refused`)."""
        key = (algorithm, settings)
        if key not in self._simulators:
            try:
                program = self.generate_program(algorithm, settings)
            except UserError as error:
                self._refused[algorithm] = str(error)
                return None
            self._simulators[key] = CollectiveSimulator(
                MatchedCollective.from_program(program), self.network, self.reduce_bytes_per_second
            )
        return self._simulators[key]

    def _explain_choice(self, ranking: list[Candidate], total_bytes: float) -> str:
        """Return a sentence on why the fastest algorithm is the fastest: its time, the share of latency in this time,
        and the second-fastest algorithm.

        ranking: candidates, fastest first. total_bytes: size of the vector in bytes.
        """
        best = ranking[0]
        simulator = self._get_simulator(best.algorithm, best.settings)
        assert simulator is not None
        if best.seconds == 0:
            return "nothing has to move"
        latency = simulator.run(0.0).seconds / best.seconds
        share = f"{latency:.0%} of its time is latency" if latency >= 0.5 else f"{1 - latency:.0%} of its time is bytes"
        why = "the number of rounds matters" if latency >= 0.5 else "the bytes over each link matter"
        bound = self.compute_lower_bound(total_bytes)
        near = f", {best.seconds / bound:.3g} times the lower bound" if bound else ""
        text = f"{best.algorithm} takes {format_seconds(best.seconds)}{near}; {share}, so {why}"
        slower = [one for one in ranking[1:] if one.seconds > best.seconds * (1 + 1e-9)]
        equals = [one.algorithm for one in ranking[1:] if one not in slower]
        text += f"; as fast: {', '.join(equals)}" if equals else ""
        if slower:
            times = slower[0].seconds / best.seconds
            text += (
                f"; next is {slower[0].algorithm} with {format_seconds(slower[0].seconds)} ({times:.3g} times as long)"
            )
        return text
