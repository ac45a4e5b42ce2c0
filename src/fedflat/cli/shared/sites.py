"""Output on the sites of a deployed run, on the screen and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedflat.cli.shared.screen import print_section, shown_count, shown_metric, table, with_unit
from fedflat.display import names_by_reason, shown_names

if TYPE_CHECKING:
    from fedflat.experiment.store.run_folder import Record

MAX_ABSENCES = 20
"""Largest number of rows about sites without an update."""
MAX_SITES = 50
"""Largest number of rows about sites."""


def sites_document(record: Record) -> dict[str, Any]:
    """Return the sites, those whose updates did not count, and the rejected nodes; empty for a simulation."""
    if record.folder is None or not record.folder.has_real_sites:
        return {}
    from fedflat.deploy.server.federation_file import read_document, site_summaries
    from fedflat.deploy.server.ledger import absences
    from fedflat.experiment.store.run_folder import SITES

    folder = record.folder.path
    return {
        "secure_aggregation": read_document(folder / SITES).get("secure_aggregation", False),
        "sites": [site._asdict() for site in site_summaries(folder)],
        "absent_sites": [absence._asdict() for absence in absences(folder)],
        "rejected_nodes": record.folder.status().get("rejected_nodes", {}),
    }


def describe_secure_aggregation(document: dict[str, Any]) -> dict[str, str]:
    """Describe whether the server of a deployed run sees the update of every site; empty for a simulation."""
    if "secure_aggregation" not in document:
        return {}
    on = "on: the server sees only sums of what sites send"
    return {"secure aggregation": on if document["secure_aggregation"] else "off: the server sees every update"}


def print_sites(document: dict[str, Any]) -> None:
    """Print the sites of a deployed run, and which were rejected or missing in which rounds."""
    if "sites" not in document:
        return
    sites, metric = document["sites"], document["metric"]
    shown = sites[:MAX_SITES]
    columns = {
        "site": [_label(site) for site in shown],
        "training examples": [shown_count(site["examples"]) for site in shown],
        "accepted updates": [site["updates"] for site in shown],
        "last accepted round (from 0)": [site["last_round"] for site in shown],
    }
    if any(site["score"] for site in sites):
        scores = [shown_metric(site["score"].get(metric), metric) for site in shown]
        columns[f"final {with_unit(metric)}, own test data"] = scores
    rows, hidden = zip(*columns.values(), strict=True), len(sites) - len(shown)
    title = "Sites" + (f" ({hidden} more with --json)" if hidden else "")
    print_section(title, table(columns, rows, numeric=list(columns)[1:]))
    _print_absent_sites(document)


def _label(entry: dict[str, Any]) -> str:
    """Return the name of a site with its client number."""
    return f"{entry['site']} ({entry['client']})" if entry["site"] else f"client {entry['client']}"


def _print_absent_sites(document: dict[str, Any]) -> None:
    """Print which sites were rejected or missing in which rounds, and which nodes were rejected altogether."""
    absent, nodes = document.get("absent_sites", []), document.get("rejected_nodes", {})
    labels: dict[tuple[str, str, str], list[str]] = {}  # sites with the same absences share a row
    for entry in absent:
        labels.setdefault((entry["kind"], shown_ranges(entry["rounds"]), entry["reason"]), []).append(_label(entry))
    rows = [(shown_names(sites), *absence) for absence, sites in labels.items()]
    hidden = max(len(rows) - MAX_ABSENCES, 0)
    rows = rows[hidden:] + [(names, "site rejected", "", reason) for reason, names in names_by_reason(nodes).items()]
    if rows:
        title = "Sites without an update" + (f" ({hidden} earlier entries in participation.jsonl)" if hidden else "")
        print_section(title, table(("site", "update", "rounds, from 0", "reason"), rows))


def shown_ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers as text, with ranges.

    >>> shown_ranges([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in pairs)
