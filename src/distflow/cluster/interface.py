"""Finds the address of this host that the other workers connect to. Imports no torch."""

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path

from distflow.errors import ConfigError, cut, suggest
from distflow.util.addresses import address_towards

INTERFACE = "DISTFLOW_INTERFACE"  # environment variable: name of an interface, or an address of this host
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"  # where gloo and NCCL look for the same


def own_address(master: str, several_hosts: bool) -> str:
    """Returns the address of DISTFLOW_INTERFACE, by default the one from which this host reaches `master`.

    `several_hosts`: the launcher says that there are workers on other hosts, or does not say.
    """
    chosen = os.environ.get(INTERFACE)
    if chosen:
        return _chosen_address(chosen)
    address = address_towards(master)
    if address and (not is_loopback(address) or is_loopback(master) or not several_hosts):
        return address
    # The name of rank 0's host, which Debian maps to a loopback address there: 127.0.1.1.
    for candidate in addresses().values():
        if not is_loopback(candidate):
            return candidate
    return address or "127.0.0.1"


def export_interface(address: str) -> None:
    """Tells gloo to use the interface of `address`, unless the environment already does, and NCCL if it was chosen.

    Else NCCL chooses: the way to the master may be a slow one, beside networks that are for GPUs.
    """
    name = next((n for n, a in addresses().items() if a == address), None)
    for variable in (_GLOO, *([_NCCL] if os.environ.get(INTERFACE) else ())) if name else ():
        os.environ.setdefault(variable, str(name))


def addresses() -> dict[str, str]:
    """Returns the first address of each interface that has one; loopback comes last."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                siocgifaddr = 0xC0206921 if sys.platform == "darwin" else 0x8915
                found[name] = socket.inet_ntoa(fcntl.ioctl(s.fileno(), siocgifaddr, request)[20:24])
    for name, address in _ipv6_addresses():
        found.setdefault(name, address)
    return dict(sorted(found.items(), key=lambda item: is_loopback(item[1])))


def is_loopback(host: str) -> bool:
    """Returns whether this is `localhost`, or an address of the loopback interface."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _ipv6_addresses() -> list[tuple[str, str]]:
    """Returns interface and address from Linux's list, without addresses that are valid on one link only."""
    with contextlib.suppress(OSError):
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return [(row[5], str(ipaddress.ip_address(bytes.fromhex(row[0])))) for row in rows if row[3] != "20"]
    return []


def _chosen_address(chosen: str) -> str:
    known = addresses()
    if chosen in known:
        return known[chosen]
    try:
        address = ipaddress.ip_address(chosen)
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as s:
            s.bind((chosen, 0))
    except ValueError:
        raise ConfigError(
            f"{INTERFACE}: {socket.gethostname()} has no interface '{cut(chosen)}' with an address"
            f"{suggest(chosen, [*known, *known.values()])}"
        ) from None
    except OSError as e:
        reason = "is no address of this host" if e.errno == errno.EADDRNOTAVAIL else e.strerror
        raise ConfigError(
            f"{INTERFACE}: {chosen} {reason} ({socket.gethostname()})"
            f"; set it on each host to one of its own: {', '.join(f'{n} {a}' for n, a in known.items())}"
        ) from None
    return chosen
