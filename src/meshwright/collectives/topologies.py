"""Networks in words: `switch`, `torus:4x4`, `nodes:2x8,inner=450GB/s,3us,outer=50GB/s,10us,rails`.

A name, the shape after a colon where there is one, then settings. Bandwidth and latency of a tier of links stand behind
its name (`inner=`, `outer=`, `link=`), in either order; where all links are alike, `link=` may be left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.collectives import networks
from meshwright.collectives.grid import nearly_cubic, ranks_per_node
from meshwright.collectives.networks import BANDWIDTH, INNER_BANDWIDTH, INNER_LATENCY, LATENCY
from meshwright.collectives.quantities import exact_rate, exact_seconds, is_rate, parse_rate, parse_seconds
from meshwright.errors import UserError
from meshwright.names import unknown
from meshwright.program.network import Network


@dataclass(frozen=True)
class _Kind:
    """What may be written after a topology's name, with an example."""

    example: str
    tiers: tuple[str, ...] = ("link",)
    numbers: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


TOPOLOGIES = {
    "switch": _Kind("switch,25GB/s,5us"),
    "ring": _Kind("ring,25GB/s,5us"),
    "full-mesh": _Kind("full-mesh,25GB/s,5us"),
    "torus": _Kind("torus:4x4,25GB/s,1us"),
    "mesh": _Kind("mesh:4x4,25GB/s,1us"),
    "nodes": _Kind(
        "nodes:2x8,inner=450GB/s,3us,outer=50GB/s,10us,rails", ("inner", "outer"), ("adapters",), ("rails",)
    ),
    "spine-leaf": _Kind("spine-leaf:4x8,oversubscription=4", numbers=("oversubscription", "spines")),
}


@dataclass
class _Settings:
    """What a text says, tier by tier: seconds and bytes a second where given."""

    latency: dict[str, float]
    bandwidth: dict[str, float]
    numbers: dict[str, float]
    flags: set[str]


def topology(text: str, ranks: int, latency: float | None = None, bandwidth: float | None = None) -> Network:
    """The network that a text names, for so many ranks.

    latency (seconds) and bandwidth (bytes a second) are those of links of which the text says nothing; inner links of
    nodes have their own defaults. Raises UserError with what would be right.
    """
    name, colon, shape = text.split(",")[0].partition(":")
    name = name.strip()
    if name not in TOPOLOGIES:
        raise UserError(f"topology: {unknown('name', name, TOPOLOGIES)}")
    kind = TOPOLOGIES[name]
    if ranks < 1:
        raise UserError(f"topology {text}: {ranks} ranks; there must be at least 1")
    settings = _settings(text, name, kind)
    for tier in kind.tiers:
        inner = tier == "inner"
        settings.latency.setdefault(tier, INNER_LATENCY if inner else LATENCY if latency is None else latency)
        settings.bandwidth.setdefault(tier, INNER_BANDWIDTH if inner else BANDWIDTH if bandwidth is None else bandwidth)
    if colon and name not in _SHAPED:
        raise UserError(f'topology {name} has no shape: leave ":{shape}" out')
    if name in _SHAPED:
        network = _SHAPED[name](_sides(name, shape, ranks), settings)
    else:
        network = _UNIFORM[name](ranks, settings.latency["link"], settings.bandwidth["link"])
    tiers = [
        f"{tier + '=' if len(kind.tiers) > 1 else ''}{exact_rate(settings.bandwidth[tier])},"
        f"{exact_seconds(settings.latency[tier])}"
        for tier in kind.tiers
    ]
    head, *rest = network.name.split(",")
    return replace(network, name=",".join([head, *tiers, *rest]))


