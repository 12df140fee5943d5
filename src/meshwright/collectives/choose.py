"""Chooses an algorithm for an operation, a size and a network, by simulating all that can do it.

What is best depends on all three: few rounds win for small vectors, few bytes for large ones, and on links that are
shared or of two kinds it matters between whom the bytes go.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.collectives.bounds import lower_bound_seconds
from meshwright.collectives.cost import closed_form_seconds
from meshwright.collectives.library import ALGORITHMS, generate, options
from meshwright.collectives.quantities import show_seconds
from meshwright.errors import UserError
from meshwright.names import OPERATIONS, unknown
from meshwright.program.collective import CollectiveProgram
from meshwright.program.network import Network
from meshwright.program.simulate_collective import CollectiveSimulator, UncheckedCollective

MOST_SEGMENTS = 256
_WORTH_TRYING = 1.2  # times the best: what another number of segments may gain
_MANY_RANKS, _MANY_SEGMENTS = 64, 16  # beyond, only what is near the best by its closed form is simulated


@dataclass(frozen=True)
class Settings:
    """What `generate` gets beside operation, algorithm, ranks and root."""

    segments: int | None = None
    groups: int | None = None
    dims: tuple[int, ...] | None = None

    def describe(self) -> str:
        """`8 segments`, `nodes of 4`, `4x4`, or nothing."""
        said = [f"{self.segments} segments" if self.segments else "", f"nodes of {self.groups}" if self.groups else ""]
        return ", ".join(part for part in [*said, "x".join(map(str, self.dims or ()))] if part)


@dataclass(frozen=True)
class Candidate:
    """An algorithm and what it takes for one size."""

    algorithm: str
    settings: Settings
    seconds: float
    closed_form_seconds: float | None


@dataclass(frozen=True)
class Choice:
    """ranking: best first. refused: algorithms that cannot do it, with the reason. left_out: those whose closed form
    alone was far from the best. reason: why the best is the best, in a sentence."""

    ranking: tuple[Candidate, ...]
    refused: dict[str, str]
    left_out: tuple[str, ...]
    reason: str

    @property
    def best(self) -> Candidate:
        return self.ranking[0]


def auto(operation: str, network: Network, total_bytes: float, root: int = 0) -> Choice:
    """The fastest algorithm of the library for a vector of `total_bytes`, with all others in their order."""
    return Chooser(operation, network, root).choose(total_bytes)


@dataclass
class Chooser:
    """Times the algorithms of one operation on one network; programs are generated once for all sizes."""

    operation: str
    network: Network
    root: int = 0
    reduce_bytes_per_second: float = float("inf")
    said: Settings = Settings()
    _simulators: dict[tuple[str, Settings], CollectiveSimulator] = field(default_factory=dict)
    _refused: dict[str, str] = field(default_factory=dict)
    _settings: dict[str, Settings] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise UserError(unknown("operation", self.operation, OPERATIONS))
        if not 0 <= self.root < self.network.ranks:
            raise UserError(f"{self.operation}: root {self.root} is not one of ranks 0 to {self.network.ranks - 1}")
        for algorithm in ALGORITHMS[self.operation]:
            self._settings[algorithm] = self.fitting(algorithm)

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Those that have not been found to refuse so many ranks."""
        return tuple(name for name in self._settings if name not in self._refused)

    def choose(self, total_bytes: float) -> Choice:
        """Simulate, and rank by time; equals stay in the order of the library."""
        found: list[Candidate] = []
        left_out: list[str] = []
        inner, outer = self.network.tiers
        near = 1.5 if inner == outer else 2.5  # closed forms know one kind of links only
        for algorithm in sorted(self.algorithms, key=lambda name: self.closed_form(name, total_bytes)):
            best = min((one.seconds for one in found), default=float("inf"))
            segments = self._to_try(algorithm, total_bytes)[0].segments or 1
            costly = self.network.ranks > _MANY_RANKS or segments > _MANY_SEGMENTS
            if costly and self.closed_form(algorithm, total_bytes) > near * best:
                left_out.append(algorithm)
            elif (candidate := self.candidate(algorithm, total_bytes, near=_WORTH_TRYING * best)) is not None:
                found.append(candidate)
        if not found:
            raise UserError(
                f"{self.operation} auto: no algorithm takes {self.network.ranks} ranks: "
                + "; ".join(self._refused.values())
            )
        place = {name: number for number, name in enumerate(ALGORITHMS[self.operation])}
        found.sort(key=lambda one: (float(f"{one.seconds:.9g}"), place[one.algorithm]))
        return Choice(tuple(found), dict(self._refused), tuple(left_out), self._reason(found, total_bytes))

    def candidate(self, algorithm: str, total_bytes: float, near: float = 0.0) -> Candidate | None:
        """The algorithm as it is best for a size, or None where it refuses.

        A pipeline has as many segments as its closed form likes best; if that takes no more than `near` seconds, half
        as many are tried too, and twice as many where half is no gain.
        """
        first, *others = self._to_try(algorithm, total_bytes)
        best = self._timed(algorithm, first, total_bytes)
        if best is None or best.seconds > near:
            return best
        for settings in others:
            other = self._timed(algorithm, settings, total_bytes)
            if other is not None and other.seconds < best.seconds:
                return other
        return best

    def _timed(self, algorithm: str, settings: Settings, total_bytes: float) -> Candidate | None:
        simulator = self._simulator(algorithm, settings)
        if simulator is None:
            return None
        form = self._form(algorithm, settings, total_bytes)
        return Candidate(algorithm, settings, simulator.run(total_bytes).seconds, form)

    def program(self, candidate: Candidate) -> CollectiveProgram:
        """The program of a candidate, as generated."""
        return self._generate(candidate.algorithm, candidate.settings)

    def closed_form(self, algorithm: str, total_bytes: float) -> float:
        """Seconds by the settings that it likes best; infinite for an algorithm that refuses."""
        form = self._form(algorithm, self._to_try(algorithm, total_bytes)[0], total_bytes)
        return float("inf") if form is None else form

    def lower_bound(self, total_bytes: float) -> float:
        return lower_bound_seconds(self.operation, self.network, total_bytes, self.root)

    def fitting(self, algorithm: str) -> Settings:
        """Nodes and sides: as said, else as the network has them, else left to the generator."""
        has, n = options(self.operation, algorithm), self.network.ranks
        groups = self.said.groups or (self.network.groups if 1 < (self.network.groups or 0) < n else None)
        dims = self.said.dims or self.network.dims
        wanted = 2 if algorithm.startswith("2d") else 3 if algorithm.startswith("3d") else len(dims or ())
        return Settings(
            self.said.segments if "segments" in has else None,
            groups if "groups" in has else None,
            dims if "dims" in has and dims and len(dims) == wanted else None,
        )

    def _to_try(self, algorithm: str, total_bytes: float) -> list[Settings]:
        """Settings for a size; of several, the one that the closed form likes best comes first."""
        settings = self._settings[algorithm]
        if "segments" not in options(self.operation, algorithm) or settings.segments is not None:
            return [settings]
        most = max(1, min(MOST_SEGMENTS, int(total_bytes)))
        tried = [self._in_segments(settings, 1 << bit) for bit in range(most.bit_length())]
        forms = [self._form(algorithm, one, total_bytes) or 0.0 for one in tried]
        best = forms.index(min(forms))
        return [tried[best], *tried[max(0, best - 1) : best], *tried[best + 1 : best + 2]]

    @staticmethod
    def _in_segments(settings: Settings, segments: int) -> Settings:
        return Settings(segments, settings.groups, settings.dims)

    def _form(self, algorithm: str, settings: Settings, total_bytes: float) -> float | None:
        try:
            return closed_form_seconds(
                self.operation,
                algorithm,
                self.network,
                total_bytes,
                segments=settings.segments,
                groups=settings.groups,
                dims=settings.dims,
            )
        except UserError:  # the generator says it better
            return None

    def _generate(self, algorithm: str, settings: Settings) -> CollectiveProgram:
        return generate(
            self.operation,
            algorithm,
            self.network.ranks,
            root=self.root,
            segments=settings.segments,
            groups=settings.groups,
            dims=settings.dims,
        )

    def _simulator(self, algorithm: str, settings: Settings) -> CollectiveSimulator | None:
        key = (algorithm, settings)
        if key not in self._simulators:
            try:
                program = self._generate(algorithm, settings)
            except UserError as error:
                self._refused[algorithm] = str(error)
                return None
            self._simulators[key] = CollectiveSimulator(
                UncheckedCollective.from_program(program), self.network, self.reduce_bytes_per_second
            )
        return self._simulators[key]

    def _reason(self, ranking: list[Candidate], total_bytes: float) -> str:
        best = ranking[0]
        simulator = self._simulator(best.algorithm, best.settings)
        assert simulator is not None
        if best.seconds == 0:
            return "nothing has to move"
        latency = simulator.run(0.0).seconds / best.seconds
        share = f"{latency:.0%} of its time is latency" if latency >= 0.5 else f"{1 - latency:.0%} of its time is bytes"
        why = "few rounds count" if latency >= 0.5 else "few bytes over each link count"
        bound = self.lower_bound(total_bytes)
        near = f", {best.seconds / bound:.3g} times the lower bound" if bound else ""
        text = f"{best.algorithm} takes {show_seconds(best.seconds)}{near}; {share}, so that {why}"
        slower = [one for one in ranking[1:] if one.seconds > best.seconds * (1 + 1e-9)]
        equals = [one.algorithm for one in ranking[1:] if one not in slower]
        text += f"; as fast: {', '.join(equals)}" if equals else ""
        if slower:
            times = slower[0].seconds / best.seconds
            text += (
                f"; next is {slower[0].algorithm} with {show_seconds(slower[0].seconds)} ({times:.3g} times as long)"
            )
        return text
