"""Text notation of networks: `switch`, `torus:4x4`, `nodes:2x8,inner=450GB/s,3us,outer=50GB/s,10us,rails`.

A name, the shape after a colon, then settings. Bandwidth and latency of a tier of links follow its name (`inner=`,
`outer=`, `link=`), in either order; `link=` may be omitted if there is one tier.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.collectives import networks
from meshwright.collectives.grid import find_nearly_cubic, resolve_ranks_per_node
from meshwright.collectives.networks import BANDWIDTH, INNER_BANDWIDTH, INNER_LATENCY, LATENCY
from meshwright.collectives.quantities import (
    format_exact_rate,
    format_exact_seconds,
    is_rate,
    parse_rate,
    parse_seconds,
)
from meshwright.errors import UserError
from meshwright.names import unknown
from meshwright.program.network import Network


@dataclass(frozen=True)
class _TopologySyntax:
    """Syntax of the text form of one kind of topology, such as a torus: the settings that may follow its name and
    shape.

    Attributes:
        example: Valid text, such as `torus:4x4`, for error messages.
        tiers: Names of classes of links whose latency and bandwidth can be set.
        numbers: Names of settings with a number, such as `spines` for `spines=2`.
        flags: Words without a value, such as `rails`.
    """

    example: str
    tiers: tuple[str, ...] = ("link",)
    numbers: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


TOPOLOGIES = {
    "switch": _TopologySyntax("switch,25GB/s,5us"),
    "ring": _TopologySyntax("ring,25GB/s,5us"),
    "full-mesh": _TopologySyntax("full-mesh,25GB/s,5us"),
    "torus": _TopologySyntax("torus:4x4,25GB/s,1us"),
    "mesh": _TopologySyntax("mesh:4x4,25GB/s,1us"),
    "nodes": _TopologySyntax(
        "nodes:2x8,inner=450GB/s,3us,outer=50GB/s,10us,rails", ("inner", "outer"), ("adapters",), ("rails",)
    ),
    "spine-leaf": _TopologySyntax("spine-leaf:4x8,oversubscription=4", numbers=("oversubscription", "spines")),
}


@dataclass
class _TopologySettings:
    """Settings parsed from a topology's text. A setting that the text does not give has no entry.

    Attributes:
        latency: {class of links, such as "inner" or "outer": seconds}.
        bandwidth: {class of links: bytes per second}.
        numbers: {name of another setting: its number}, as given by NAME=NUMBER.
        flags: Words without a value, such as "rails".
    """

    latency: dict[str, float]
    bandwidth: dict[str, float]
    numbers: dict[str, float]
    flags: set[str]


def parse_topology(text: str, ranks: int, latency: float | None = None, bandwidth: float | None = None) -> Network:
    """Build the network for `ranks` ranks that a text such as `torus:4x4,25GB/s,1us` describes.

    latency (seconds), bandwidth (bytes per second): values for links whose values the text does not give (None:
    built-in defaults); links inside nodes always have built-in defaults. Raises UserError, which names a valid
    alternative.
    """
    name, colon, shape = text.split(",")[0].partition(":")
    name = name.strip()
    if name not in TOPOLOGIES:
        raise UserError(f"topology: {unknown('name', name, TOPOLOGIES)}")
    kind = TOPOLOGIES[name]
    if ranks < 1:
        raise UserError(f"topology {text}: {ranks} ranks; there must be at least 1")
    settings = _parse_settings(text, name, kind)
    for tier in kind.tiers:
        inner = tier == "inner"
        settings.latency.setdefault(tier, INNER_LATENCY if inner else LATENCY if latency is None else latency)
        settings.bandwidth.setdefault(tier, INNER_BANDWIDTH if inner else BANDWIDTH if bandwidth is None else bandwidth)
    if colon and name not in _SHAPED:
        raise UserError(f'topology {name} has no shape: omit ":{shape}"')
    if name in _SHAPED:
        network = _SHAPED[name](_parse_sides(name, shape, ranks), settings)
    else:
        network = _UNIFORM[name](ranks, settings.latency["link"], settings.bandwidth["link"])
    tiers = [
        f"{tier + '=' if len(kind.tiers) > 1 else ''}{format_exact_rate(settings.bandwidth[tier])},"
        f"{format_exact_seconds(settings.latency[tier])}"
        for tier in kind.tiers
    ]
    head, *rest = network.name.split(",")
    return replace(network, name=",".join([head, *tiers, *rest]))


def _parse_settings(text: str, name: str, kind: _TopologySyntax) -> _TopologySettings:
    """Parse the settings in a topology's text, such as `25GB/s,1us`.

    text: text of the whole topology, such as `torus:4x4,25GB/s,1us`. name: name of the topology, for error messages.
    kind: settings that this topology accepts. Raises UserError for an unknown or invalid setting.
    """
    settings = _TopologySettings({}, {}, {}, set())
    tier = kind.tiers[0] if len(kind.tiers) == 1 else ""
    keys = (*kind.tiers, *kind.numbers)
    for item in text.split(",")[1:]:
        key, equals, value = (part.strip() for part in item.partition("="))
        where = f"topology {name}: {key}" if equals else f"topology {name}"
        if equals and key not in keys:
            raise UserError(f"topology {name}: {unknown('setting', key, (*keys, *kind.flags))}")
        if equals and key in kind.numbers:
            settings.numbers[key] = _parse_number(value, where)
            continue
        if not equals and key in kind.flags:
            settings.flags.add(key)
            continue
        tier, value = (key, value) if equals else (tier, key)
        if not value[:1].isdigit():
            raise UserError(f"topology {name}: {unknown('setting', value, (*keys, *kind.flags))}")
        if not tier:
            raise UserError(f"topology {name}: {value} of which links? For example {kind.example}")
        given = settings.bandwidth if is_rate(value) else settings.latency
        if tier in given:
            raise UserError(f"topology {name}: {tier} has two {'bandwidths' if is_rate(value) else 'latencies'}")
        given[tier] = parse_rate(value, where) if is_rate(value) else parse_seconds(value, where)
    return settings


def _parse_number(value: str, where: str) -> float:
    """Parse a number above 0 from the text `value`. where: prefix of the `UserError` for any other text."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise UserError(f'{where}: "{value}" is not a number above 0')
    return number


