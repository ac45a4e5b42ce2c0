"""fedflat evaluate: per-class, per-client and per-domain metrics of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.shared.downloads import fetch_if_missing
from fedflat.cli.shared.flags import JSON, optional
from fedflat.cli.shared.screen import print_json, screen, shown_count, shown_metric, table, with_unit
from fedflat.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedflat.experiment.analysis.evaluation import Evaluation

LISTED = 20
"""Maximum number of classes, domains or clients listed individually."""
FINE_TUNING = "Fine-tuning"
ONE = {
    "classes": "class",
    "clients": "client",
    "unseen": "unseen client",
    "domains": "domain",
    "corruptions": "corruption",
}


def evaluate(
    folder: Path = typer.Argument(metavar="FOLDER", help="the folder of a run"),
    model: str = typer.Option("server", "--model", metavar="NAME", help="model to evaluate, e.g. wima"),
    on: str | None = optional(
        "--on",
        "comma-separated: test, classes, longtail, clients, unseen, domains, corruptions, fine-tuned[-unseen]",
        "all that there is",
        metavar="NAMES",
    ),
    clients: int = typer.Option(
        20, "--tune-clients", min=1, help="clients that fine-tune", rich_help_panel=FINE_TUNING
    ),
    epochs: int = typer.Option(1, "--tune-epochs", min=1, help="epochs of fine-tuning", rich_help_panel=FINE_TUNING),
    share: float = typer.Option(
        0.8,
        "--tune-share",
        help="fraction of a client's examples for fine-tuning; the rest is for evaluation",
        rich_help_panel=FINE_TUNING,
    ),
    lr: float | None = optional("--tune-lr", "learning rate for fine-tuning", "the run's", rich_help_panel=FINE_TUNING),
    as_json: bool = JSON,
) -> None:
    """Evaluate a model on the test set, per class, client and domain, under corruptions, and after fine-tuning.

    Example: fedflat evaluate runs/fedavg-digits-seed0 --on test,classes,clients
    """
    from fedflat.experiment.analysis.evaluation import PARTS, evaluate
    from fedflat.experiment.analysis.fine_tuning import FineTuning
    from fedflat.experiment.store.run_folder import load_record

    record = load_record(folder)
    wanted = tuple(PARTS) if on is None else [name.strip() for name in on.split(",") if name.strip()]
    if not wanted:
        raise UserError(f"--on is empty; expected a comma-separated list of {', '.join(PARTS)}")
    tuning = FineTuning(clients, epochs, share, lr)
    fetch_if_missing(record.config, as_json)
    with _told(as_json) as progress:
        found = evaluate(record, model, wanted, fine_tuning=tuning, progress=progress)
    if not found.parts:
        raise UserError("; ".join(f"{part} is not available: {reason}" for part, reason in found.missing.items()))
    if as_json:
        print_json(
            {"folder": folder, "algorithm": record.config.algorithm, "seed": record.config.seed, **found.document()}
        )
    else:
        _print(
            found, f"{record.config.algorithm}   {record.config.data.dataset}, seed {record.config.seed}, model {model}"
        )


@contextmanager
def _told(silent: bool) -> Iterator[Callable[[str], None]]:
    """Status line on a terminal."""
    console = screen(stderr=True)
    if silent or not console.is_terminal:
        yield lambda part: None
        return
    with console.status("evaluating") as status:
        yield lambda part: status.update(f"evaluating on {part}")


def _print(found: Evaluation, heading: str) -> None:
    console, metric = screen(), found.metric
    columns = ("on", "of", with_unit(metric), "standard deviation", "worst 10 %", "loss")
    rows = [row for part, figures in found.parts.items() for row in _summary(part, figures, metric)]
    console.print()
    console.print(heading, style="bold", markup=False)
    console.print()
    console.print(table(columns, rows, numbers=columns[2:]))
    for part, figures in found.parts.items():
        if part in ("classes", "domains", "corruptions") and len(figures["each"]) <= LISTED:
            console.print()
            console.print(_each(part, figures["each"], metric))
    if found.missing:
        console.print()
        for part, reason in found.missing.items():
            console.print(f"Not on {part}: {reason}.", style="dim", markup=False)


def _summary(part: str, figures: dict[str, Any], metric: str) -> Iterator[tuple[object, ...]]:
    """Table rows of one part."""

    def shown(name: str, inside: dict[str, Any] = figures) -> str | None:
        return shown_metric(inside[name], metric) if name in inside else None

    loss = shown_metric(figures["loss"], "loss") if "loss" in figures else None
    if part == "test":
        yield part, f"{shown_count(figures['examples'])} examples", shown(metric), None, None, loss
    elif part == "longtail":
        for name, third in figures["each"].items():
            yield f"{name} of the long tail", f"{third['classes']} classes", shown(metric, third), None, None, None
    elif part.startswith("fine-tuned"):
        whose = (
            f"{figures['count']} of {shown_count(figures['of'])} {'unseen ' if part.endswith('unseen') else ''}clients"
        )
        epochs = f"{figures['epochs']} epoch{'s' if figures['epochs'] > 1 else ''}, lr {figures['lr']:g}"
        yield (
            "before fine-tuning",
            f"{whose}, on {100 * (1 - figures['share']):.0f} % of their data",
            shown("before"),
            None,
            None,
            None,
        )
        yield (
            "after fine-tuning",
            f"{epochs}; {100 * figures['improved']:.0f} % improved",
            shown("after"),
            None,
            None,
            None,
        )
    else:
        several = "unseen clients" if part == "unseen" else part
        of = f"{shown_count(figures['count'])} {several if figures['count'] != 1 else ONE[part]}"
        yield part, of, shown("mean"), shown("std"), shown("worst_tenth"), loss
        for name in ("seen", "unseen"):
            if part == "domains" and name in figures:
                pooled = figures[name]
                yield (
                    f"{name} domains",
                    _of(pooled),
                    shown(metric, pooled),
                    None,
                    None,
                    shown_metric(pooled["loss"], "loss"),
                )
        if "participation_gap" in figures:
            yield "participation gap", "training minus held-out clients", shown("participation_gap"), None, None, None
        if "mean_corruption_error" in figures:
            yield "mean corruption error", f"{of}, over severities", shown("mean_corruption_error"), None, None, None


def _of(pooled: dict[str, Any]) -> str:
    domains = f"{shown_count(pooled['domains'])} domain{'s' if pooled['domains'] > 1 else ''}"
    return f"{domains} together, {shown_count(pooled['examples'])} examples"


def _each(part: str, each: dict[str, dict[str, float]], metric: str) -> Any:
    """A table with one row per class, domain or corruption."""
    figures = [name for name in next(iter(each.values())) if name != "loss"]
    figures.sort(key=lambda name: name != metric)
    own = "iou" if part == "classes" and metric == "miou" else metric  # per class, the mean IoU is its IoU
    columns = (ONE[part], *(with_unit(own) if name == metric else name for name in figures))
    rows = (
        (
            one,
            *(
                shown_count(scores[name]) if name == "examples" else shown_metric(scores[name], metric)
                for name in figures
            ),
        )
        for one, scores in each.items()
    )
    return table(columns, rows, numbers=columns[1:])
