"""Addresses of the form HOST:PORT."""

from __future__ import annotations

import re

from fedflat.errors import UserError


def host_and_port(address: str, expected: str = "HOST:PORT") -> tuple[str, int]:
    """Split an address, whose host may be in brackets (IPv6).

    Raises ``UserError`` for another text; ``expected`` completes its message.

    >>> host_and_port("server.example.org:8443"), host_and_port("[::1]:8000")
    (('server.example.org', 8443), ('::1', 8000))
    """
    match = re.fullmatch(r"\[?([^\s/\[\]]+)\]?:([0-9]{1,5})", address)
    if match is None or int(match[2]) >= 2**16:
        raise UserError(f"{address!r} is not an address; expected {expected}")
    return match[1], int(match[2])
