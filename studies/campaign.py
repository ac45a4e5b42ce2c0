"""Measure published tables at full scale: a queue of runs that takes whatever GPU time there is.

Example:
    python studies/campaign.py --data-folder DATA --minutes 25 --jobs 3
    python studies/campaign.py --list

The queue lists the cells of the papers' tables, the most informative first. Every (cell, seed) without a result runs next, as
long as it fits into the remaining time. Each finished run leaves one JSON file under results/, written atomically. A process that
is killed loses at most the rounds since the last checkpoint; the same command continues. Several jobs share one GPU: while one
compiles, the others train.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

import fedflat
from fedflat.algorithms import algorithm
from fedflat.errors import UserError
from fedflat.experiment.callback import Callback
from fedflat.experiment.claims import Held, claimed
from fedflat.experiment.compare import folder_name, run_each
from fedflat.experiment.config import Config, config
from fedflat.experiment.files import create_folder, write_whole
from fedflat.experiment.record import Record
from fedflat.papers import find_table
from fedflat.papers.afterwards import Asked, measure
from fedflat.papers.cells import Cell
from fedflat.papers.numbers import OfModels, RoundsTo
from fedflat.papers.outcome import Measured, formed
from fedflat.papers.plan import Scale
from fedflat.report.summary import series, summarise

FORMAT = 1
WINDOW, DECAY = 100, 0.99
SETUP_SECONDS = 35.0
SAMPLES_PER_SECOND = {"cnn": 600_000, "resnet18": 45_000, "resnet18(stem=torchvision)": 150_000, "resnet20": 150_000, "vgg11": 200_000}
"""One gradient per sample, bf16, on one H200; a prior until a run of the same experiment has been measured."""
HOST_SECONDS = 0.015
"""Least duration of a round, which the host needs to queue it."""


@dataclass(frozen=True)
class Stage:
    """Cells that are measured together: with the same seeds, precision and interval between evaluations."""

    table: str
    cells: tuple[str, ...]
    seeds: tuple[int, ...]
    every: int | None = None
    """Rounds between evaluations; None keeps the protocol's."""
    precision: str = "bf16"


def _rows(column: str, *rows: str) -> tuple[str, ...]:
    return tuple(f"{row}/{column}" for row in rows)


TEN = ("fedavg", "scaffold", "fedsam", "fedswa", "fedmoswa", "fedacg", "mofedsam", "fedlesam", "fedasam", "feddyn")
SEVEN = ("fedavg", "fedmoswa", "fedswa", "scaffold", "fedacg", "fedsam", "mofedsam")
WMSAM = ("fedavg", "fedwmsam-ours", "scaffold", "fedsam", "mofedsam", "fedsmoo", "fedlesam-s-d")
FLAT = ("fedavg-e-1", "fedsam", "fedasam", "fedavg-swa", "fedsam-swa", "fedasam-swa")
FOUR = ("fedavg", "scaffold", "feddyn", "fedprox")

QUEUE = (
    Stage("fedswa/table2", _rows("cifar100-lenet-5-*", *TEN), (0,), 10),
    Stage("fedswa/table2", _rows("cifar100-lenet-5-*", *TEN), (1,), 10),
    Stage("fedswa/table2", _rows("cifar100-lenet-5-*", *TEN), (2,), 10),
    Stage("fedswa/table2", _rows("cifar10-lenet-5-*", *TEN), (0,), 10),
    Stage("fedswa/table2", _rows("cifar10-lenet-5-*", *TEN), (1,), 10),
    Stage("fedswa/table2", _rows("cifar10-lenet-5-*", *TEN), (2,), 10),
    Stage("fedwmsam/table1", _rows("cifar-100-beta-0.1", *WMSAM), (0,), 5),
    Stage("fedwmsam/table1", _rows("cifar-100-beta-0.6", *WMSAM), (0,), 5),
    Stage("fedwmsam/table1", _rows("cifar-10-beta-0.1", *WMSAM), (0,), 5),
    Stage("fedwmsam/table1", _rows("cifar-10-beta-0.6", *WMSAM), (0,), 5),
    Stage("fedswa/table3", _rows("cifar100-dirichlet-0.1-*", *SEVEN), (0,), 10),
    Stage("eccv/table2", _rows("alpha-0-5cl", *(f"cifar10-{row}" for row in FLAT)), (0,)),
    Stage("eccv/table2", _rows("alpha-0-5cl", *(f"cifar100-{row}" for row in FLAT)), (0,)),
    Stage("wima/table2", _rows("cifar10-alpha-0-with*", *FOUR), (0,)),
    Stage("wima/table2", _rows("cifar100-alpha-0-with*", *FOUR), (0,)),
)

