"""Reproduce the CIFAR-10, LeNet-5 column of Table 2 of the FedSWA paper for five methods, and tune learning rates.

Examples:
    python studies/fedswa_table2.py OUT --data-dir DATA --device cuda --precision bf16     # all three stages
    python studies/fedswa_table2.py OUT ... --only-stage 1 --only fedavg scaffold          # one process of several

Stage 1 runs every algorithm with the protocol's learning rate, 0.1. The paper searched the learning rate per method
but does not print the results. Stage 2 therefore searches it for the two algorithms that fall short most: short runs
over a grid, scored on a validation split of the training data and never on the test set. Stage 3 runs these two in full
with the selected learning rates, unless that is 0.1.

Each run writes OUT/numbers/RUN.json when it finishes, so several processes can share a study. OUT/numbers.json
collects all runs, OUT/table.md is the table. Finished runs are not repeated and interrupted ones are resumed.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from study import mean_and_std, plain, trained

from fedflat.errors import UserError
from fedflat.experiment.store.files import create_folder, write_atomically
from fedflat.papers import find_table
from fedflat.papers.cells import Cell
from fedflat.papers.document import markdown

ALGORITHMS = ("fedavg", "fedsam", "scaffold", "fedswa", "fedmoswa")
COLUMN = "cifar10-lenet-5"
TARGET = 0.78
"""Accuracy whose first round the paper reports."""
STAGES = ("1", "2", "3", "table")
GAP = 2.0
"""Differences larger than this many points are listed below the table."""
RunNumbers = dict[str, Any]


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", type=Path, help="directory of runs, numbers and the table")
    add("--only-stage", choices=STAGES, help="run one stage; table runs nothing (default: all)")
    add("--only", nargs="+", choices=ALGORITHMS, default=ALGORITHMS, help="algorithms that this process runs")
    add("--tune", nargs="+", choices=ALGORITHMS, help="algorithms to tune (default: the two that fall short most)")
    add("--rounds", type=int, default=1000)
    add("--eval-every", type=int, default=10, help="rounds between evaluations (default: %(default)s)")
    add("--seeds", type=int, nargs="+", default=(0,))
    add("--tune-rounds", type=int, default=200, help="rounds per run of the search (default: %(default)s)")
    grid = (0.01, 0.03, 0.1, 0.3)
    add("--grid", type=float, nargs="+", default=grid, help="learning rates of the search (default: %(default)s)")
    add("--validation", type=float, default=0.1, help="share of the training data held out in the search")
    add("--dataset", default="cifar10", help="use another dataset to try the study (default: %(default)s)")
    add("--data-dir", type=Path, help="directory of its files")
    add("--model", default="cnn", help="model; the paper's LeNet-5 is cnn (default: %(default)s)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--precision", default="tf32", choices=("float32", "tf32", "bf16"))
    add("--compile", default="auto", choices=("auto", "on", "off"))
    add("--draw", type=Path, metavar="PNG", help="also draw the curves of the full runs")
    return parser.parse_args(words)


def cell(algorithm: str, number: str = "accuracy") -> Cell:
    """The cell of an algorithm: its ``accuracy``, or its ``rounds`` to the target."""
    return find_table("fedswa/table2").cells[f"{algorithm}/{COLUMN}-{number}"]


def published(algorithm: str) -> float:
    """The published accuracy in per cent."""
    number = cell(algorithm).published
    assert number is not None
    assert number.value is not None
    return number.value


def protocol_lr() -> float:
    """The learning rate of stage 1."""
    return cell(ALGORITHMS[0]).configs[0].training.lr


class Study:
    """The finished runs of the study, whichever process ran them, and the training of new ones."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        names = ("dataset", "model", "rounds", "eval_every", "tune_rounds", "validation", "precision")
        self.about = {name: getattr(options, name) for name in names}
        create_folder(options.out / "numbers")

    def runs(self) -> dict[str, RunNumbers]:
        """All finished runs by name."""
        runs = {}
        for path in sorted((self.options.out / "numbers").glob("*.json")):
            runs[path.stem] = json.loads(path.read_text())
            if runs[path.stem]["about"] != self.about:
                raise UserError(f"{path} belongs to a study with other settings; choose another directory")
        return runs

    def select(self, kind: str, algorithm: str) -> list[RunNumbers]:
        """The finished ``full`` or ``tune`` runs of an algorithm."""
        return [run for run in self.runs().values() if (run["kind"], run["algorithm"]) == (kind, algorithm)]

    def full(self, algorithm: str, lr: float) -> list[RunNumbers]:
        """The finished full runs of an algorithm with a learning rate, one per seed."""
        return [run for run in self.select("full", algorithm) if run["lr"] == lr]

    def train(self, kind: str, algorithm: str, lr: float, seed: int) -> None:
        """Train one run and write its numbers, unless it has finished before."""
        name, options = f"{kind}-{algorithm}-{lr:g}-{seed}", self.options
        if name in self.runs():
            return
        print(f"{name} ...", flush=True)
        start = time.monotonic()
        out, base = options.out / "runs" / f"{kind}-{lr:g}", cell(algorithm).configs[0]
        record = trained(algorithm, out, base=base, **self.settings(kind, lr, seed))
        split = "validation" if kind == "tune" else "test"
        curve = [(line["round"], line[split]["server"].get("accuracy")) for line in record.history]
        numbers = {
            "about": self.about,
            "kind": kind,
            "algorithm": algorithm,
            "lr": lr,
            "seed": seed,
            "status": record.status,
            split: None if record.status == "diverged" else curve[-1][1],
            "curve": curve,
            "seconds": round(record.seconds, 2),
        }
        write_atomically(options.out / "numbers" / f"{name}.json", json.dumps(plain(numbers)) + "\n")
        self.write()
        print(f"{name}: {split} {percent(numbers[split])} after {time.monotonic() - start:.0f} s", flush=True)

    def settings(self, kind: str, lr: float, seed: int) -> dict[str, Any]:
        """The settings of a run that differ from the paper's protocol."""
        options, is_search = self.options, kind == "tune"
        return {
            "dataset": options.dataset,
            "data_dir": None if options.data_dir is None else str(options.data_dir),
            "model": options.model,
            "data__augmentation": "crop-flip" if options.dataset == "cifar10" else "none",
            "data__validation": options.validation if is_search else 0.0,
            "rounds": options.tune_rounds if is_search else options.rounds,
            "eval_every": options.eval_every,
            "lr": lr,
            "seed": seed,
            "device": options.device,
            "workers": 1 if options.dataset == "digits" else None,  # starting processes would take longer
            "engine__precision": options.precision,
            "engine__compile": options.compile,
        }

    def write(self) -> None:
        """Write all numbers to one file, and the table."""
        document = json.dumps({"about": self.about, "runs": self.runs()}, indent=1)
        write_atomically(self.options.out / "numbers.json", document + "\n")
        write_atomically(self.options.out / "table.md", table(self))


