"""Headline claims of the papers: differences between two published cells, compared with measured differences."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import yaml

from fedflat.display import counted
from fedflat.papers.ledger import Ledger
from fedflat.papers.library import find_cell
from fedflat.papers.schema import PaperData
from fedflat.reporting.tables.summary import PairedDifference, compare_paired


class Claim(PaperData):
    """A claim that one published number exceeds, or falls below, another."""

    paper: str
    claim: str
    cell: str
    """Table and cell, e.g. ``table2/fedavg/cifar10-lenet-5-accuracy``."""
    minus: str
    """The other cell, whose number is subtracted."""


@dataclass(frozen=True)
class CheckedClaim:
    """A claim with the measured difference.

    Attributes:
        claim: the claim.
        claimed: published difference; in points for accuracies.
        measured: measured difference in the same unit, paired by seed; None if not measured.
        unit: `` points`` for accuracies, otherwise empty.
        has_failed: whether one of the measured runs diverged or stayed at its initial metric.
    """

    claim: Claim
    claimed: float
    measured: PairedDifference | None
    unit: str
    has_failed: bool = False

    @property
    def claimed_text(self) -> str:
        """The claimed difference, e.g. ``+3.5 points``."""
        return f"{round(self.claimed, 6):+.1f}{self.unit}"

    @property
    def measured_text(self) -> str:
        """The measured difference with half the width of its 95 % interval (Student's t), and the number of seeds.

        If training failed, this says so instead of the difference.
        """
        if self.has_failed:
            return "training failed"
        if self.measured is None:
            return "not measured yet"
        seeds = counted(len(self.measured.seeds), "seed")
        return f"{shown_with_half_width(self.measured)}{self.unit} ({seeds})"

    @property
    def verdict(self) -> str:
        """The verdict in one sentence; empty if not measured."""
        if self.has_failed:
            return "Not tested: a run diverged or stayed at its initial accuracy."
        return claim_verdict(self.claimed, self.measured)


def shown_with_half_width(difference: PairedDifference, factor: float = 1.0) -> str:
    """Format a difference times ``factor``, with half the width of its 95 % interval (Student's t).

    It has one decimal, or more if the interval would otherwise seem to end at zero.

    >>> shown_with_half_width(compare_paired({0: 2.31, 1: 2.0, 2: 0.2}, {0: 0.5, 1: 0.5, 2: -0.7}))
    '+1.4 ± 1.1'
    >>> shown_with_half_width(compare_paired({0: 2.1, 1: 1.5, 2: 0.9}, {0: 0.0, 1: 0.0, 2: 0.0}))
    '+1.50 ± 1.49'
    """
    mean, interval = factor * difference.mean, difference.t_interval
    if interval is None:
        return f"{mean:+.1f}"
    half_width = factor * (interval[1] - interval[0]) / 2
    digits = next((n for n in (1, 2) if round(abs(mean), n) != round(half_width, n)), 3)
    return f"{mean:+.{digits}f} ± {half_width:.{digits}f}"


def claim_verdict(claimed: float, measured: PairedDifference | None) -> str:
    """Judge a measured difference by its 95 % interval: does it contain zero, and the claimed difference?

    >>> claim_verdict(3.5, compare_paired({0: 51.4, 1: 51.6, 2: 51.5}, {0: 50.7, 1: 50.8, 2: 50.6}))
    'The direction is confirmed, but the difference is smaller than claimed.'
    """
    if measured is None:
        return ""
    is_same_direction = measured.mean * claimed > 0
    if measured.t_interval is None:
        if round(measured.mean, 1) == 0:
            return "One seed shows no difference."
        direction = "the claimed" if is_same_direction else "the opposite"
        return f"One seed points in {direction} direction, which is not statistical evidence."
    low, high = measured.t_interval
    has_zero, has_claimed = low <= 0 <= high, low <= claimed <= high
    if has_zero and has_claimed:
        return "Undecided: both zero and the claimed difference lie in the interval."
    if has_zero:
        return "Not confirmed: the difference may be zero, and is smaller than claimed."
    if not is_same_direction:
        return "Contradicted: the difference has the opposite sign."
    if has_claimed:
        return "Confirmed: the claimed difference lies in the interval."
    size = "smaller" if abs(measured.mean) < abs(claimed) else "larger"
    conjunction = "but" if size == "smaller" else "and"
    return f"The direction is confirmed, {conjunction} the difference is {size} than claimed."


def check_claims(ledger: Ledger) -> list[CheckedClaim]:
    """Compare every headline claim with the measured results."""
    text = (resources.files("fedflat.papers") / "data" / "claims.yaml").read_text("utf-8")
    return [_check(Claim.model_validate(values), ledger) for values in yaml.safe_load(text)]


def _check(claim: Claim, ledger: Ledger) -> CheckedClaim:
    """Compute the claimed and the measured difference of a claim; shares become percentage points."""
    cells = [find_cell(claim.paper, key) for key in (claim.cell, claim.minus)]
    # Runs that deviate from the paper ("ran") do not count.
    entries = {entry.cell: entry for entry in ledger.entries if entry.outcome.verdict != "ran"}
    measured = [entries[cell] for cell in cells if cell in entries]
    factor = 100.0 if cells[0].unit == "share" else 1.0  # to percentage points
    published = [cell.published.value for cell in cells if cell.published and cell.published.value is not None]
    by_seed = [entries[cell].outcome.by_seed if cell in entries else {} for cell in cells]
    values = [{seed: factor * value for seed, value in each.items()} for each in by_seed]
    has_failed = not all(result.has_learned for entry in measured for result in entry.counted)
    unit = " points" if cells[0].unit in ("share", "%") else ""
    return CheckedClaim(claim, factor * (published[0] - published[1]), compare_paired(*values), unit, has_failed)