SETTINGS = {
    "model": "model",
    "initial_weights": "init",
    "dataset": "data.name",
    "partition": "data.split",
    "partition_seed": "data.split_seed",
    "clients": "data.clients",
    "validation": "data.validation",
    "augmentation": "data.augmentation",
    "clients_per_round": "federation.per_round",
    "sampling": "federation.sampling",
    "weighting": "federation.weighting",
    "aggregation": "federation.aggregation",
    "dropout": "federation.dropout",
    "partial": "federation.partial",
    "trained": "training.train",
    "rounds": "training.rounds",
    "local_epochs": "training.epochs",
    "local_steps": "training.steps",
    "batch_size": "training.batch",
    "lr": "training.rate",
    "lr_decay": "training.decay",
    "weight_decay": "training.weight_decay",
    "momentum": "training.momentum",
    "clip": "training.clip",
    "clip_mode": "training.clip_mode",
    "batchnorm": "training.statistics",
    "eval_every": "evaluation.every",
    "eval_final": "evaluation.final",
    "precision": "engine.precision",
}
"""Keys of a stored protocol, and the setting that each comes from. The keys never change, whatever becomes of the settings' names."""
RENAMED = {"server_rate": "server_lr", "final_rate": "final_lr", "rate": "lr_schedule"}


@dataclass(frozen=True)
class Job:
    """One run: an experiment of a table with one seed, and the cells whose numbers it yields."""

    paper: str
    table: str
    row: str
    column: str
    cells: tuple[Cell, ...]
    config: Config

    @property
    def name(self) -> str:
        """Path of the result below the results folder, without its suffix."""
        return f"{self.paper}/{self.table}/{self.column}/{self.row}-seed{self.config.seed}"

    @cached_property
    def protocol(self) -> dict[str, Any]:
        """Everything that determines the result besides the seed, under keys of our own."""
        values = self.config.model_dump(mode="json")

        def get(name: str) -> Any:
            inside: Any = values
            for part in name.split("."):
                inside = inside[part]
            return inside

        settings = {key: get(name) for key, name in SETTINGS.items()}
        return {"algorithm": self.config.algorithm, "parameters": parameters(self.config.algorithm), **settings}

    @property
    def protocol_hash(self) -> str:
        """A hash of the protocol's values. Parameters of the algorithm enter by position, so that renaming one changes nothing."""
        values = {key: value for key, value in self.protocol.items() if key not in ("algorithm", "parameters")}
        values["method"] = self.config.algorithm.partition("(")[0]
        values["parameters"] = [list(slot.values()) for slot in self.protocol["parameters"].values()]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def prior_seconds(self) -> float:
        """Estimated seconds of training and evaluation, alone on one H200 and without set-up."""
        c = self.config
        examples = {"cifar10": 50_000, "cifar100": 50_000}.get(c.data.name, 2_000)
        local = c.training.steps * c.training.batch if c.training.steps else c.training.epochs * examples / (c.data.clients or 100)
        passes = algorithm(c.algorithm).backward_passes
        each = c.federation.per_round * local * passes / SAMPLES_PER_SECOND.get(c.model, 100_000)
        evaluations = c.training.rounds / c.evaluation.every + c.evaluation.final
        models = 1 + len(algorithm(c.algorithm).averages)
        forward = 10_000 / SAMPLES_PER_SECOND.get(c.model, 100_000)
        return c.training.rounds * max(each, HOST_SECONDS) + evaluations * models * 2 * forward