def first_stage(study: Study) -> None:
    """Run every algorithm with the protocol's learning rate."""
    for seed in study.options.seeds:
        for algorithm in study.options.only:
            study.train("full", algorithm, protocol_lr(), seed)


def second_stage(study: Study) -> None:
    """Search the learning rate of the algorithms that fall short most."""
    for algorithm in to_tune(study):
        for lr in study.options.grid if algorithm in study.options.only else ():
            study.train("tune", algorithm, lr, study.options.seeds[0])


def third_stage(study: Study) -> None:
    """Run these algorithms in full with the selected learning rates."""
    for algorithm in to_tune(study):
        lr = selected_lr(study, algorithm)
        if lr is None:
            raise UserError(f"the learning rate search of {algorithm} has not finished; run stage 2 first")
        for seed in study.options.seeds if algorithm in study.options.only else ():
            study.train("full", algorithm, lr, seed)


def to_tune(study: Study) -> list[str]:
    """The algorithms to tune: those of ``--tune``, or the two that fall short most."""
    if study.options.tune:
        return list(study.options.tune)
    gaps = {algorithm: gap(algorithm, study.full(algorithm, protocol_lr())) for algorithm in ALGORITHMS}
    missing = [algorithm for algorithm, difference in gaps.items() if difference is None]
    if missing:
        names = ", ".join(missing)
        raise UserError(f"which two fall short most is unknown without {names}; run stage 1, or name two with --tune")
    return sorted(ALGORITHMS, key=lambda algorithm: gaps[algorithm] or 0.0)[:2]


def selected_lr(study: Study, algorithm: str) -> float | None:
    """The learning rate with the highest validation accuracy; None before the search has finished.

    If every run of the search diverged, this is the protocol's.
    """
    runs = study.select("tune", algorithm)
    scores = {run["lr"]: -1.0 if run["validation"] is None else run["validation"] for run in runs}
    if not set(study.options.grid) <= set(scores):
        return None
    best = max(scores, key=lambda lr: scores[lr])
    return protocol_lr() if scores[best] < 0 else best


def gap(algorithm: str, runs: Sequence[RunNumbers]) -> float | None:
    """Measured minus published accuracy in points; None without runs. A diverged run counts as 0 %."""
    return fmean(100 * (run["test"] or 0.0) for run in runs) - published(algorithm) if runs else None


