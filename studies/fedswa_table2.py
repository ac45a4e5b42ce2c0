"""The CIFAR-10 column of LeNet-5 in Table 2 of the FedSWA paper, published beside measured.

python studies/fedswa_table2.py OUT --data-dir FOLDER --device cuda --precision bf16   all three stages
python studies/fedswa_table2.py OUT ... --only-stage 1 --only fedavg scaffold             a part, while other processes do the rest

Stage 1 runs every algorithm at the rate of the protocol, 0.1. The paper searched the rate per method and prints no winner, so stage 2
looks for one for the two algorithms that fall short most: short runs over a grid, scored on a validation split of the training data,
never on the test set. Stage 3 runs these two in full at the chosen rates, where they are not 0.1 again.

Each run has a file in OUT/numbers as soon as it is over, so that several processes can work on one study; OUT/numbers.json is all of them
together, OUT/table.md the table. What is there is not run again, and what was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from study import plain, trained

from fedflat.errors import UserError
from fedflat.experiment.store.atomic_files import create_folder, write_whole
from fedflat.papers import find_table
from fedflat.papers.cells import Cell

ALGORITHMS = ("fedavg", "fedsam", "scaffold", "fedswa", "fedmoswa")
COLUMN = "cifar10-lenet-5"
STAGES = ("1", "2", "3", "table")
GAP = 2.0
"""Points from which on a difference is named below the table."""
Numbers = dict[str, Any]


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where runs, numbers and the table go")
    parser.add_argument(
        "--only-stage", choices=STAGES, help="one stage alone; table runs nothing (default: all of them)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=ALGORITHMS, default=ALGORITHMS, help="the algorithms that this process runs"
    )
    parser.add_argument(
        "--tune", nargs="+", choices=ALGORITHMS, help="whose rate is searched (default: the two that fall short most)"
    )
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--eval-every", type=int, default=10, help="rounds between evaluations (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0,))
    parser.add_argument(
        "--tune-rounds", type=int, default=200, help="rounds of a run of the search (default: %(default)s)"
    )
    parser.add_argument(
        "--grid",
        type=float,
        nargs="+",
        default=(0.01, 0.03, 0.1, 0.3),
        help="rates of the search (default: %(default)s)",
    )
    parser.add_argument(
        "--validation", type=float, default=0.1, help="share of the training data held out in the search"
    )
    parser.add_argument(
        "--dataset", default="cifar10", help="another dataset, to try the study out (default: %(default)s)"
    )
    parser.add_argument("--data-dir", type=Path, help="where its files are (default: as everywhere in fedflat)")
    parser.add_argument("--model", default="cnn", help="the paper's LeNet-5 is cnn (default: %(default)s)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--precision", default="tf32", choices=("float32", "tf32", "bf16"))
    parser.add_argument("--compile", default="auto", choices=("auto", "on", "off"))
    parser.add_argument("--draw", type=Path, metavar="PNG", help="also draw the curves of the full runs there")
    return parser.parse_args(given)


def cell(algorithm: str, number: str = "accuracy") -> Cell:
    """The cell of an algorithm in the paper's table: its accuracy, or its rounds to the target."""
    return find_table("fedswa/table2").cells[f"{algorithm}/{COLUMN}-{number}"]


def published(algorithm: str) -> float:
    """The printed accuracy, in per cent."""
    found = cell(algorithm).published
    assert found is not None
    assert found.value is not None
    return found.value


def protocol_rate() -> float:
    """The rate of stage 1."""
    return cell(ALGORITHMS[0]).configs[0].training.lr