def parameters(text: str) -> dict[str, dict[str, Any]]:
    """Every parameter of every slot of an algorithm, defaults included."""
    chosen = algorithm(text)
    slots = {"drift": chosen.drift, "perturbation": chosen.perturbation, "lr_schedule": chosen.rate, "server": chosen.server}
    slots |= {f"average{number}": average for number, average in enumerate(chosen.averages)}
    return {
        slot: {RENAMED.get(field.name, field.name): getattr(value, field.name) for field in fields(value)}
        for slot, value in slots.items()
    }


def queue(wanted: argparse.Namespace, stages: Sequence[Stage] = QUEUE) -> Iterator[Job]:
    """All runs of the campaign, the most informative first."""
    seen = set()
    for stage in stages:
        table = find_table(stage.table)
        for pattern in stage.cells:
            chosen = [cell for name, cell in table.cells.items() if fnmatch(name, pattern) and cell.configs]
            if not chosen:
                raise UserError(f"{stage.table} has no cell {pattern}")
            experiments: dict[str, list[Cell]] = {}
            for cell in chosen:
                for base in cell.configs:
                    experiments.setdefault(base.model_dump_json(), []).append(cell)
            for text, cells in experiments.items():
                base = config(json.loads(text))
                row, column = _place(cells, base)
                for seed in stage.seeds:
                    made = adapted(base, stage, seed, wanted)
                    job = Job(table.paper.name, table.name, row, column, tuple(cells), made)
                    if job.name not in seen and any(fnmatch(job.name, text) for text in wanted.only):
                        seen.add(job.name)
                        yield job


def _place(cells: Sequence[Cell], base: Config) -> tuple[str, str]:
    """The row and the column that the cells of one run share."""
    row = cells[0].name.split("/")[0]
    columns = [cell.name.split("/")[1].split("-") for cell in cells]
    if len(columns) > 1:
        same = [words[0] for words in zip(*columns, strict=False)]
        same = same[: next((k for k, words in enumerate(zip(*columns, strict=False)) if len(set(words)) > 1), len(same))]
    else:
        same = columns[0]
    several = len(cells[0].configs) > 1
    return f"{row}.{folder_name(base.algorithm)}" if several else row, "-".join(same)


def adapted(base: Config, stage: Stage, seed: int, wanted: argparse.Namespace) -> Config:
    """A paper's experiment with the campaign's precision, evaluations, seed and place."""

    def change(made: Config) -> Config:
        values = made.model_dump(mode="json")
        values["seed"] = seed
        if stage.every and not wanted.small:
            values["evaluation"]["every"] = stage.every
        values["engine"] |= {"precision": wanted.precision or stage.precision, "device": wanted.device}
        values["engine"] |= {"checkpoint_every": wanted.checkpoint_every, "compile": wanted.compile}
        return config(values)

    return Scale(wanted.small, wanted.rounds, wanted.data_folder, change).of(base)[0]


# --- one run -----------------------------------------------------------------------------------------------------------------


class Watch(Callback):
    """Times rounds, and averages the last models without evaluating the averages before the end.

    ``wima`` is the mean of the last 100 global models, ``ema`` their exponential moving average; both are left out where the run
    was resumed too late to know all models they are made of.
    """

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.times: list[tuple[int, float]] = []
        self.sum: Tensor | None = None
        self.count = 0
        self.mean: Tensor | None = None
        self.from_the_start = False
        self.averages: dict[str, float] = {}

    def began(self, run: Any) -> None:
        self.from_the_start = run.server.rounds == 0

    def round_done(self, run: Any) -> None:
        rounds, model = run.server.rounds, run.server.model
        x = torch.cat([model.weights, model.buffers]).double()
        self.mean = x if self.mean is None else DECAY * self.mean + (1 - DECAY) * x
        if rounds > run.config.training.rounds - WINDOW:
            self.sum = x if self.sum is None else self.sum + x
            self.count += 1

    def evaluated(self, run: Any) -> None:
        self.times.append((run.server.rounds, time.monotonic()))
        if run.server.rounds < run.config.training.rounds:
            return
        own = run.server.model
        chosen = {}
        if self.sum is not None and self.count == min(WINDOW, run.config.training.rounds):
            chosen["wima"] = self.sum / self.count
        if self.mean is not None and self.from_the_start:
            chosen["ema"] = self.mean
        for name, mean in chosen.items():
            weights, buffers = torch.split(mean.to(own.weights.dtype), [len(own.weights), len(own.buffers)])
            figures = run.engine.evaluate({name: own._replace(weights=weights, buffers=buffers)}, run.problem.held_out)
            self.averages[name] = figures[name]["test"][run.problem.task.metric]

    @property
    def seconds_per_round(self) -> float | None:
        """Mean wall seconds of a round with its share of evaluations, after the first tenth of the run."""
        late = [point for point in self.times if point[0] >= self.times[-1][0] / 10]
        if len(late) < 2:
            return None
        return (late[-1][1] - late[0][1]) / (late[-1][0] - late[0][0])


