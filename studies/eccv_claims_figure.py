"""The figure, the table and the verdicts of the ECCV study, from its numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedflat.papers.document import markdown
from fedflat.reporting.figures.landscape_panels import FAINT, INK
from fedflat.reporting.figures.style import line_styles

ORDER = ("FedAvg", "FedSAM", "FedASAM")
TITLES = ("global model, all data", "local models, own data", "average of these, all data")
HEADING = (
    "partition", "method", "round", "accuracy %", "lambda_max", "lambda_max / lambda_5",
    "clients on own data (median)", "their average on all",
)  # fmt: skip


def eccv_claims_figure(numbers: dict[str, Any]) -> Figure:
    """One row per partition: lambda_max over rounds of the global model, the local models and their average."""
    partitions = _measured(numbers)
    figure = Figure(figsize=(10.4, 3.0 * len(partitions) + 0.5), layout="constrained")
    grid = figure.subplots(len(partitions), 3, squeeze=False, sharex=True, sharey=True)
    styles = line_styles(name for methods in partitions.values() for name in methods)
    for row, (partition, methods) in zip(grid, partitions.items(), strict=True):
        for name, by_round in methods.items():
            rounds = sorted(map(int, by_round))
            moments = [by_round[str(at)] for at in rounds]
            clients = [list(moment["clients"].values()) for moment in moments]
            style = styles[name].line | {"lw": 1.8}
            row[0].plot(rounds, [moment["eigenvalues"][0] for moment in moments], label=name, **style)
            row[1].plot(rounds, [np.median(values) for values in clients], **style)
            lowest, highest = ([pick(values) for values in clients] for pick in (min, max))
            row[1].fill_between(rounds, lowest, highest, color=style["color"], alpha=0.15, lw=0)
            row[2].plot(rounds, [moment["average"] for moment in moments], **style)
        for axes, title in zip(row, TITLES, strict=True):
            axes.set_title(title, loc="left", fontsize=10, color=INK)
            axes.set_yscale("log")
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(colors=FAINT, labelsize=8.5)
        row[0].set_ylabel(f"{partition}\n$\\lambda_{{max}}$", color=INK, fontsize=10)
    for axes in grid[-1]:
        axes.set_xlabel("communication round", color=INK, fontsize=9)
    grid[0][0].legend(frameon=False, fontsize=9)
    return figure


def table(numbers: dict[str, Any]) -> str:
    """A Markdown table with one line per measured round of each run."""
    rows = []
    for partition, methods in _measured(numbers).items():
        for name, by_round in methods.items():
            for at in sorted(map(int, by_round)):
                moment = by_round[str(at)]
                top = moment["eigenvalues"]
                curvature = (top[0], top[0] / top[-1], _client_median(moment), moment["average"])
                accuracy = f"{100 * moment['accuracy']:.2f}"
                rows.append([partition, name, str(at), accuracy, *(f"{value:.3g}" for value in curvature)])
    return markdown(HEADING, rows)


def verdicts(numbers: dict[str, Any]) -> str:
    """Whether each claim holds in these numbers."""
    partitions = _measured(numbers)
    lines = []
    for partition, methods in partitions.items():
        if all(name in methods for name in ORDER):
            top = [_last(methods[name])["eigenvalues"][0] for name in ORDER]
            values = ", ".join(f"{name} {value:.3g}" for name, value in zip(ORDER, top, strict=True))
            claim = f"lambda_max falls from FedAvg over FedSAM to FedASAM, {partition}"
            lines.append(_verdict(top[0] > top[1] > top[2], claim, values))
    for partition, methods in partitions.items():
        for name, by_round in methods.items():
            median, average = _client_median(_last(by_round)), _last(by_round)["average"]
            claim = f"{name}'s clients are flatter on their own data than their average on all data, {partition}"
            lines.append(_verdict(median < average, claim, f"{median:.3g} vs. {average:.3g}"))
    if len(partitions) == 2 and all("FedAvg" in methods for methods in partitions.values()):
        hard, mild = (methods["FedAvg"] for methods in partitions.values())
        first, last = (mild[str(pick(map(int, mild)))]["eigenvalues"][0] for pick in (min, max))
        claim = "FedAvg's lambda_max falls over the rounds, mild partition"
        lines.append(_verdict(last < first, claim, f"{first:.3g}, then {last:.3g}"))
        in_hard, in_mild = (_client_median(_last(by_round)) for by_round in (hard, mild))
        claim = "FedAvg's clients are flatter with one class each than with the mild partition"
        lines.append(_verdict(in_hard < in_mild, claim, f"{in_hard:.3g} vs. {in_mild:.3g}"))
    return "\n".join(lines)


def _measured(numbers: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The measurements by partition and method, without methods that an interrupted study has not reached."""
    partitions = {
        partition: {name: by_round for name, by_round in methods.items() if by_round}
        for partition, methods in numbers["measured"].items()
    }
    return {partition: methods for partition, methods in partitions.items() if methods}


def _last(by_round: dict[str, Any]) -> dict[str, Any]:
    moment: dict[str, Any] = by_round[str(max(map(int, by_round)))]
    return moment


def _client_median(moment: dict[str, Any]) -> float:
    return float(np.median(list(moment["clients"].values())))


def _verdict(holds: bool, claim: str, values: str) -> str:
    return f"- {'holds' if holds else 'does not hold'}: {claim} ({values})."
