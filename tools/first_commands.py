"""Run the README's commands on a small scale, and the help of every command, in one process.

tools/check_package.py runs this file with the newest versions of all dependencies.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import typer

import fedflat
from fedflat.cli.application import app

COMMANDS = """
compare fedavg fedmoswa+wima --rounds 2 --local-steps 2 --seeds 1 --jobs 1 --workers 1 --out demo
show demo
flatness landscape demo/fedavg/seed-0 demo/fedmoswa+wima/seed-0 --points 3 --examples 50
report demo --out page
papers
"""
COMMAND: Any = typer.main.get_command(app)


def main() -> None:
    """Run all commands in the current folder; a failing command raises or determines the exit code."""
    for line in COMMANDS.strip().splitlines():
        call(line.split())
    for command in paths(COMMAND):
        call([*command, "--help"])
    fedflat.Result.load("demo/fedavg/seed-0").to_pandas()


def call(arguments: list[str]) -> None:
    """Call ``fedflat`` in this process; exit if it fails."""
    code = COMMAND(arguments, standalone_mode=False)
    if code:
        sys.exit(f"fedflat {' '.join(arguments)} failed with exit code {code}")


def paths(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command and group below ``command``, e.g. ``("flatness", "landscape")``."""
    yield path
    for name, subcommand in getattr(command, "commands", {}).items():
        yield from paths(subcommand, (*path, name))


if __name__ == "__main__":
    main()
