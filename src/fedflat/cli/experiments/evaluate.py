"""fedflat evaluate: per-class, per-client and per-domain metrics of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from fedflat.cli.flatness.common import MAX_LISTED
from fedflat.cli.shared.flags import AVERAGE, JSON, ROUND, RUN, optional
from fedflat.cli.shared.one_run import MAX_OTHER_METRICS
from fedflat.cli.shared.screen import (
    counted,
    fetch_if_missing,
    print_json,
    screen,
    shown_count,
    shown_metric,
    status_line,
    table,
    with_unit,
)
from fedflat.display import column_format
from fedflat.errors import UserError

if TYPE_CHECKING:
    from fedflat.cli.shared.screen_table import ScreenTable
    from fedflat.experiment.analysis.evaluation import Evaluation

FINE_TUNING = "Fine-tuning"
"""Help panel."""
_tuning_option = partial(typer.Option, rich_help_panel=FINE_TUNING)
NOUNS = {
    "classes": ("class", "classes"),
    "clients": ("client", "clients"),
    "unseen": ("unseen client", "unseen clients"),
    "domains": ("domain", "domains"),
    "corruptions": ("corruption", "corruptions"),
}
"""The noun for one entry of each part that has several, and its plural."""
GROUP = ("natural client", "natural clients")
"""The noun for groups of the test set that are not domains, such as sites or writers."""
DOMAIN_DATASETS = ("domains", "pacs", "office_home", "idda")


class SummaryRow(NamedTuple):
    """A row of the summary: metrics on a part, e.g. the test set."""

    part: str
    size: str
    value: float | None
    """The primary metric; its mean over the entries of a part that has several."""
    std: float | None = None
    worst_tenth: float | None = None
    loss: float | None = None
    others: Mapping[str, float] = {}


def evaluate(
    folder: Path = RUN,
    average: str = AVERAGE,
    rounds: int | None = ROUND,
    on: str | None = optional(
        "--on",
        "comma-separated: test, classes, longtail, clients, unseen, domains, corruptions, fine-tuned[-unseen]",
        "all that are available",
        metavar="NAMES",
    ),
    clients: int = _tuning_option(20, "--tune-clients", min=1, help="clients that fine-tune"),
    epochs: int = _tuning_option(1, "--tune-epochs", min=1, help="epochs of fine-tuning"),
    share: float = _tuning_option(
        0.8, "--tune-share", help="fraction of a client's examples for fine-tuning; the rest is for evaluation"
    ),
    lr: float | None = optional("--tune-lr", "learning rate for fine-tuning", "the run's", rich_help_panel=FINE_TUNING),
    as_json: bool = JSON,
) -> None:
    """Evaluate a model on the test set, per class, client and domain, under corruptions, and after fine-tuning.

    Example: fedflat evaluate runs/fedavg-digits-seed0 --on test,classes,clients
    """
    from fedflat.experiment.analysis.evaluation import PARTS, evaluate
    from fedflat.experiment.analysis.fine_tuning import FineTuning
    from fedflat.experiment.setup.problem import load_data
    from fedflat.experiment.store.run_folder import load_record

    record = load_record(folder)
    algorithm, seed = record.config.algorithm, record.config.seed
    parts = list(PARTS) if on is None else [name.strip() for name in on.split(",") if name.strip()]
    if not parts:
        raise UserError(f"--on is empty; expected a comma-separated list of {', '.join(PARTS)}")
    fine_tuning = FineTuning(clients, epochs, share, lr)
    fetch_if_missing(record.config, as_json)
    with status_line(as_json) as show_status:
        evaluation = evaluate(
            record,
            average,
            parts,
            rounds=rounds,
            fine_tuning=fine_tuning,
            progress=lambda part: show_status(f"evaluating on {part}"),
        )
    if not evaluation.parts:
        reasons = [f"{part} is not available: {reason}" for part, reason in evaluation.missing.items()]
        raise UserError("; ".join(reasons))
    if as_json:
        document = evaluation.document()
        print_json({"folder": folder, "algorithm": algorithm, "seed": seed, "round": rounds, **document})
        return
    heading = f"{algorithm}   {record.config.data.dataset}, seed {seed}, model {average}"
    if rounds is not None:
        heading += f", round {rounds}"
    if record.lower_is_better:
        heading += f"; lower {evaluation.metric} is better"
    # Without --on, only parts that a download would add are worth a line.
    missing = {part: why for part, why in evaluation.missing.items() if on is not None or "fedflat data get" in why}
    has_domains = record.config.data.dataset.split("(")[0] in DOMAIN_DATASETS
    _print_evaluation(evaluation, heading, missing, NOUNS if has_domains else NOUNS | {"domains": GROUP})
    # With several columns, which have different units, all values are those of standardised targets.
    if evaluation.metric == "rmse" and len(load_data(record.config).target_std) == 1:
        note = "The loss is computed on standardised targets; rmse and mae are in the target's units."
        screen().print(f"\n{note}", style="dim")


def _print_evaluation(
    evaluation: Evaluation, heading: str, missing: dict[str, str], nouns: dict[str, tuple[str, str]]
) -> None:
    """Print a summary of every part of an evaluation, e.g. test set or clients, and the reasons for ``missing`` parts.

    Classes, domains and corruptions are also listed one by one, if there are at most ``MAX_LISTED``. ``nouns`` are the
    names of the parts' entries, as in ``NOUNS``.
    """
    console, metric = screen(), evaluation.metric
    rows = [row for part, results in evaluation.parts.items() for row in _summary_rows(part, results, metric, nouns)]
    others = list(dict.fromkeys(name for row in rows for name in row.others))[:MAX_OTHER_METRICS]
    columns = ("on", "of", with_unit(metric), "standard deviation", "worst 10 %", "loss", *map(with_unit, others))
    cells = [_shown_column([getattr(row, name) for row in rows], metric) for name in ("value", "std", "worst_tenth")]
    cells.append(_shown_column([row.loss for row in rows], "loss"))
    cells += [_shown_column([row.others.get(name) for row in rows], name) for name in others]
    console.print()
    console.print(heading, style="bold")
    console.print()
    lines = ((row.part, row.size, *shown) for row, *shown in zip(rows, *cells, strict=True))
    console.print(table(columns, lines, numeric=columns[2:]))
    for part, results in evaluation.parts.items():
        if part in ("classes", "domains", "corruptions") and len(results["each"]) <= MAX_LISTED:
            console.print()
            console.print(_entry_table(part, nouns[part][0], results["each"], metric))
    if missing:
        console.print()
        for part, reason in missing.items():
            console.print(f"Not on {part}: {reason}.", style="dim")


def _shown_column(values: Iterable[float | None], metric: str) -> list[str | None]:
    """Format the values of a column with the same number of decimals; None stays None.

    >>> _shown_column([56.4, None, 56.41], "rmse")
    ['56.40', None, '56.41']
    """
    values = list(values)
    number_format = column_format(values)
    return [None if value is None else shown_metric(value, metric, number_format) for value in values]


def _summary_rows(
    part: str, results: dict[str, Any], metric: str, nouns: dict[str, tuple[str, str]]
) -> list[SummaryRow]:
    """Return the summary rows of one part; ``nouns`` are the names of the parts' entries, as in ``NOUNS``.

    The part ``longtail`` divides the classes into thirds by frequency: head, middle and tail.
    """
    if part == "test":
        size = f"{shown_count(results['examples'])} examples"
        return [SummaryRow(part, size, results[metric], loss=results["loss"], others=_other_metrics([results], metric))]
    if part == "longtail":
        return [
            SummaryRow(f"{name} of the long tail", f"{third['classes']} classes", third[metric])
            for name, third in results["each"].items()
        ]
    if part.startswith("fine-tuned"):
        return _fine_tuning_rows(results, "unseen clients" if part.endswith("unseen") else "clients")
    return _distribution_rows(part, results, metric, *nouns[part])


def _other_metrics(scores: Sequence[Mapping[str, float]], metric: str) -> dict[str, float]:
    """Return the means of all metrics except the primary one and the loss, unless they are undefined somewhere.

    >>> _other_metrics([{"rmse": 1.0, "mae": 1.0, "r2": 0.5}, {"rmse": 2.0, "mae": 2.0, "r2": float("nan")}], "rmse")
    {'mae': 1.5}
    """
    values = {name: [each.get(name, nan) for each in scores] for name in scores[0]}
    shown = values.keys() - {metric, "loss", "examples", "domains"}
    return {name: fmean(each) for name, each in values.items() if name in shown and all(map(isfinite, each))}


def _fine_tuning_rows(results: dict[str, Any], noun: str) -> list[SummaryRow]:
    """Return two rows: the metric before and after clients fine-tune the model; ``noun`` names the clients."""
    clients = f"{results['count']} of {shown_count(results['of'])} {noun}"
    evaluated_on = f"{clients}, on {100 * (1 - results['share']):.0f} % of their data"
    training = f"{counted(results['epochs'], 'epoch')}, lr {results['lr']:g}"
    improved = f"{training}; {100 * results['improved']:.0f} % improved"
    return [
        SummaryRow("before fine-tuning", evaluated_on, results["before"]),
        SummaryRow("after fine-tuning", improved, results["after"]),
    ]


def _distribution_rows(part: str, results: dict[str, Any], metric: str, singular: str, plural: str) -> list[SummaryRow]:
    """Return the summary rows of a part that consists of several classes, clients, domains or corruptions.

    The first row has their mean. Depending on the part, further rows have the metric of pooled domains, the
    participation gap and the mean corruption error. ``singular`` and ``plural`` name an entry of the part.
    """
    size = f"{shown_count(results['count'])} {singular if results['count'] == 1 else plural}"
    # Training clients are evaluated on the examples that they train on, all other parts on held-out examples.
    name = {"clients": "clients (training data)", "domains": plural}.get(part, part)
    mean, std, worst, loss = (results.get(key) for key in ("mean", "std", "worst_tenth", "loss"))
    others = {} if part == "corruptions" else _other_metrics(list(results["each"].values()), metric)
    rows = [SummaryRow(name, size, mean, std, worst, loss, others)]
    for name in ("seen", "unseen"):
        if part == "domains" and name in results:
            pooled = results[name]
            domains = counted(pooled["domains"], singular)
            pooled_size = f"{domains} together, {shown_count(pooled['examples'])} examples"
            others = _other_metrics([pooled], metric)
            rows.append(SummaryRow(f"{name} {plural}", pooled_size, pooled[metric], loss=pooled["loss"], others=others))
    if "participation_gap" in results:
        gap = results["participation_gap"]
        rows.append(SummaryRow("participation gap", "training minus held-out clients", gap))
    if "mean_corruption_error" in results:
        error = results["mean_corruption_error"]
        rows.append(SummaryRow("mean corruption error", f"{size}, over severities", error))
    return rows


def _entry_table(part: str, noun: str, entries: dict[str, dict[str, float]], metric: str) -> ScreenTable:
    """Return a table with one row per class, domain or corruption; the primary metric comes first.

    Args:
        part: ``classes``, ``domains`` or ``corruptions``.
        noun: the noun for one of them, e.g. ``class``.
        entries: for each of them, its metrics and its number of examples.
        metric: name of the primary metric.
    """
    names = [name for name in next(iter(entries.values())) if name != "loss"]
    names.sort(key=lambda name: name != metric)  # False sorts first
    primary = "iou" if part == "classes" and metric == "miou" else metric  # the mean IoU of one class is its IoU
    columns = [noun, *(with_unit(primary) if name == metric else name for name in names)]
    cells: list[list[str | None]] = []
    for name in names:
        values = [entry[name] for entry in entries.values()]
        cells.append([shown_count(value) for value in values] if name == "examples" else _shown_column(values, metric))
    return table(columns, zip(entries, *cells, strict=True), numeric=columns[1:])