def _parse_sides(name: str, shape: str, ranks: int) -> tuple[int, ...]:
    """Parse the shape of a topology, such as `4x4`; return its sides, (4, 4), in the order of the text. For "nodes" the
    sides are (nodes, ranks per node), for "spine-leaf" (leaves, ranks per leaf). name: topology, such as "torus".
    shape: text; for "nodes" and "spine-leaf" a single number is the number of ranks per node or leaf. ranks: required
    product of the sides. Raises UserError for any other shape."""
    in_two = name in ("nodes", "spine-leaf")
    if in_two:
        size = resolve_ranks_per_node(name, ranks)
        right = f"{name}:{ranks // size}x{size}"
    else:
        right = f"{name}:{'x'.join(map(str, find_nearly_cubic(ranks, 2) or (1, ranks)))}"
    try:
        sides = tuple(int(side) for side in shape.strip().split("x"))
    except ValueError:
        sides = ()
    if not sides or min(sides) < 1:
        raise UserError(f'topology {name}: "{shape}" is not a shape; for {ranks} ranks, valid is {right}')
    if in_two and len(sides) == 1 and ranks % sides[0] == 0:
        sides = (ranks // sides[0], sides[0])
    if (in_two and len(sides) > 2) or math.prod(sides) != ranks:
        raise UserError(f"topology {name}: {shape} does not give {ranks} ranks; valid is {right}")
    return sides


def _build_nodes(sides: tuple[int, ...], settings: _TopologySettings) -> Network:
    """Build a network of nodes joined by an outer network.

    sides: (number of nodes, ranks per node). settings: latency and bandwidth of inner and outer links, number of
    adapters, and flags such as `rails`. Raises UserError for a number of adapters that is not allowed.
    """
    inner, outer = ((settings.latency[tier], settings.bandwidth[tier]) for tier in ("inner", "outer"))
    adapters = _get_whole_number(settings, "adapters")
    if adapters is not None and settings.flags:
        raise UserError("topology nodes: with rails every device has its own adapter; leave out adapters or rails")
    if adapters is not None and sides[1] % adapters:
        raise UserError(f"topology nodes: {adapters} adapters do not divide {sides[1]} devices of a node evenly")
    return networks.build_nodes(sides[0], sides[1], inner, outer, "rails" in settings.flags, adapters)


def _build_spine_leaf(sides: tuple[int, ...], settings: _TopologySettings) -> Network:
    """Build a spine-leaf network: leaf switches with ranks, joined by spine switches. sides: (leaves, ranks per leaf).
    settings: latency, bandwidth, oversubscription and number of spines."""
    oversubscription, spines = settings.numbers.get("oversubscription", 1.0), _get_whole_number(settings, "spines") or 1
    return networks.build_spine_leaf(
        sides[0], sides[1], settings.latency["link"], settings.bandwidth["link"], oversubscription, spines
    )


def _get_whole_number(settings: _TopologySettings, key: str) -> int | None:
    """Return the setting called `key`, such as `spines`, of a topology's parsed text (`settings`) as an integer; None
    if the text does not give it.

    Raises UserError for a fraction.
    """
    number = settings.numbers.get(key)
    if number is not None and number != int(number):
        raise UserError(f"topology: {key}={number:g} is not a whole number")
    return None if number is None else int(number)


_UNIFORM = {"switch": networks.build_switch, "ring": networks.build_ring, "full-mesh": networks.build_full_mesh}
_SHAPED: dict[str, Callable[[tuple[int, ...], _TopologySettings], Network]] = {
    "torus": lambda sides, given: networks.build_torus(sides, given.latency["link"], given.bandwidth["link"]),
    "mesh": lambda sides, given: networks.build_mesh(sides, given.latency["link"], given.bandwidth["link"]),
    "nodes": _build_nodes,
    "spine-leaf": _build_spine_leaf,
}
