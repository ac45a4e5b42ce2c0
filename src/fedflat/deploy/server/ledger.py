"""The ledger: which clients took part in each round, and hence which version of its state each client has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedflat.deploy.site.client_memory import INITIAL_STATE_VERSION
from fedflat.experiment.store.files import DamagedFile, append, create_folder, read_log, sync, write_atomically

LEDGER = "participation.jsonl"
"""File in the run folder."""
PRIVATE_ROUNDS = "private_rounds.json"
"""File in the run folder: how often a private run has asked sites to train a round."""


class RoundLedger:
    """A file with one JSON line per round: accepted clients, and rejected or missing ones with the reason.

    Attributes:
        path: the file.
        lines: the rounds.
        private_rounds: how often a private run has asked sites to train a round. A round that is trained again after a
            restart counts twice, because sites have sent two answers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = _read_lines(path)
        counter = path.parent / PRIVATE_ROUNDS
        self.private_rounds = int(json.loads(counter.read_text())["rounds"]) if counter.exists() else 0

    def count_private_round(self) -> None:
        """Count a round of a private run, on disk, before sites are asked to train it."""
        self.private_rounds += 1
        create_folder(self.path.parent)
        write_atomically(self.path.parent / PRIVATE_ROUNDS, json.dumps({"rounds": self.private_rounds}) + "\n")

    def last_state_version(self, client: int, round: int) -> int:
        """Return the version of the state that a client had after its last accepted update before ``round``.

        The version is the number of rounds that the run had completed with that update.
        """
        for line in reversed(self.lines):
            if line["round"] < round and client in line["accepted"]:
                return int(line["round"]) + 1
        return INITIAL_STATE_VERSION

    def record(
        self,
        round: int,
        accepted: list[int],
        rejected: dict[int, str],
        missing: dict[int, str],
        names: Mapping[int, str] | None = None,
    ) -> None:
        """Write a round to disk.

        It replaces existing lines for this and later rounds, which a run that resumed from a checkpoint trains again.

        Args:
            round: number of the round.
            accepted: clients whose updates were accepted.
            rejected: for each client whose update was rejected, the reason.
            missing: for each client that sent no update, the reason.
            names: names of the sites by client, if known; those of the round's clients are recorded.
        """
        new_line: dict[str, Any] = {
            "round": round,
            "accepted": accepted,
            "rejected": _with_string_keys(rejected),
            "missing": _with_string_keys(missing),
        }
        if names:
            clients = sorted({*accepted, *rejected, *missing})
            new_line["sites"] = {str(client): names[client] for client in clients if client in names}
        earlier = [line for line in self.lines if line["round"] < round]
        create_folder(self.path.parent)
        # JSON text is ASCII, so its number of characters is the size of the file in bytes.
        is_intact = self.path.exists() and self.path.stat().st_size == len(_to_text(self.lines))
        if len(earlier) < len(self.lines) or not is_intact:  # lines to drop, or a line cut off by a kill
            write_atomically(self.path, _to_text([*earlier, new_line]))
        else:
            append(self.path, _to_text([new_line]))
            sync(self.path)
        self.lines = [*earlier, new_line]


class Absence(NamedTuple):
    """Rounds in which a client's update did not count, for the same reason."""

    client: int
    site: str
    """Name of the site; empty without a list of sites."""
    kind: str
    """``rejected`` if there was an update, ``missing`` if there was none."""
    reason: str
    rounds: list[int]


def absences(folder: Path) -> list[Absence]:
    """Return the absences in the ledger of a run folder, in the order in which they began; without damaged lines."""
    grouped: dict[tuple[int, str, str], Absence] = {}
    for line in read_log(folder / LEDGER, {"round": int, "rejected": dict, "missing": dict}):
        if line is None:
            continue
        for kind in ("rejected", "missing"):
            for client, reason in line[kind].items():
                new = Absence(int(client), line.get("sites", {}).get(client, ""), kind, reason, [])
                grouped.setdefault((new.client, kind, reason), new).rounds.append(line["round"])
    return list(grouped.values())


def _with_string_keys(reasons: dict[int, str]) -> dict[str, str]:
    return {str(client): reason for client, reason in reasons.items()}


def _to_text(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a ledger, none of which may be damaged: the versions of clients' states follow from them."""
    lines = read_log(path, {"round": int, "accepted": list})
    intact = [line for line in lines if line is not None]
    if len(intact) < len(lines):
        raise DamagedFile(f"{path} is damaged; restore it, or choose another deploy.out")
    return intact