class Study:
    """The runs of the study that are over, in this process or in another, and those that this one adds."""

    def __init__(self, wanted: argparse.Namespace) -> None:
        self.wanted = wanted
        names = ("data", "model", "rounds", "every", "tune_rounds", "validation", "precision")
        self.about = {name: getattr(wanted, name) for name in names}
        create_folder(wanted.out / "numbers")

    def runs(self) -> dict[str, Numbers]:
        """Every run that is over, by name."""
        found = {
            path.stem: json.loads(path.read_text()) for path in sorted((self.wanted.out / "numbers").glob("*.json"))
        }
        for name, one in found.items():
            if one["about"] != self.about:
                raise UserError(
                    f"{self.wanted.out / 'numbers' / name}.json is of a study with other settings; choose another folder"
                )
        return found

    def full(self, algorithm: str, lr: float) -> list[Numbers]:
        """The full runs of an algorithm at a rate, one per seed that is there."""
        return [
            one for one in self.runs().values() if (one["kind"], one["algorithm"], one["lr"]) == ("full", algorithm, lr)
        ]

    def train(self, kind: str, algorithm: str, lr: float, seed: int) -> None:
        """One run, unless it is there, and its numbers on disk."""
        name, wanted = f"{kind}-{algorithm}-{lr:g}-{seed}", self.wanted
        path = wanted.out / "numbers" / f"{name}.json"
        if name in self.runs():
            return
        print(f"{name} ...", flush=True)
        begun = time.monotonic()
        out, base = wanted.out / "runs" / f"{kind}-{lr:g}", cell(algorithm).configs[0]
        record = trained(algorithm, out, base=base, **self.settings(kind, lr, seed))
        part = "validation" if kind == "tune" else "test"
        curve = [(line["round"], line[part]["server"].get("accuracy")) for line in record.history]
        one = {
            "about": self.about,
            "kind": kind,
            "algorithm": algorithm,
            "lr": lr,
            "seed": seed,
            "status": record.status,
            part: None if record.status == "diverged" else curve[-1][1],
            "curve": curve,
            "seconds": round(record.seconds, 2),
        }
        write_whole(path, json.dumps(plain(one)) + "\n")
        self.write()
        print(f"{name}: {part} {percent(one[part])} after {time.monotonic() - begun:.0f} s", flush=True)

    def settings(self, kind: str, lr: float, seed: int) -> Numbers:
        """What a run has besides the protocol of the paper."""
        wanted = self.wanted
        return {
            "dataset": wanted.data,
            "data_dir": None if wanted.data_dir is None else str(wanted.data_dir),
            "model": wanted.model,
            "data__augmentation": "crop-flip" if wanted.data == "cifar10" else "none",
            "data__validation": wanted.validation if kind == "tune" else 0.0,
            "rounds": wanted.tune_rounds if kind == "tune" else wanted.rounds,
            "eval_every": wanted.every,
            "lr": lr,
            "seed": seed,
            "device": wanted.device,
            "workers": 1 if wanted.data == "digits" else None,  # so small that starting processes would take longer
            "engine__precision": wanted.precision,
            "engine__compile": wanted.compile,
        }

    def write(self) -> None:
        """All numbers in one file, and the table."""
        write_whole(
            self.wanted.out / "numbers.json", json.dumps({"about": self.about, "runs": self.runs()}, indent=1) + "\n"
        )
        write_whole(self.wanted.out / "table.md", table(self))


# --- the stages --------------------------------------------------------------------------------------------------------------------------


def first_stage(study: Study) -> None:
    """Every algorithm at the rate of the protocol."""
    for seed in study.wanted.seeds:
        for algorithm in study.wanted.only:
            study.train("full", algorithm, protocol_rate(), seed)


def second_stage(study: Study) -> None:
    """Short runs over the grid, for those that fall short most."""
    for algorithm in to_tune(study):
        for lr in study.wanted.grid if algorithm in study.wanted.only else ():
            study.train("tune", algorithm, lr, study.wanted.seeds[0])


def third_stage(study: Study) -> None:
    """Full runs at the chosen rates."""
    for algorithm in to_tune(study):
        lr = chosen_rate(study, algorithm)
        if lr is None:
            raise UserError(f"the search for the rate of {algorithm} is not over; run stage 2 first")
        for seed in study.wanted.seeds if algorithm in study.wanted.only else ():
            study.train("full", algorithm, lr, seed)


def to_tune(study: Study) -> list[str]:
    """The algorithms whose rate is searched: those named, or the two that fall short most."""
    if study.wanted.tune:
        return list(study.wanted.tune)
    gaps = {algorithm: gap(algorithm, study.full(algorithm, protocol_rate())) for algorithm in ALGORITHMS}
    missing = [algorithm for algorithm, found in gaps.items() if found is None]
    if missing:
        raise UserError(
            f"the two that fall short most are not known without {', '.join(missing)}; run stage 1, or name two with --tune"
        )
    return sorted(ALGORITHMS, key=lambda algorithm: gaps[algorithm] or 0.0)[:2]


def chosen_rate(study: Study, algorithm: str) -> float | None:
    """The rate of the grid with the highest validation accuracy; None while runs are missing, the protocol's where all diverged."""
    runs = [one for one in study.runs().values() if one["kind"] == "tune" and one["algorithm"] == algorithm]
    scores = {one["lr"]: -1.0 if one["validation"] is None else one["validation"] for one in runs}
    if not set(study.wanted.grid) <= set(scores):
        return None
    best = max(scores, key=lambda lr: scores[lr])
    return protocol_rate() if scores[best] < 0 else best


# --- what came of it ---------------------------------------------------------------------------------------------------------------------


def gap(algorithm: str, runs: Sequence[Numbers]) -> float | None:
    """Measured less published, in points; None without a run. A run that diverged counts as 0 %."""
    return fmean(100 * (one["test"] or 0.0) for one in runs) - published(algorithm) if runs else None


