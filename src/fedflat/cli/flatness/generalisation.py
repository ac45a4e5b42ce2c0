"""fedflat flatness gap, bounds: generalisation gaps of a run's models, and theoretical bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from fedflat.cli.flatness.clients import CLIENTS, EXAMPLES
from fedflat.cli.flatness.common import OutputFlags, heading_of, open_run, print_table, three_digits
from fedflat.cli.shared.flags import AVERAGE, RUN, SEED, with_flag_groups
from fedflat.cli.shared.screen import status_line

LARGEST_PLAIN_BOUND = 1e6
"""Larger bounds are shown as powers of ten."""


@with_flag_groups
def gap(
    run: Path = RUN,
    examples: int = typer.Option(10_000, "--examples", metavar="N", min=1, help="maximum number of training examples"),
    seed: int = SEED,
    *,
    output: OutputFlags,
) -> None:
    """Compute the generalisation gap of every saved model, and the participation gap.

    The generalisation gap is test minus training loss; the participation gap compares held-out with training clients.

    Example: fedflat flatness gap runs/fedmoswa-digits-seed0
    """
    from fedflat.reporting.figures.clients import gap_picture

    with status_line(output.silent) as progress:
        opened = open_run(run, output.silent, progress, seed=seed)
        opened.sample.gap_examples = examples
        gaps, metric = opened.gaps(), opened.problem.task.metric
    heading, document = heading_of(opened), {"run": str(run), "models": gaps}

    def show() -> None:
        titles = {
            "train_loss": "training loss",
            "test_loss": "test loss",
            "gap": "gap",
            f"{metric}_gap": f"{metric} gap",
        }
        if any("participation_gap" in point for points in gaps.values() for point in points):
            titles |= {"unseen_loss": "unseen loss", "participation_gap": "participation gap"}
        rows = []
        for model, points in gaps.items():
            for point in points:
                rows.append((model, point["round"], *(three_digits(point.get(key)) for key in titles)))
        print_table(heading, ["model", "round", *titles.values()], rows)

    output.publish(run / "flatness" / "gap", document, show, gap_picture(gaps, heading))


@with_flag_groups
def bounds(
    run: Path = RUN,
    average: str = AVERAGE,
    examples: int = EXAMPLES,
    clients: int = CLIENTS,
    seed: int = SEED,
    *,
    output: OutputFlags,
) -> None:
    """Estimate the constants of FedSWA's Theorem 5.1 along a run and evaluate its bounds.

    Example: fedflat flatness bounds runs/fedswa-digits-seed0
    """
    from fedflat.reporting.figures.clients import constants_picture

    with status_line(output.silent) as progress:
        opened = open_run(run, output.silent, progress, examples=examples, clients=clients, seed=seed)
        estimates = [*opened.constants(average), *(opened.logged_constants() if average == "server" else [])]
        estimates.sort(key=lambda estimate: estimate["round"])
        theory = opened.theory(estimates)
    heading, document = heading_of(opened), {"run": str(run), "rounds": estimates, **theory.document()}
    picture = constants_picture(estimates, f"{heading}, {average} model")

    def show() -> None:
        columns = ("after round", "L", "beta", "sigma", "sigma_g", "gradient diversity")
        rows = []
        for estimate in estimates:
            constants = [estimate["constants"][key] for key in ("lipschitz", "smoothness", "noise", "heterogeneity")]
            rows.append((estimate["round"], *map(three_digits, [*constants, estimate["gradients"]["diversity"]])))
        print_table(heading, columns, rows, text_columns=0)
        _print_bounds(document)

    trivial_predictor = "predicting the mean" if opened.problem.data.target_type == "numbers" else "random guessing"
    output.publish(run / "flatness" / "bounds", document, show, picture, _premises(document, trivial_predictor))


def _print_bounds(document: dict[str, Any]) -> None:
    """Print each algorithm's bound in three variants: as stated, tightened, and with the run's learning rates.

    Both latter variants use a step of the proof that is not in the paper.
    """
    from fedflat.experiment.analysis.theory import TITLES

    heading = "Bounds on the generalisation error, Theorem 5.1 (FedSAM: Theorem I.3), with the largest constants"
    columns = ("algorithm", "as stated", "tightened (ours)", "with the run's learning rates (ours)")
    variants = ("as_printed", "tightened", "at_own_rates")
    rows = [(title, *(_shown_bound(document[kind][name]) for kind in variants)) for name, title in TITLES.items()]
    print_table(heading, columns, rows)


def _shown_bound(bound: dict[str, Any]) -> str:
    """Return a bound as text; a bound that overflows a float has only a logarithm."""
    is_plain = bound["value"] is not None and bound["value"] < LARGEST_PLAIN_BOUND
    text = f"{bound['value']:.3g}" if is_plain else f"10^{bound['log10']:.1f}"
    flaws = [flaw for flaw in ("vacuous", "void") if bound[flaw]]
    return f"{text} ({', '.join(flaws)})" if flaws else text


def _premises(document: dict[str, Any], trivial_predictor: str) -> dict[str, object]:
    """Return texts by label: sizes and constants of the bounds, meaning of vacuous and void, the theorem's conditions.

    Args:
        document: the bounds, as written to the JSON file.
        trivial_predictor: whose loss a bound must stay below to say anything, e.g. ``random guessing``.
    """
    setting = document["setting"]
    premises: dict[str, object] = {
        "federation": f"m={setting['clients']} clients, n={setting['examples']:.4g} examples, "
        f"K={setting['steps']:.4g} steps (means over clients), T={setting['rounds']} rounds",
        "vacuous": f"at least {document['trivial']:.3g}, the loss of {trivial_predictor}",
        "void": "does not apply to this run, which violates a condition below",
        "constants": "L: a lower bound; beta: that of the mean loss, not of every example; sigma, sigma_g: estimates",
    }
    for condition in document["conditions"]:
        premises[condition["condition"]] = f"{'met' if condition['met'] else 'not met'}: {condition['here']}"
    return premises