def percent(value: float | None) -> str:
    """An accuracy as text; None means that the run diverged."""
    return "diverged" if value is None else f"{100 * value:.2f} %"


def mean_accuracy(runs: Sequence[RunNumbers]) -> str:
    """Mean and standard deviation over seeds in per cent."""
    values = [100 * run["test"] for run in runs if run["test"] is not None]
    return "diverged" if runs and not values else mean_and_std(values)


def rounds_to_target(runs: Sequence[RunNumbers], rounds: int) -> str:
    """The first evaluated round at the paper's target, averaged over seeds; ``1000+`` if a seed did not reach it."""
    first = [next((at for at, value in run["curve"] if value is not None and value >= TARGET), None) for run in runs]
    reached = [at for at in first if at is not None]
    return f"{fmean(reached):.0f}" if reached and len(reached) == len(first) else f"{rounds}+" if first else "–"


def table_lines(study: Study) -> Iterator[tuple[str, float, list[RunNumbers]]]:
    """Algorithm, learning rate and runs of each line of the table."""
    for algorithm in ALGORITHMS:
        for lr in dict.fromkeys((protocol_lr(), selected_lr(study, algorithm))):
            if lr is not None and (runs := study.full(algorithm, lr)):
                yield algorithm, lr, runs


def table(study: Study) -> str:
    """A Markdown table of published and measured numbers, with notes on the searches and on large differences."""
    options = study.options
    heads = ("algorithm", "lr", "published", "measured", "difference", "rounds to 78 %, published", "measured")
    rows, large = [], []
    for algorithm, lr, runs in table_lines(study):
        accuracy, rounds = cell(algorithm).published, cell(algorithm, "rounds").published
        difference = gap(algorithm, runs)
        assert accuracy is not None
        assert rounds is not None
        assert difference is not None
        numbers = (accuracy.text, mean_accuracy(runs), f"{difference:+.1f}", rounds.text)
        rows.append((f"`{algorithm}`", f"{lr:g}", *numbers, rounds_to_target(runs, options.rounds)))
        if abs(difference) > GAP:
            large.append(f"`{algorithm}` at {lr:g} ({difference:+.1f})")
    setting = f"{options.dataset}, `{options.model}`, {options.precision}"
    notes = [
        f"{setting}; accuracy after {options.rounds} rounds, evaluated every {options.eval_every}.",
        *(search_note(study, algorithm) for algorithm in ALGORITHMS),
        f"Differences above {GAP:g} points: {', '.join(large) or 'none'}.",
    ]
    return "\n".join([markdown(heads, rows), "", *(note for note in notes if note), ""])


def search_note(study: Study, algorithm: str) -> str:
    """How the learning rate of an algorithm was selected; empty if it was not tuned."""
    lr = selected_lr(study, algorithm)
    if lr is None:
        return ""
    runs = sorted(study.select("tune", algorithm), key=lambda run: float(run["lr"]))
    scores = ", ".join(f"{run['lr']:g}: {percent(run['validation'])}" for run in runs)
    share = f"{100 * study.options.validation:g} % of the training data"
    when = f"after {study.options.tune_rounds} rounds"
    return f"Learning rate of `{algorithm}`: {lr:g}, by accuracy on {share} {when} ({scores})."


def draw(study: Study, path: Path) -> None:
    """Draw the curves of the full runs."""
    from fedflat.reporting.figures.curves import curves

    drawn = [
        (f"{algorithm}, lr {lr:g}", [history(run) for run in runs], "server")
        for algorithm, lr, runs in table_lines(study)
    ]
    if not drawn:
        raise UserError("no finished run to draw; run stage 1 first")
    content = io.BytesIO()
    curves(drawn, "accuracy").savefig(content, format="png", dpi=200)
    write_atomically(path, content.getvalue())


def history(run: RunNumbers) -> list[dict[str, Any]]:
    """The curve of a run in the form of a record's history."""
    return [{"round": at, "test": {"server": {"accuracy": value}}} for at, value in run["curve"]]


def main(words: Sequence[str] | None = None) -> str:
    """Run the missing parts of the chosen stages, and return the table."""
    options = parse_arguments(words)
    study = Study(options)
    for name, stage in zip(STAGES, (first_stage, second_stage, third_stage), strict=False):
        if options.only_stage in (None, name):
            stage(study)
    study.write()
    if options.draw is not None:
        draw(study, options.draw)
    return table(study)


if __name__ == "__main__":
    try:
        print(main())
    except UserError as error:
        raise SystemExit(f"fedswa_table2.py: {error}") from None
