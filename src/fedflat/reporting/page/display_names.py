"""Names of rows and partitions as papers write them, for the tables, figures and page of a report."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

from fedflat.algorithms.cards import CARDS
from fedflat.errors import UserError, one_of
from fedflat.reporting.page.notes import notes_of

Values = dict[str, Any]


def leading_algorithm(label: str) -> str:
    """Return the name of the algorithm at the start of a row's label, e.g. ``fedprox`` of ``fedprox(mu=1.0)+ema``."""
    return re.split(r"[(+, ]", label)[0]


def paper_name(label: str, names: Mapping[str, str]) -> str:
    """Write a row's label with the name that the algorithm at its start has in ``names`` or in its paper.

    >>> paper_name("fedmoswa(gamma=0.3)+wima(window=20)", {}), paper_name("fednorm+ema", {"fednorm": "FedNorm (ours)"})
    ('FedMoSWA(gamma=0.3)+wima(window=20)', 'FedNorm (ours)+ema')
    >>> paper_name("fednorm(mu=1.0)", {"fednorm": "FedNorm (ours)"})
    'FedNorm (ours, mu=1.0)'
    """
    if label in names:
        return names[label]
    algorithm = leading_algorithm(label)
    default = CARDS[algorithm].name if algorithm in CARDS else algorithm
    name, rest = names.get(algorithm, default), label.removeprefix(algorithm)
    if name.endswith(")") and rest.startswith("("):
        return f"{name[:-1]}, {rest[1:]}"
    return f"{name} {rest}" if " " in name and rest.startswith("(") else name + rest


def names_row(name: str, labels: Iterable[str]) -> bool:
    """Whether a name is one of some rows' labels, or the algorithm at the start of one.

    >>> names_row("fedavg", ["fedavg+ema"]), names_row("fedsam", ["fedavg+ema"])
    (True, False)
    """
    return any(paper_name(label, {name: ""}) != paper_name(label, {}) for label in labels)


def display_name(label: str, rows: Mapping[str, str], names: Mapping[str, str]) -> str:
    """Write the label of a measured model, which may be that of a row with a suffix such as ``, seed 0``.

    Args:
        label: label of the model.
        rows: display names of all rows by label.
        names: display names that the user gave.

    >>> display_name("fedavg, lr=0.1, seed 0", {"fedavg, lr=0.1": "Ours"}, {}), display_name("fedsam, seed 1", {}, {})
    ('Ours, seed 0', 'FedSAM, seed 1')
    """
    row = max((row for row in rows if f"{label}, ".startswith(f"{row}, ")), key=len, default=None)
    return paper_name(label, names) if row is None else rows[row] + label.removeprefix(row)


def with_display_names(document: Mapping[str, Any], names: Mapping[str, str]) -> tuple[Values, dict[str, str]]:
    """Replace the labels of a report's rows by display names, and write partitions such as ``Dirichlet(0.1)``.

    Args:
        document: the content of the report.
        names: display names by label, or by the algorithm at the start of labels.

    Returns:
        The changed document, and the display names of all rows by label.

    Raises:
        UserError: no row has a label in ``names``, or two rows would get the same name.
    """
    changed: Values = copy.deepcopy(dict(document))
    labels = list(dict.fromkeys(row["label"] for section in changed["sections"] for row in section["rows"]))
    shown = {label: paper_name(label, names) for label in labels}
    for name in names:
        if not names_row(name, labels):
            raise one_of("row", name, labels)
    if len(set(shown.values())) < len(shown):
        raise UserError(f"two rows would have the same name ({', '.join(shown.values())}); choose other labels")
    for section in changed["sections"]:
        section["name"] = re.sub(r"\bdirichlet\(alpha=([\d.e-]+)\)", r"Dirichlet(\1)", section["name"])
        ranked = section["ranks"]["lines"] if section["ranks"] else []
        views = section["views"]
        tables = [row for table in views["tables"] for row in table["rows"]]
        rises = [line for lines in views["rises"].values() for line in lines]
        measured = (*views["spectra"], *views["clients"], *views["landscapes"], *tables, *rises)
        for entry in (*section["rows"], *section["differences"], *ranked, *measured):
            ends = entry["label"].split(" to ")  # the label of a path names both ends
            entry["label"] = " to ".join(display_name(label, shown, names) for label in ends)
        section["notes"] = notes_of(section)
    return changed, shown