def percent(value: float | None) -> str:
    """An accuracy in per cent."""
    return "diverged" if value is None else f"{100 * value:.2f} %"


def shown(runs: Sequence[Numbers]) -> str:
    """Mean and standard deviation over seeds, in per cent."""
    values = [100 * one["test"] for one in runs if one["test"] is not None]
    if not values:
        return "diverged" if runs else "–"
    return f"{fmean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


def reached(algorithm: str, runs: Sequence[Numbers], rounds: int) -> str:
    """The first evaluated round at the paper's target, or that it was not reached."""
    target = cell(algorithm, "rounds").number.target  # type: ignore[attr-defined]
    firsts = [next((at for at, value in one["curve"] if value is not None and value >= target), None) for one in runs]
    there = [at for at in firsts if at is not None]
    return f"{fmean(there):.0f}" if there and len(there) == len(firsts) else f"{rounds}+" if firsts else "–"


def lines(study: Study) -> Iterator[tuple[str, float, list[Numbers]]]:
    """Algorithm, rate and runs of every line of the table."""
    for algorithm in ALGORITHMS:
        for lr in dict.fromkeys((protocol_rate(), chosen_rate(study, algorithm))):
            if lr is not None and (runs := study.full(algorithm, lr)):
                yield algorithm, lr, runs


def table(study: Study) -> str:
    """Published, measured and difference in Markdown, with how rates were chosen and the gaps that need a reading."""
    wanted = study.wanted
    heads = ("algorithm", "lr", "published", "measured", "difference", "rounds to 78 %, published", "measured")
    rows = [heads, ("---",) * len(heads)]
    wide = []
    for algorithm, lr, runs in lines(study):
        accuracy, rounds, off = cell(algorithm).published, cell(algorithm, "rounds").published, gap(algorithm, runs)
        assert accuracy is not None
        assert rounds is not None
        assert off is not None
        to_target = reached(algorithm, runs, wanted.rounds)
        rows.append((f"`{algorithm}`", f"{lr:g}", accuracy.text, shown(runs), f"{off:+.1f}", rounds.text, to_target))
        wide += [f"`{algorithm}` at {lr:g} ({off:+.1f})"] * (abs(off) > GAP)
    notes = [
        f"{wanted.data}, `{wanted.model}`, {wanted.precision}; accuracy after {wanted.rounds} rounds, evaluated every {wanted.every}.",
        *(searched(study, algorithm) for algorithm in ALGORITHMS),
        f"Differences above {GAP:g} points: {', '.join(wide) or 'none'}.",
    ]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", *(note for note in notes if note), ""])


def searched(study: Study, algorithm: str) -> str:
    """How an algorithm's rate was chosen; empty where it was not."""
    lr = chosen_rate(study, algorithm)
    if lr is None:
        return ""
    runs = [one for one in study.runs().values() if one["kind"] == "tune" and one["algorithm"] == algorithm]
    scores = ", ".join(
        f"{one['lr']:g}: {percent(one['validation'])}" for one in sorted(runs, key=lambda one: float(one["lr"]))
    )
    wanted = study.wanted
    held_out = f"{100 * wanted.validation:g} % of the training data"
    return f"Rate of `{algorithm}`: {lr:g}, by accuracy on {held_out} after {wanted.tune_rounds} rounds ({scores})."


def draw(study: Study, path: Path) -> None:
    """The curves of the full runs."""
    import io

    from fedflat.reporting.figures.curves import curves

    drawn = [
        (f"{algorithm}, rate {lr:g}", [history(one) for one in runs], "server") for algorithm, lr, runs in lines(study)
    ]
    if not drawn:
        raise UserError("there is no run to draw yet; run stage 1 first")
    picture = io.BytesIO()
    curves(drawn, "accuracy").savefig(picture, format="png", dpi=200)
    write_whole(path, picture.getvalue())


def history(one: Numbers) -> list[Numbers]:
    """The curve of a run as its evaluations."""
    return [{"round": at, "test": {"server": {"accuracy": value}}} for at, value in one["curve"]]


def main(given: Sequence[str] | None = None) -> str:
    """Run what is not there yet of the stages asked for, and return the table."""
    wanted = arguments(given)
    study = Study(wanted)
    for name, stage in zip(STAGES, (first_stage, second_stage, third_stage), strict=False):
        if wanted.only_stage in (None, name):
            stage(study)
    study.write()
    if wanted.draw is not None:
        draw(study, wanted.draw)
    return table(study)


if __name__ == "__main__":
    try:
        print(main())
    except UserError as error:
        raise SystemExit(f"fedswa_table2.py: {error}") from None
