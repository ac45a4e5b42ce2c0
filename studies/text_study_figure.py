"""The table and the figures of the text study."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.figure import Figure
from study import write_figure

from fedflat.papers.document import markdown

BASELINE = "fedavg"
MEASURES = {"lambda_max": "λ_max", "trace": "trace", "sharpness": "sharpness, ρ = 0.05"}
Run = Mapping[str, Any]


def by_cell(runs: Sequence[Run]) -> dict[str, dict[str, dict[int, Run]]]:
    """Runs by setting, algorithm and seed, in the order in which they occur."""
    cells: dict[str, dict[str, dict[int, Run]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        cells[run["setting"]][run["algorithm"]][run["seed"]] = run
    return cells


def spread(values: Sequence[float | None]) -> str:
    """Mean and standard deviation of the finite values, e.g. ``4.2 ± 0.1 (3)`` for three of them."""
    finite = [value for value in values if value is not None]
    if not finite:
        return "–"
    deviation = f" ± {stdev(finite):.2g}" if len(finite) > 1 else ""
    return f"{fmean(finite):.4g}{deviation} ({len(finite)})"


def differences(runs: Mapping[int, Run], others: Mapping[int, Run], key: str) -> list[float]:
    """Differences of a number between two sets of runs, for the seeds of both."""
    pairs = [(runs[seed].get(key), others[seed].get(key)) for seed in runs if seed in others]
    return [value - baseline for value, baseline in pairs if value is not None and baseline is not None]


def summary(runs: Sequence[Run]) -> str:
    """Markdown tables: all numbers by setting and algorithm, and paired differences of LoRA from full fine-tuning."""
    cells = by_cell(runs)
    heading = ["setting", "algorithm", "lr", "metric", "last", f"minus {BASELINE}", *MEASURES.values(), "train loss"]
    heading += ["MB up", "MB down"]
    rows, lora_rows = [], []
    for setting, algorithms in cells.items():
        for name, by_seed in algorithms.items():
            each = list(by_seed.values())
            difference = differences(by_seed, algorithms.get(BASELINE, {}), "last") if name != BASELINE else []
            row = [setting, f"`{name}`", f"{each[0]['lr']:g}", each[0]["metric"]]
            row += [spread([run["last"] for run in each]), spread(difference)]
            row += [spread([run.get(key) for run in each]) for key in (*MEASURES, "train_loss")]
            rows.append(row + [f"{fmean(run[key] for run in each) / 1e6:.3g}" for key in ("bytes_up", "bytes_down")])
            full = cells.get(setting.replace("-lora", "-full"), {}).get(name, {})
            if setting.endswith("-lora") and full:
                ratio = [by_seed[seed]["bytes_up"] / full[seed]["bytes_up"] for seed in by_seed if seed in full]
                lora_rows.append([setting, f"`{name}`", spread(differences(by_seed, full, "last")), spread(ratio)])
    caption = "Mean ± standard deviation over (number of) seeds; differences are paired by seed.\n\n"
    text = caption + markdown(heading, rows)
    if lora_rows:
        heading = ["setting", "algorithm", "last, minus full fine-tuning", "bytes up, relative"]
        text += "\n\n" + markdown(heading, lora_rows)
    return text + "\n"


def draw(runs: Sequence[Run], out: Path) -> None:
    """Draw the curves of all settings, and the metric over each measure of flatness."""
    cells = by_cell(runs)
    names = list(dict.fromkeys(run["algorithm"] for run in runs))
    curves = Figure(figsize=(3.2 * len(cells), 3), layout="constrained")
    points = Figure(figsize=(3.2 * len(cells), 2.4 * len(MEASURES)), layout="constrained")
    panels = curves.subplots(1, len(cells), squeeze=False)[0]
    grid = points.subplots(len(MEASURES), len(cells), squeeze=False)
    for column, (setting, algorithms) in enumerate(cells.items()):
        panel, metric = panels[column], next(iter(next(iter(algorithms.values())).values()))["metric"]
        for name, by_seed in algorithms.items():
            colour = f"C{names.index(name)}"
            for number, run in enumerate(by_seed.values()):
                panel.plot(run["round"], run["curve"], color=colour, lw=1, label=None if number else name)
                for row, key in enumerate(MEASURES):
                    if run.get(key) is not None:
                        grid[row][column].plot(run[key], run["last"], "o", color=colour, ms=4)
        panel.set(title=setting, xlabel="round", ylabel=metric)
        if metric == "perplexity":
            panel.set_yscale("log")
        for row, label in enumerate(MEASURES.values()):
            grid[row][column].set(xlabel=label, ylabel=metric, title=setting if row == 0 else "")
    handles = [panels[0].plot([], [], color=f"C{number}")[0] for number in range(len(names))]
    for figure, stem in ((curves, "curves"), (points, "flatness")):
        figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
        write_figure(figure, out / stem)