def train(job: Job, work: Path, wanted: argparse.Namespace) -> dict[str, Any]:
    """Do one run, from its last checkpoint where there is one, and return its result."""
    watch, begun = Watch(), time.monotonic()
    (record,) = run_each([job.config], [work], (watch,), jobs=1)
    return result(job, record, watch, time.monotonic() - begun, wanted)


def result(job: Job, record: Record, watch: Watch, wall: float, wanted: argparse.Namespace) -> dict[str, Any]:
    """What is stored of a run."""
    asked = [Asked(cell.number, cell.evaluated) for cell in job.cells if isinstance(cell.number, OfModels)]
    measured = Measured.of(record, measure(record, asked, wanted.small) if asked and record.status != "diverged" else {})
    metric, history = measured.metric, record.history
    numbers: dict[str, Any] = {}
    for cell in job.cells:
        value = None if record.status == "diverged" else formed(cell.number, measured, cell.evaluated, job.config.training.rounds)
        numbers[cell.name] = {
            "published": cell.published.text if cell.published else None,
            "measured": rounded(value * 100 if value is not None and cell.unit == "%" else value),
            "unit": cell.unit,
            "number": cell.number.text,
        }
    models: dict[str, Any] = {}
    for name in history[-1]["test"]:
        summary = summarise(history, name, metric)
        if summary:
            mean = {"mean_last_100": summary.mean_last, "evaluations_in_mean": summary.mean_count}
            models[name] = {"last": summary.last, **mean, "best": summary.best}
    models |= {name: {"last": value} for name, value in watch.averages.items() if name not in models}
    curve = {name: [rounded(value, 4) for _, value in series(history, name, metric)] for name in history[-1]["test"]}
    return {
        "format": FORMAT,
        "paper": job.paper,
        "table": job.table,
        "experiment": f"{job.row}/{job.column}",
        "seed": job.config.seed,
        "status": record.status,
        "reason": record.reason,
        "cells": numbers,
        "metric": metric,
        "metrics": {name: {key: rounded(value) for key, value in some.items()} for name, some in models.items()},
        "final": {key: rounded(value) for key, value in history[-1]["test"]["server"].items()},
        "protocol": job.protocol,
        "protocol_hash": job.protocol_hash,
        "cost": {
            "seconds": rounded(wall, 1),
            "seconds_per_round": rounded(watch.seconds_per_round, 5),
            "runs_at_once": wanted.jobs,
            "backward_passes": history[-1]["backward_passes"],
            "bytes_up": history[-1]["bytes_up"],
            "bytes_down": history[-1]["bytes_down"],
        },
        "environment": {
            "fedflat": fedflat.__version__,
            "commit": wanted.commit or commit(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() and wanted.device != "cpu" else "CPU",
        },
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "curve_rounds": [line["round"] for line in history],
        "curve": curve,
    }


def rounded(value: float | None, digits: int = 5) -> float | None:
    """A number as it is stored."""
    return None if value is None else round(value, digits)


def commit() -> str | None:
    """The commit of the code that runs, where it runs from a checkout."""
    try:
        place = Path(fedflat.__file__).parent
        return subprocess.run(["git", "-C", place, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def as_text(document: dict[str, Any]) -> str:
    """JSON with one line per top-level key, so that curves stay short and differences readable."""
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in document.items()) + "\n}\n"


# --- the queue ---------------------------------------------------------------------------------------------------------------


class Campaign:
    """The results there are, and the runs that this process adds."""

    def __init__(self, wanted: argparse.Namespace) -> None:
        self.wanted = wanted
        self.jobs = list(queue(wanted))
        self._end = wanted.until or time.time() + 60 * wanted.minutes

    @property
    def end(self) -> float:
        """When the time is up, in seconds since the epoch; WORK/deadline moves it while the queue is running."""
        moved = self.wanted.work / "deadline"
        return float(moved.read_text()) if moved.exists() else self._end

    def path(self, job: Job) -> Path:
        """The file of a run's result."""
        return Path(f"{self.wanted.results / job.name}.json")

    def stored(self, job: Job) -> dict[str, Any] | None:
        """The result of a run, where there is one under the same protocol."""
        path = self.path(job)
        if not path.exists():
            return None
        document: dict[str, Any] = json.loads(path.read_text())
        return document if document["protocol_hash"] == job.protocol_hash else None

    def missing(self) -> list[Job]:
        """The runs without a result, in order."""
        return [job for job in self.jobs if self.stored(job) is None]

    def seconds(self, job: Job) -> float:
        """Wall seconds that a run will take: as measured for another seed of it, else as estimated."""
        known = [
            document["cost"]
            for other in self.jobs
            if other.protocol_hash == job.protocol_hash and (document := self.stored(other)) is not None
        ]
        jobs, slack = self.wanted.jobs, self.wanted.slack
        training = [(cost["seconds"] - SETUP_SECONDS) / cost["runs_at_once"] for cost in known if cost["seconds_per_round"]]
        return SETUP_SECONDS + (max(*training, 1.0) if training else job.prior_seconds) * jobs * slack

    def work(self, report: Callable[[str], None]) -> None:
        """Run what is missing, one run after another, until nothing more fits into the time."""
        failed: set[str] = set()
        while True:
            for job in self.missing():
                if job.name in failed or time.time() + self.seconds(job) > self.end or not self.data_at_hand(job):
                    continue
                try:
                    with claimed(self.wanted.work / "claims" / job.name):
                        if self.stored(job) is None:
                            self.run(job, report, failed)
                            break
                except Held:
                    continue
            else:
                return

    def data_at_hand(self, job: Job) -> bool:
        """Whether the files of a run's dataset have arrived; they may come while the queue is running."""
        from fedflat.papers.small import at_hand

        return self.wanted.small or at_hand(job.config.data.name, job.config.data.folder)

    def run(self, job: Job, report: Callable[[str], None], failed: set[str]) -> None:
        """One run and its file."""
        folder = self.wanted.work / "runs" / job.name
        report(f"start {job.name} ({self.seconds(job):.0f} s estimated, {self.end - time.time():.0f} s left)")
        try:
            document = train(job, folder, self.wanted)
        except Exception as error:  # the rest of the queue must not suffer
            failed.add(job.name)
            report(f"FAILED {job.name}: {error}\n{traceback.format_exc()}")
            return
        create_folder(self.path(job).parent)
        write_whole(self.path(job), as_text(document))
        shutil.rmtree(folder, ignore_errors=True)
        cost = document["cost"]
        per_round = cost["seconds_per_round"] or 0.0
        last = document["metrics"]["server"]["last"] if document["status"] != "diverged" else float("nan")
        report(f"done {job.name}: {100 * last:.2f} in {cost['seconds']:.0f} s, {1000 * per_round:.1f} ms per round, {document['status']}")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def spawn(wanted: argparse.Namespace, given: Sequence[str]) -> None:
    """Let several processes work on the queue, and start one anew that dies."""
    end = time.time() + 60 * wanted.minutes
    command = [sys.executable, __file__, *given, "--until", f"{end:.1f}"]
    processes = [subprocess.Popen(command) for _ in range(wanted.jobs)]
    restarts = wanted.jobs
    while processes:
        time.sleep(0.5)
        for process in [process for process in processes if process.poll() is not None]:
            processes.remove(process)
            if process.returncode != 0 and restarts and time.time() < end:
                restarts -= 1
                processes.append(subprocess.Popen(command))


# --- what is printed ---------------------------------------------------------------------------------------------------------


def listing(campaign: Campaign) -> str:
    """The missing runs in order, with an estimate of their time."""
    lines = [f"{campaign.seconds(job):7.0f} s  {job.name}" for job in campaign.missing()]
    return "\n".join([f"{len(lines)} of {len(campaign.jobs)} runs are missing:", *lines])


def table(campaign: Campaign) -> str:
    """Published and measured numbers of every cell with a result, as a Markdown table."""
    found: dict[tuple[str, str], list[tuple[Cell, Any]]] = {}
    for job in campaign.jobs:
        document = campaign.stored(job)
        for cell in job.cells if document else ():
            found.setdefault((f"{job.paper}/{job.table}", f"{cell.name} {job.config.algorithm}"), []).append(
                (cell, document["cells"][cell.name]["measured"])
            )
    lines = ["| table | cell | published | measured | seeds | difference |", "|---|---|---|---|---|---|"]
    for (name, text), pairs in found.items():
        cell, values = pairs[0][0], [value for _, value in pairs if value is not None]
        digits = 0 if isinstance(cell.number, RoundsTo) else 4 if cell.unit == "share" else 2
        mean = fmean(values) if values else None
        spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
        printed = cell.published.text if cell.published else "-"
        ours = "not reached" if mean is None else f"{mean:.{digits}f}{spread}"
        comparable = mean is not None and cell.published and cell.published.value is not None and not cell.published.beyond
        difference = f"{mean - cell.published.value:+.{digits}f}" if comparable and mean is not None and cell.published else ""
        lines.append(f"| {name} | {text} | {printed} | {ours} | {len(values)}/{len(pairs)} | {difference} |")
    return "\n".join(lines)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the JSON files (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("runs/campaign"), help="folder of unfinished runs (default: %(default)s)")
    parser.add_argument("--data-folder", type=Path, help="folder of the datasets")
    parser.add_argument("--minutes", type=float, default=60.0, help="time budget (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time on one GPU (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="runs by name, as --list shows them")
    parser.add_argument("--list", action="store_true", help="print the missing runs in order, and stop")
    parser.add_argument("--table", action="store_true", help="print published and measured numbers, and stop")
    parser.add_argument("--small", action="store_true", help="try the queue out at small scale, with stand-ins for data and models")
    parser.add_argument("--rounds", type=int, help="fewer rounds than the paper, to try the queue out")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--precision", choices=("float32", "tf32", "bf16"), help="instead of the precision that the queue pins")
    parser.add_argument("--compile", default="auto", choices=("auto", "on", "off"), help="compile local steps (default: %(default)s)")
    parser.add_argument("--checkpoint-every", type=int, default=250, metavar="ROUNDS", help="(default: %(default)s)")
    parser.add_argument("--slack", type=float, default=1.0, help="factor on time estimates (default: %(default)s)")
    parser.add_argument("--commit", help="commit of the code, where it does not run from a checkout")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> str:
    """Run what is missing and fits, and return the table."""
    given = list(sys.argv[1:] if given is None else given)
    wanted = arguments(given)
    if wanted.list:
        return listing(Campaign(wanted))
    if wanted.table:
        return table(Campaign(wanted))
    if wanted.jobs > 1 and wanted.until is None:
        spawn(wanted, given)
        return table(Campaign(wanted))

    def report(text: str) -> None:
        if sys.stderr.isatty() or os.environ.get("CAMPAIGN_LOG"):
            print(f"{datetime.now(UTC):%H:%M:%S} [{os.getpid()}] {text}", file=sys.stderr, flush=True)

    campaign = Campaign(wanted)
    campaign.work(report)
    return "" if wanted.until else table(campaign)


if __name__ == "__main__":
    try:
        text = main()
    except UserError as error:
        raise SystemExit(f"campaign.py: {error}") from None
    if text:
        print(text)
