"""References to models of runs, as users write them.

``RUN`` names the primary model of the run in a folder, ``RUN:wima`` one of its models, ``RUN:server@50`` that model as
saved after round 50, and ``RUN:client3@50`` a client's model after local training in the next round.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Reference:
    """A reference to a model of a run."""

    run: Path
    """Folder of the run."""
    model: str | None = None
    """Name of the model; None: the primary one."""
    rounds: int | None = None
    """Round after which the model was saved; None: the final model."""

    def __str__(self) -> str:
        model = f":{self.model}" if self.model else ""
        return f"{self.run}{model}{at_round(self.rounds)}"


def at_round(rounds: int | None) -> str:
    """The part of a reference that names the round, e.g. ``@50``; empty for the final model."""
    return "" if rounds is None else f"@{rounds}"


def parse_reference(text: str) -> Reference:
    """Parse a reference to a model of a run, ``RUN:MODEL@ROUND``, of which ``:MODEL`` and ``@ROUND`` are optional.

    >>> parse_reference("runs/a:wima(window=50)@20")
    Reference(run=PosixPath('runs/a'), model='wima(window=50)', rounds=20)
    """
    if Path(text).is_dir():  # a folder name may contain any character
        return Reference(Path(text))
    match = re.fullmatch(r"(?P<run>.+?)(:(?P<model>[A-Za-z][^/\\:@]*))?(@(?P<rounds>\d+))?", text, re.DOTALL)
    assert match is not None  # any text is a valid folder name
    return Reference(Path(match["run"]), match["model"], None if match["rounds"] is None else int(match["rounds"]))


def client_of(source: Reference) -> int | None:
    """The client's number, if a reference names a client's model; otherwise None.

    >>> client_of(Reference(Path("runs/a"), "client3", 50)), client_of(Reference(Path("runs/a"), "wima"))
    (3, None)
    """
    match = re.fullmatch(r"client(\d+)", source.model or "")
    return int(match[1]) if match else None
