"""The tables and the figures of the text study."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedflat.display import is_share
from fedflat.papers.document import markdown
from fedflat.reporting.figures.style import line_styles, marker_spacing, metric_label, scale_logarithmically
from fedflat.reporting.tables.summary import compare_paired

BASELINE = "fedavg"
MEASURES = {"lambda_max": "λ_max", "trace": "trace", "sharpness": "sharpness, ρ = 0.05"}
SCALES: dict[str, Any] = {
    "lambda_max": {"value": "log"},
    "trace": {"value": "symlog", "linthresh": 10},
    "sharpness": {"value": "linear"},
}
"""Scales of the axes of measures; a trace may be negative."""
CAPTION = """\
Numbers are means ± standard deviations over seeds. Differences are paired by seed, with 95 % intervals (Student's t). ↓
and ↑ mark the lowest and the highest learning rate of the grid: a lower or higher one might be better. *At equal
upload* is the metric when the clients have sent as many bytes as FedAvg's clients in the whole run, interpolated
between evaluations."""
Run = Mapping[str, Any]


def by_cell(runs: Sequence[Run]) -> dict[str, dict[str, dict[int, Run]]]:
    """Runs by setting, algorithm and seed: settings in the order in which they occur, the baseline first."""
    cells: dict[str, dict[str, dict[int, Run]]] = defaultdict(lambda: defaultdict(dict))
    for run in sorted(runs, key=lambda run: (run["algorithm"] != BASELINE, run["algorithm"], run["seed"])):
        cells[run["setting"]][run["algorithm"]][run["seed"]] = run
    settings = dict.fromkeys(run["setting"] for run in runs)
    return {setting: cells[setting] for setting in settings}


def spread(values: Sequence[float | None]) -> str:
    """Mean and standard deviation of the finite values, e.g. ``4.2 ± 0.1``."""
    finite = [value for value in values if value is not None]
    if not finite:
        return "–"
    deviation = f" ± {number(stdev(finite), 2)}" if len(finite) > 1 else ""
    return f"{number(fmean(finite), 4)}{deviation}"


def number(value: float, digits: int) -> str:
    """A number with some significant digits, e.g. ``2,116``; with an exponent only if it is large."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e5 else f"{value:.{digits}g}"


def difference(runs: Mapping[int, Run], others: Mapping[int, Run]) -> str:
    """Paired difference of the last metric between two sets of runs, with its interval; – without common seeds."""
    last, baseline = (
        {seed: run["last"] for seed, run in each.items() if run["last"] is not None} for each in (runs, others)
    )
    pair = compare_paired(last, baseline)
    if pair is None:
        return "–"
    interval = "" if pair.t_interval is None else f" [{pair.t_interval[0]:.3g}, {pair.t_interval[1]:.3g}]"
    return f"{pair.mean:+.3g}{interval}"


def at_upload(run: Run, upload: float) -> float | None:
    """The metric after ``upload`` bytes of clients' messages, interpolated between evaluations; None if unknown."""
    if run["last"] is None or run["bytes_up"] < upload:
        return None
    return float(np.interp(run["round"][-1] * upload / run["bytes_up"], run["round"], run["curve"]))


def summary(runs: Sequence[Run]) -> str:
    """Markdown: a table for each setting, and paired differences of LoRA from full fine-tuning."""
    cells = by_cell([run for run in runs if not run["tuning"]])
    if not cells:
        return "No run has finished yet.\n"
    grids: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in runs:
        if run["tuning"]:
            grids[run["setting"], run["algorithm"]].append(run["lr"])
    parts, lora_rows = [CAPTION], []
    for setting, algorithms in cells.items():
        rows = []
        metric = next(iter(next(iter(algorithms.values())).values()))["metric"]
        baseline = algorithms.get(BASELINE, {})
        upload = fmean(run["bytes_up"] for run in baseline.values()) if baseline else None
        for name, by_seed in algorithms.items():
            each, grid = list(by_seed.values()), grids[setting, name]
            lr = each[0]["lr"]
            mark = "" if len(grid) < 2 else {min(grid): " ↓", max(grid): " ↑"}.get(lr, "")
            row = [f"`{name}`", f"{lr:g}{mark}", str(sum(run["last"] is not None for run in each))]
            row += [spread([run["last"] for run in each]), "" if name == BASELINE else difference(by_seed, baseline)]
            row.append(spread([at_upload(run, upload) for run in each]) if upload else "–")
            row += [spread([run.get(key) for run in each]) for key in (*MEASURES, "train_loss")]
            rows.append(row + [f"{fmean(run[key] for run in each) / 1e6:,.0f}" for key in ("bytes_up", "bytes_down")])
            full = cells.get(setting.replace("-lora", "-full"), {}).get(name, {})
            if setting.endswith("-lora") and full:
                ratio = fmean(run["bytes_up"] for run in each) / fmean(run["bytes_up"] for run in full.values())
                lora_rows.append([setting, f"`{name}`", difference(by_seed, full), f"{100 * ratio:.2g} %"])
        heading = ["algorithm", "lr", "seeds", metric, f"minus {BASELINE}", "at equal upload", *MEASURES.values()]
        parts += [f"**{setting}**", markdown([*heading, "training loss", "MB up", "MB down"], rows)]
    if lora_rows:
        heading = ["setting", "algorithm", "LoRA minus full fine-tuning", "bytes up, relative"]
        parts += ["**LoRA and full fine-tuning**", markdown(heading, lora_rows)]
    return "\n\n".join(parts) + "\n"


def figures(runs: Sequence[Run]) -> dict[str, Figure]:
    """The curves of all settings, and the last metric over each measure of flatness, by file name."""
    runs = [run for run in runs if not run["tuning"]]
    cells = by_cell(runs)
    if not cells:
        return {}
    names = list(dict.fromkeys(name for algorithms in cells.values() for name in algorithms))
    styles = line_styles(names)
    curves = Figure(figsize=(3.2 * len(cells), 3), layout="constrained")
    points = Figure(figsize=(3.2 * len(cells), 2.4 * len(MEASURES)), layout="constrained")
    panels = curves.subplots(1, len(cells), squeeze=False)[0]
    grid = points.subplots(len(MEASURES), len(cells), squeeze=False)
    for column, (setting, algorithms) in enumerate(cells.items()):
        panel, metric = panels[column], next(iter(next(iter(algorithms.values())).values()))["metric"]
        scale = 100 if is_share(metric) else 1
        for name, by_seed in algorithms.items():
            for run in by_seed.values():
                values = scale * np.array(run["curve"], dtype=float)
                panel.plot(run["round"], values, **styles[name].line, lw=1, markevery=marker_spacing(len(values)))
                for row, key in enumerate(MEASURES):
                    if run.get(key) is not None and run["last"] is not None:
                        grid[row][column].plot(run[key], scale * run["last"], **styles[name].line)
        label = metric_label(metric).removesuffix(" (lower is better)")  # too long for a panel
        panel.set(title=setting, xlabel="communication round", ylabel=label)
        if metric == "perplexity":
            scale_logarithmically(panel)
        for row, (key, measure) in enumerate(MEASURES.items()):
            axes = grid[row][column]
            axes.set(xlabel=measure, ylabel=label, title=setting if row == 0 else "")
            axes.set_xscale(**SCALES[key])
            if key == "trace":
                axes.xaxis.get_major_locator().set_params(numticks=5)  # more labels would overlap
    for figure in (curves, points):
        dashes = {} if figure is curves else {"ls": "none"}
        handles = [Line2D([], [], **styles[name].line | dashes) for name in names]
        figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    return {"text-curves": curves, "text-flatness": points}
