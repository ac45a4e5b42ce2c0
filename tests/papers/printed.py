"""The tables, parsed from the texts of the papers."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("FEDFLAT_PAPERS", ROOT.parent / "shared" / "papers"))
NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?(?:±\d+(?:\.\d+)?)?\+?")


@dataclass(frozen=True)
class Place:
    """The position of a table in the text: below an anchor, from the first line with the given beginning."""

    table: str
    anchor: str
    first: str
    document: int = 0
    labels: tuple[str, ...] = ()
    """Numbers that name rows rather than stand in them."""


PLACES = (
    Place("fedswa/table2", "Impact of ρ", "FedAvg\t"),
    Place("fedswa/table3", "6.3. Ablation Study", "FedAvg\t"),
    Place("fedswa/table3", "Table 3: Comparison of each", "FedAvg\t", document=1),
    Place("fedswa/table4", "Table 4: Testing Acc", "FedSWA\t"),
    Place("fedswa/table5", "Table 5: Full client", "FedAvg\t"),
    Place("fedswa/table6", "Table 6: 10% client", "FedAvg\t"),
    Place("fedswa/table8", "heterogeneity\t0.1", "FedSMOO\t"),
    Place("wima/table2", "Table 2: WIMA combined", "FedAvg\t"),
    Place("wima/table3", "Table 3: Large-scale", "FedAvg\t"),
    Place("wima/table4", "Table 4: WIMA accuracy", "5\t", labels=("5", "10", "50", "100", "200")),
    Place("wima/table5", "Table 5: Accuracy", "CIFAR10\t", labels=("0", "0.05", "0.5")),
    Place("eccv/table1", "Table 1: CIFAR100 Hessian", "FedAvg E=1\t"),
    Place("eccv/table2", "Table 2: FedSAM", "CIFAR100\tFedAvg"),
    Place("eccv/table3", "Table 3: Accuracy results", "FedAvg\t"),
    Place("eccv/table4", "Table 4: FedAvg", "CIFAR100\t"),
    Place("eccv/table5", "Table 5: Comparison", "SAM\t"),
    Place("eccv/table6", "Table 6: SOTA", "CIFAR10\t"),
    Place("eccv/table7", "Table 7: Accuracy", "FedAvg\t"),
    Place("eccv/table8", "Table 8: Federated", "FedAvg\t"),
    Place("eccv/table13", "Table 13: Final", "SGD\t1", labels=("1", "0.1", "0.01", "0.001")),
    Place("eccv/table14", "Table 14: SWA", "CIFAR100\t", labels=("20", "10", "1")),
    Place(
        "eccv/table15",
        "Table 15: SWA",
        "CIFAR100\t",
        labels=("20", "10", "1000", "5000", "10000", "15000", "500", "2500", "7500"),
    ),
    Place("eccv/table16", "Table 16: Comparison", "SAM\t"),
    Place("eccv/table17", "Table 17: FedAvg", "CIFAR10\t"),
)


@cache
def text_of(document: str) -> str:
    return (FOLDER / document).read_text("utf-8")


def lines_of(place: Place, documents: list[str]) -> list[str]:
    """The lines of a table, from its first row to the last line with columns."""
    lines = text_of(documents[place.document]).splitlines()
    anchor = next(number for number, line in enumerate(lines) if place.anchor in line)
    first = next(number for number in range(anchor, len(lines)) if lines[number].startswith(place.first))
    last = next(
        number
        for number in range(first, len(lines))
        if "\t" not in lines[number] and not lines[number].startswith("Centralized")
    )
    return lines[first:last]


def numbers_in(line: str) -> list[str]:
    """The numbers of a line from left to right, without the marks around them."""
    line = re.sub(r"</?(?:b|u|math|i)>|\*\*", "", line)
    line = re.sub(r" *\$? *_?\{? *\\pm *\$? *([\d.]+) *\}?\$?", r"±\1", line)
    line = re.sub(r"\$?\\alpha\s*=\s*[\d.]+k?\$?:?", " ", line)
    line = re.sub(r"\\uparrow", " ", line).replace("$", " ").replace(" +", "+")
    words = re.split(r"[\s(),]+", line)
    return [word for word in words if NUMBER.fullmatch(word)]
