"""A preloaded SuperExec: torch, fedflat and Flower are imported once, and every message is handled by a fork.

Flower starts a new Python process for every message, which costs seconds each time. With ``--isolation process``,
``flower-supernode`` and ``flower-superlink`` do not start these processes, but wait for a separate SuperExec to do so.
``python -m fedflat.deploy.flower.warm HOST:PORT ...`` is such a SuperExec. It serves one or several nodes of one
machine, given the addresses of their Runtime APIs. For a SuperLink with TLS, use ``--tls HOST:PORT ca.crt``.
"""

from __future__ import annotations

import argparse
import sys

from fedflat.deploy.flower.address import host_and_port
from fedflat.deploy.flower.version import require_flower
from fedflat.errors import UserError


def main(arguments: list[str]) -> None:
    """Handle the tasks of the SuperNodes or SuperLinks at the given addresses until the process ends."""
    require_flower()
    options = _parser().parse_args(arguments)
    without_tls: dict[str, str | None] = dict.fromkeys(options.addresses)  # no certificate: None
    addresses = without_tls | dict(options.tls)  # address to certificate of the authority
    if not addresses:
        raise UserError("no address is given; expected those of Runtime APIs, for example 127.0.0.1:8100")
    for address in addresses:
        host_and_port(address, "that of a Runtime API, for example 127.0.0.1:8100")
    from fedflat.deploy.flower.forks import serve_addresses

    serve_addresses(addresses)


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line: addresses, and --tls with an address and its authority."""
    parser = argparse.ArgumentParser(
        "python -m fedflat.deploy.flower.warm", description="Handle the tasks of SuperNodes and of a SuperLink."
    )
    parser.add_argument("addresses", nargs="*", metavar="HOST:PORT", help="Runtime API on this machine")
    parser.add_argument(
        "--tls",
        nargs=2,
        action="append",
        default=[],
        metavar=("HOST:PORT", "CA"),
        help="Runtime API with TLS, and the certificate of its authority",
    )
    return parser


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"fedflat: {error}")
