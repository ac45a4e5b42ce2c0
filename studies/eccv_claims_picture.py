"""The picture, the table and the verdicts of the study of the ECCV claims, from its numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedflat.reporting.figures.curves import COLOURS
from fedflat.reporting.figures.landscapes import FAINT, INK

ORDER = ("FedAvg", "FedSAM", "FedASAM")


def picture(numbers: dict[str, Any]) -> Figure:
    """A row for each partition: lambda_max of the global model, of clients' models on their own data, and of their average, over rounds."""
    partitions = _measured(numbers)
    figure = Figure(figsize=(10.4, 3.0 * len(partitions) + 0.5), layout="constrained")
    grid = figure.subplots(len(partitions), 3, squeeze=False, sharex=True, sharey=True)
    for row, (partition, methods) in zip(grid, partitions.items(), strict=True):
        for number, (name, moments) in enumerate(methods.items()):
            rounds = sorted(map(int, moments))
            colour = COLOURS[number]
            at = [moments[str(r)] for r in rounds]
            row[0].plot(rounds, [one["eigenvalues"][0] for one in at], "o-", color=colour, lw=1.8, ms=4, label=name)
            clients = [list(one["clients"].values()) for one in at]
            row[1].plot(rounds, [np.median(some) for some in clients], "o-", color=colour, lw=1.8, ms=4)
            row[1].fill_between(
                rounds, [min(some) for some in clients], [max(some) for some in clients], color=colour, alpha=0.15, lw=0
            )
            row[2].plot(rounds, [one["average"] for one in at], "o-", color=colour, lw=1.8, ms=4)
        for axes, title in zip(
            row, ("global model, all data", "clients' models, own data", "average of these, all data"), strict=True
        ):
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
    """Every moment of every run as a table in Markdown."""
    head = "| partition | method | round | accuracy % | lambda_max | lambda_max / lambda_5 | clients on own data (median) | their average on all |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for partition, methods in _measured(numbers).items():
        for name, moments in methods.items():
            for rounds in sorted(map(int, moments)):
                one = moments[str(rounds)]
                top, clients = one["eigenvalues"], np.median(list(one["clients"].values()))
                figures = f"{100 * one['accuracy']:.2f} | {top[0]:.3g} | {top[0] / top[-1]:.3g} | {clients:.3g} | {one['average']:.3g}"
                lines.append(f"| {partition} | {name} | {rounds} | {figures} |")
    return "\n".join(lines)


def verdicts(numbers: dict[str, Any]) -> str:
    """Each claim, and whether it holds in these numbers."""
    found = _measured(numbers)
    lines = []
    for partition, methods in found.items():
        if all(name in methods for name in ORDER):
            top = [_last(methods[name])["eigenvalues"][0] for name in ORDER]
            shown = ", ".join(f"{name} {value:.3g}" for name, value in zip(ORDER, top, strict=True))
            lines.append(
                _line(
                    top[0] > top[1] > top[2], f"lambda_max falls from FedAvg over FedSAM to FedASAM, {partition}", shown
                )
            )
    for partition, methods in found.items():
        for name, moments in methods.items():
            one = _last(moments)
            clients = float(np.median(list(one["clients"].values())))
            claim = f"{name}'s clients are flatter on their own data than their average on all data, {partition}"
            lines.append(_line(clients < one["average"], claim, f"{clients:.3g} against {one['average']:.3g}"))
    if len(found) == 2 and all("FedAvg" in methods for methods in found.values()):
        hard, mild = (methods["FedAvg"] for methods in found.values())
        first, last = (mild[str(pick(map(int, mild)))]["eigenvalues"][0] for pick in (min, max))
        lines.append(
            _line(
                last < first,
                "FedAvg's lambda_max falls as rounds pass, mild partition",
                f"{first:.3g}, then {last:.3g}",
            )
        )
        one, other = (float(np.median(list(_last(moments)["clients"].values()))) for moments in (hard, mild))
        claim = "FedAvg's clients are flatter with one class each than with the mild partition"
        lines.append(_line(one < other, claim, f"{one:.3g} against {other:.3g}"))
    return "\n".join(lines)


def _measured(numbers: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What there is: a study that was cut off has runs without a moment."""
    whole = {
        partition: {name: moments for name, moments in methods.items() if moments}
        for partition, methods in numbers["measured"].items()
    }
    return {partition: methods for partition, methods in whole.items() if methods}


def _last(moments: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = moments[str(max(map(int, moments)))]
    return found


def _line(holds: bool, claim: str, figures: str) -> str:
    return f"- {'holds' if holds else 'does not hold'}: {claim} ({figures})."
