"""Refuse connections to other machines, in the process of the tests and in every Python process that they start.

``sitecustomize.py`` calls :func:`refuse` where this folder is on PYTHONPATH. Code that is not Python's is not seen.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

ASKED: list[str] = []  # machines that this process wanted to speak to
_LOCAL = {None, "", "localhost", socket.gethostname()}


def is_here(host: Any) -> bool:
    """Say whether a name or an address is that of this machine."""
    if isinstance(host, bytes):
        host = host.decode(errors="replace")
    if host in _LOCAL:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def check(host: Any) -> None:
    """Raise what an unplugged cable would, unless the machine is this one."""
    if not is_here(host):
        ASKED.append(str(host))
        raise OSError(101, f"tests use no network, and something asked for '{host}'")


def refuse() -> None:
    """Replace what opens connections and looks names up."""
    if getattr(socket, "refused", False):
        return
    socket.refused = True  # type: ignore[attr-defined]
    for name in ("connect", "connect_ex"):
        inner = getattr(socket.socket, name)

        def guarded(self: socket.socket, address: Any, inner: Any = inner) -> Any:
            if self.family in (socket.AF_INET, socket.AF_INET6):
                check(address[0])
            return inner(self, address)

        setattr(socket.socket, name, guarded)
    look_up = socket.getaddrinfo

    def names(host: Any, *args: Any, **kwargs: Any) -> Any:
        check(host)
        return look_up(host, *args, **kwargs)

    socket.getaddrinfo = names
