"""A SuperExec that is warm: torch, fedflat and Flower are imported once, and each message is worked on by a fork of it.

Flower starts a new Python process for every message, which costs some seconds of computing each time. With
``flower-supernode --isolation process`` (or ``flower-superlink --isolation process``) something else may start these processes, and
``python -m fedflat.deploy.flower.warm HOST:PORT ...`` does, for one or several nodes of one machine, at the addresses of their Runtime API.
For a SuperLink with TLS it is ``--tls HOST:PORT ca.crt``.
"""

from __future__ import annotations

import argparse
import re
import sys

from fedflat.deploy.flower.version import require_flower
from fedflat.errors import UserError


def main(arguments: list[str]) -> None:
    """Serve the Runtime APIs at some addresses, until the process ends."""
    require_flower()
    asked = _parser().parse_args(arguments)
    addresses: dict[str, str | None] = {**dict.fromkeys(asked.addresses), **dict(asked.tls)}
    if not addresses or not all(
        re.fullmatch(r".+:\d+", address) and int(address.rpartition(":")[2]) < 2**16 for address in addresses
    ):
        raise UserError(
            "expected the addresses of Runtime APIs, as in: python -m fedflat.deploy.flower.warm 127.0.0.1:8100 127.0.0.1:8101"
        )
    from fedflat.deploy.flower.forks import serve

    serve(addresses)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m fedflat.deploy.flower.warm", description="Works on the tasks of SuperNodes and of a SuperLink."
    )
    parser.add_argument("addresses", nargs="*", metavar="HOST:PORT", help="a Runtime API of this machine")
    parser.add_argument(
        "--tls",
        nargs=2,
        action="append",
        default=[],
        metavar=("HOST:PORT", "CA"),
        help="one with TLS, and who signed it",
    )
    return parser


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as mistake:
        sys.exit(f"fedflat: {mistake}")