def _settings(text: str, name: str, kind: _Kind) -> _Settings:
    settings = _Settings({}, {}, {}, set())
    tier = kind.tiers[0] if len(kind.tiers) == 1 else ""
    keys = (*kind.tiers, *kind.numbers)
    for item in text.split(",")[1:]:
        key, equals, value = (part.strip() for part in item.partition("="))
        where = f"topology {name}: {key}" if equals else f"topology {name}"
        if equals and key not in keys:
            raise UserError(f"topology {name}: {unknown('setting', key, (*keys, *kind.flags))}")
        if equals and key in kind.numbers:
            settings.numbers[key] = _number(value, where)
            continue
        if not equals and key in kind.flags:
            settings.flags.add(key)
            continue
        tier, value = (key, value) if equals else (tier, key)
        if not value[:1].isdigit():
            raise UserError(f"topology {name}: {unknown('setting', value, (*keys, *kind.flags))}")
        if not tier:
            raise UserError(f"topology {name}: {value} of which links? Right would be {kind.example}")
        given = settings.bandwidth if is_rate(value) else settings.latency
        if tier in given:
            raise UserError(f"topology {name}: {tier} has two {'bandwidths' if is_rate(value) else 'latencies'}")
        given[tier] = parse_rate(value, where) if is_rate(value) else parse_seconds(value, where)
    return settings


def _number(value: str, where: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise UserError(f'{where}: "{value}" is not a number above 0')
    return number


def _sides(name: str, shape: str, ranks: int) -> tuple[int, ...]:
    """The numbers after the colon, which multiply to the number of ranks; one number alone: ranks of a node or leaf."""
    in_two = name in ("nodes", "spine-leaf")
    if in_two:
        size = ranks_per_node(name, ranks)
        right = f"{name}:{ranks // size}x{size}"
    else:
        right = f"{name}:{'x'.join(map(str, nearly_cubic(ranks, 2) or (1, ranks)))}"
    try:
        sides = tuple(int(side) for side in shape.strip().split("x"))
    except ValueError:
        sides = ()
    if not sides or min(sides) < 1:
        raise UserError(f'topology {name}: "{shape}" is no shape; for {ranks} ranks, right would be {right}')
    if in_two and len(sides) == 1 and ranks % sides[0] == 0:
        sides = (ranks // sides[0], sides[0])
    if (in_two and len(sides) > 2) or math.prod(sides) != ranks:
        raise UserError(f"topology {name}: {shape} does not make {ranks} ranks; right would be {right}")
    return sides


def _torus(sides: tuple[int, ...], settings: _Settings) -> Network:
    return networks.torus(sides, settings.latency["link"], settings.bandwidth["link"])


def _mesh(sides: tuple[int, ...], settings: _Settings) -> Network:
    return networks.mesh(sides, settings.latency["link"], settings.bandwidth["link"])


def _nodes(sides: tuple[int, ...], settings: _Settings) -> Network:
    inner, outer = ((settings.latency[tier], settings.bandwidth[tier]) for tier in ("inner", "outer"))
    adapters = _whole(settings, "adapters")
    if adapters is not None and settings.flags:
        raise UserError(
            "topology nodes: with rails every device has an adapter of its own; leave out adapters or rails"
        )
    if adapters is not None and sides[1] % adapters:
        raise UserError(f"topology nodes: {adapters} adapters do not divide {sides[1]} devices of a node evenly")
    return networks.nodes(sides[0], sides[1], inner, outer, "rails" in settings.flags, adapters)


def _spine_leaf(sides: tuple[int, ...], settings: _Settings) -> Network:
    oversubscription, spines = settings.numbers.get("oversubscription", 1.0), _whole(settings, "spines") or 1
    return networks.spine_leaf(
        sides[0], sides[1], settings.latency["link"], settings.bandwidth["link"], oversubscription, spines
    )


def _whole(settings: _Settings, key: str) -> int | None:
    number = settings.numbers.get(key)
    if number is not None and number != int(number):
        raise UserError(f"topology: {key}={number:g} is not a whole number")
    return None if number is None else int(number)


_UNIFORM = {"switch": networks.switch, "ring": networks.ring, "full-mesh": networks.full_mesh}
_SHAPED: dict[str, Callable[[tuple[int, ...], _Settings], Network]] = {
    "torus": _torus,
    "mesh": _mesh,
    "nodes": _nodes,
    "spine-leaf": _spine_leaf,
}
