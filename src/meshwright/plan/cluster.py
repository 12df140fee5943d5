"""What a plan is for: so many devices of a kind, in nodes, and the links inside and between them."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.errors import UserError
from meshwright.plan.devices import Device


@dataclass(frozen=True, slots=True)
class Link:
    """A way between devices. ``bandwidth``: bytes a second, one direction, per device; ``latency``: seconds."""

    bandwidth: float
    latency: float  # seconds of one message


@dataclass(frozen=True, slots=True)
class Measured:
    """What `meshwright probe` found on a machine."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """``devices`` of a kind, ``devices_per_node`` of them in each node: those that ``inside`` connects (a scale-up
    domain, which may be more than one machine); ``across`` connects nodes. ``measured`` is None for a catalogue's."""

    name: str
    device: Device
    devices: int
    devices_per_node: int
    inside: Link
    across: Link
    measured: Measured | None = None

    def peak(self, precision: str) -> float:
        """Dense peak of one device, FLOP/s. `UserError` for a precision that it lacks."""
        peak = self.device.peak(precision)
        if peak is None:
            raise UserError(f"{self.device.name} has no {precision} units, or no figure for them is known")
        return peak

    @property
    def nodes(self) -> int:
        return self.devices // self.devices_per_node
