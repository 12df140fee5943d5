"""Addresses and network interfaces of this host, by which ranks on several hosts reach each other.

    python -m meshwright.launcher.hosts HOST             # this host's own address on the route to HOST
    python -m meshwright.launcher.hosts --is-here HOST   # true if HOST is this host, else false

Free of torch.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.launcher.rendezvous import RendezvousInfo, parse_host_and_port

_ELSEWHERE = "198.51.100.1"  # TEST-NET-2 of RFC 5737: reserved, so that only the default route leads there
_GET_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR of netdevice(7)


def resolve_addresses(host: str) -> list[str]:
    """Return the IP addresses of a host name or address. `UserError` if the name is unknown."""
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except OSError as error:
        raise UserError(f'host "{host}" cannot be resolved ({error.strerror or error})') from None
    return [str(address[0]) for *_, address in found]


def find_address_towards(host: str) -> str:
    """Return this host's own IP address on the network route to `host` (name or address); if `host` is this host, the
    address to which `host` resolves. `UserError` if there is no route."""
    reasons = []
    for address in resolve_addresses(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))  # sends nothing: the kernel chooses a route
            except OSError as error:
                reasons.append(error.strerror or str(error))
                continue
            return str(probe.getsockname()[0])
    raise UserError(f"no route to {host}: {reasons[0].lower()}")


def find_default_address() -> str | None:
    """Return this host's own IP address on its default network route; None if there is no default route."""
    try:
        return find_address_towards(_ELSEWHERE)
    except UserError:
        return None


def is_loopback(address: str) -> bool:
    """Return True if an IP address is a loopback address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_this_host(host: str) -> bool:
    """Return True if a host, given by name or address, is this host."""
    return any(is_loopback(address) or find_interface(address) is not None for address in resolve_addresses(host))


def is_own_name(host: str) -> bool:
    """Return True if `host` is this host's own name, with or without its domain."""
    return host.lower().partition(".")[0] == socket.gethostname().lower().partition(".")[0] != "localhost"


def find_interface(address: str) -> str | None:
    """Return the name of this host's network interface that has the IP address `address` (for IPv4: as its primary
    address), None if no interface has it."""
    names = [name for _, name in socket.if_nameindex()]
    if is_loopback(address):
        return next((name for name in names if name in ("lo", "lo0")), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), _GET_INTERFACE_ADDRESS, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    with suppress(OSError, ValueError):  # Linux: address, index, prefix, scope, flags, name
        wanted = ipaddress.IPv6Address(address.partition("%")[0])
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            if int(digits, 16) == int(wanted):
                return name
    return None


def agree_on_interface(info: RendezvousInfo, store: Any) -> str | None:
    """Find the network interface through which gloo reaches the ranks on other hosts; return its name, None if unknown.
    Collective: every rank that torchrun, Kubernetes or SLURM started calls it.

    info: this rank and its rendezvous. store: key-value store that all ranks share. (By default gloo uses the interface
    to which this host's own name resolves, which is often the loopback interface.)
    """
    if info.method.startswith("file://"):
        return None
    meeting = parse_host_and_port(info.method)[0]
    mine, there = find_address_towards(meeting), resolve_addresses(meeting)[0]
    # On the rendezvous host its name may resolve to loopback: the other ranks know its real address.
    store.set(f"meshwright/meeting/{info.rank}", "" if is_loopback(mine) else there)
    if is_loopback(mine):
        found = store.multi_get([f"meshwright/meeting/{rank}" for rank in range(info.ranks)])
        mine = next((address.decode() for address in found if address), mine)
    return find_interface(mine)


def main(arguments: list[str]) -> int:
    """Print a host's address for a launch script, and return the exit code: 0, or 2 after an error line.

    arguments: [HOST] prints this host's IP address on the network route to HOST; ["--is-here", HOST] prints "true" if
    HOST is this host, else "false".
    """
    try:
        if arguments[0] == "--is-here":
            print(str(is_this_host(arguments[1])).lower())
            return 0
        address = find_address_towards(arguments[0])
        if is_loopback(address) and is_own_name(arguments[0]):  # Debian maps it to 127.0.1.1
            address = find_default_address() or address
        if is_loopback(address):
            raise UserError(
                f"MASTER_ADDR={arguments[0]} is a loopback address of this host ({address}): give the address by "
                "which the other hosts reach it"
            )
        print(address)
        return 0
    except UserError as error:
        print(f"meshwright: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
