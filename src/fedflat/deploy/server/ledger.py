"""The record of participation: who took part in which round, and hence which state each client should have."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fedflat.deploy.site.client_memory import FRESH
from fedflat.experiment.store.files import create_folder, explain_os_error, write_whole


class Ledger:
    """One JSON line per round: accepted clients, refused ones with the reason, and those that did not answer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = _complete_lines(path)

    def last(self, client: int, round: int) -> int:
        """Stamp of a client's last accepted update before a round: the number of rounds completed with it."""
        stamps = (
            line["round"] + 1 for line in reversed(self.lines) if line["round"] < round and client in line["accepted"]
        )
        return next(stamps, FRESH)

    def record(self, round: int, accepted: list[int], refused: dict[int, str], missing: dict[int, str]) -> None:
        """Write a round to disk; after a restart, earlier entries for it and later rounds are dropped."""
        line = {"round": round, "accepted": accepted, "refused": _as_keys(refused), "missing": _as_keys(missing)}
        earlier = [line for line in self.lines if line["round"] < round]
        create_folder(self.path.parent)
        complete = self.path.exists() and self.path.stat().st_size == len(_text(self.lines))
        if len(earlier) < len(self.lines) or not complete:
            write_whole(self.path, _text([*earlier, line]))
        else:
            with explain_os_error(self.path), self.path.open("a") as file:
                file.write(_text([line]))
                file.flush()
                os.fsync(file.fileno())
        self.lines = [*earlier, line]


def _as_keys(reasons: dict[int, str]) -> dict[str, str]:
    return {str(client): reason for client, reason in reasons.items()}


def _text(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def _complete_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file without a last one that a kill cut off."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]
