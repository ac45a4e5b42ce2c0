"""Who took part in which round: the server's own record, which also tells each client what it should remember."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fedflat.deploy.site.client_memory import FRESH
from fedflat.experiment.store.atomic_files import create_folder, explain_os_error, write_whole


class Ledger:
    """One line per round: accepted clients, refused ones with the reason, and those that never answered."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = _whole_lines(path)

    def last(self, client: int, round: int) -> int:
        """The stamp of a client's last accepted update before a round: the number of rounds then done."""
        before = (
            line["round"] + 1 for line in reversed(self.lines) if line["round"] < round and client in line["accepted"]
        )
        return next(before, FRESH)

    def record(self, round: int, accepted: list[int], refused: dict[int, str], missing: dict[int, str]) -> None:
        """Note a round, on disk before anyone relies on it; what was noted of it and of later ones before a restart is forgotten."""
        line = {"round": round, "accepted": accepted, "refused": _named(refused), "missing": _named(missing)}
        kept = [earlier for earlier in self.lines if earlier["round"] < round]
        create_folder(self.path.parent)
        if len(kept) < len(self.lines) or not self.path.exists() or self.path.stat().st_size != len(_text(self.lines)):
            write_whole(self.path, _text([*kept, line]))
        else:
            with explain_os_error(self.path), self.path.open("a") as file:
                file.write(_text([line]))
                file.flush()
                os.fsync(file.fileno())
        self.lines = [*kept, line]


def _named(reasons: dict[int, str]) -> dict[str, str]:
    return {str(client): why for client, why in reasons.items()}


def _text(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; one that a kill cut off does not count."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]
