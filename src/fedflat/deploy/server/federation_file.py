"""The files of a run folder about its sites; they can be read without Flower.

``experiment.json`` has the sites, the ledger their accepted updates, and ``sites.json`` their final scores.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedflat.deploy.server.ledger import LEDGER
from fedflat.experiment.store.files import DamagedFile, read_log, write_atomically
from fedflat.experiment.store.run_folder import SITES

SCORES = "sites.json"
"""File in the run folder: the metrics of the final model on the data that each site holds out."""


class FederationFile:
    """``experiment.json``: the name under which nodes save their clients' state, and facts about the federation.

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / SITES
        self._content = read_document(self._path)
        self._content.setdefault("experiment", secrets.token_hex(8))  # drawn once per run

    @property
    def experiment(self) -> str:
        """The random name of the experiment."""
        return str(self._content["experiment"])

    def note(self, secure_aggregation: bool, names: Mapping[int, str], examples: Mapping[int, int]) -> None:
        """Store what is known, if it has changed.

        Args:
            secure_aggregation: whether the server sees only sums.
            names: names of the sites by client; empty without a list of sites.
            examples: number of training examples of every connected site, by client.
        """
        sites = {client: dict(site) for client, site in self._content.get("sites", {}).items()}
        for fact, values in (("name", names), ("examples", examples)):
            for client, value in values.items():
                sites.setdefault(str(client), {})[fact] = value
        content = {**self._content, "secure_aggregation": secure_aggregation, "sites": sites}
        if content != self._content:
            write_atomically(self._path, json.dumps(content) + "\n")
            self._content = content


class SiteSummary(NamedTuple):
    """A site of a run."""

    client: int
    site: str
    """Name of the site; empty without a list of sites."""
    examples: int | None
    """Number of training examples when the site last joined; None if it has not."""
    updates: int
    """Number of rounds in which the site's update was accepted."""
    last_round: int | None
    """The last of these rounds, from 0."""
    score: dict[str, float | None]
    """Metrics of the final model on the site's held-out data, and their number ``examples``; empty if unknown."""


def site_summaries(folder: Path) -> list[SiteSummary]:
    """Return the sites in a run folder, by client number; without damaged lines of the ledger."""
    sites: dict[str, dict[str, Any]] = read_document(folder / SITES).get("sites", {})
    scores: dict[str, dict[str, float | None]] = read_document(folder / SCORES).get("sites", {})
    rounds: dict[int, list[int]] = {int(client): [] for client in (*sites, *scores)}
    for line in read_log(folder / LEDGER, {"round": int, "accepted": list}):
        if line is not None:
            for client in line["accepted"]:
                rounds.setdefault(client, []).append(line["round"])
    summaries = []
    for client, accepted in sorted(rounds.items()):
        site = sites.get(str(client), {})
        last_round = accepted[-1] if accepted else None
        score = scores.get(str(client), {})
        summaries.append(
            SiteSummary(client, site.get("name", ""), site.get("examples"), len(accepted), last_round, score)
        )
    return summaries


def read_document(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise DamagedFile(f"{path} is damaged; restore it")
    return content
