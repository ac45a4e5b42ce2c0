"""Measure published tables at full scale: a queue of runs that uses whatever GPU time is available.

Examples:
    python studies/campaign.py --list                                      # what is missing, in order
    python studies/campaign.py --data-dir DATA --minutes 25 --jobs 3       # run the queue for 25 minutes
    python studies/campaign.py --table --only 'fedswa/*'                   # published and measured numbers

The script runs the first missing (experiment, seed) of the queue that fits into the remaining time, then the next. Each
finished run is one JSON file in the results directory, written atomically. When all runs of a learning rate search have
finished, the run with the best rate joins the queue. Interrupted runs are resumed from their last checkpoint by the
same command. With --jobs, several processes share the queue and the GPU: while one compiles, the
others train. Progress goes to stderr if it is a terminal, or to the file given by --log.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from campaign_queue import SETUP_SECONDS, CampaignJob, is_chosen, queue
from torch import Tensor

import fedflat
from fedflat.errors import UserError
from fedflat.experiment.campaign.compare import run_each
from fedflat.experiment.campaign.estimate import is_available
from fedflat.experiment.store.files import LockedError, locked
from fedflat.papers.document import markdown
from fedflat.papers.ledger import LEDGER_COLUMNS, Ledger
from fedflat.papers.outcome import MeasuredRun
from fedflat.papers.plan import model_query
from fedflat.papers.post_hoc import measure
from fedflat.papers.results import RunCost, StoredResult, make_result, read_result, write_result

WINDOW, DECAY = 100, 0.99
"""Of the averages that every run reports in addition: WiMA and EMA."""


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--list", action="store_true", help="print the missing runs in order, with estimated seconds, and exit")
    add("--table", action="store_true", help="print published and measured numbers, and exit")
    add("--data-dir", type=Path, help="directory of the datasets")
    add("--minutes", type=float, default=60.0, help="time budget (default: %(default)s)")
    add("--jobs", type=int, default=1, help="concurrent runs on one GPU (default: %(default)s)")
    add("--only", nargs="+", default=["*"], metavar="PATTERN", help="restrict the queue to these names (see --list)")
    add("--results", type=Path, help="directory of the results (default: results; must be given to try the queue)")
    add("--work", type=Path, default=Path("runs/campaign"), help="directory of unfinished runs (default: %(default)s)")
    add("--log", type=Path, help="append progress to this file")
    add("--small", action="store_true", help="try the queue at small scale, with stand-ins for data and models")
    add("--rounds", type=int, help="fewer rounds than the paper, to try the queue")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--precision", choices=("float32", "tf32", "bf16"), help="override the precision of the protocols")
    add("--compile", default="auto", choices=("auto", "on", "off"), help="compile local steps (default: %(default)s)")
    add("--checkpoint-every", type=int, default=250, metavar="ROUNDS", help="(default: %(default)s)")
    add("--commit", help="commit of the code, if it does not run from a checkout")
    add("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.results is None and (options.small or options.rounds):
        parser.error("give --results with --small or --rounds; in the default folder, they would replace full results")
    options.results = options.results or Path("results")
    return options


class AverageMonitor(fedflat.Callback):
    """Averages global models as WiMA and EMA do, but evaluates the averages only once, at the end.

    An average is left out if the run was resumed too late to include all of its models.
    """

    def __init__(self) -> None:
        self.averages: dict[str, float] = {}
        self._first_round = 0
        self._window_sum: Tensor | None = None
        self._window_count = 0
        self._ema: Tensor | None = None

    def began(self, run: Any) -> None:
        self._first_round = run.rounds

    def round_done(self, run: Any) -> None:
        model = run.server.model
        weights = torch.cat([model.weights, model.buffers]).double()
        self._ema = weights if self._ema is None else DECAY * self._ema + (1 - DECAY) * weights
        if run.rounds > run.config.training.rounds - WINDOW:
            self._window_sum = weights if self._window_sum is None else self._window_sum + weights
            self._window_count += 1

    def evaluated(self, run: Any) -> None:
        if run.rounds < run.config.training.rounds:
            return
        means = {}
        if self._window_sum is not None and self._window_count == min(WINDOW, run.rounds):
            means["wima"] = self._window_sum / self._window_count
        if self._ema is not None and self._first_round == 0:
            means["ema"] = self._ema
        model = run.server.model
        for name, mean in means.items():
            weights, buffers = torch.split(mean.to(model.weights.dtype), [len(model.weights), len(model.buffers)])
            state = model._replace(weights=weights, buffers=buffers)
            scores = run.engine.evaluate({name: state}, run.problem.evaluation_sets)
            self.averages[name] = scores[name]["test"][run.metric]


class Campaign:
    """The stored results, and a worker that adds missing ones."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.jobs = list(queue(options))
        self._failed: set[str] = set()
        if not self.jobs:
            raise UserError(f"no run matches --only {' '.join(options.only)}; --list without --only prints all names")
        self._end = options.until or time.time() + 60 * options.minutes

    def path(self, job: CampaignJob) -> Path:
        """The file of a job's result."""
        return Path(f"{self.options.results / job.name}.json")

    def result(self, job: CampaignJob) -> StoredResult | None:
        """The stored result of a job; None if there is none, or if it was measured under another protocol."""
        path = self.path(job)
        if not path.exists():
            return None
        result = read_result(path)
        return result if result.protocol_hash == job.protocol_hash else None

    def finished(self) -> list[tuple[CampaignJob, StoredResult]]:
        """All jobs with a result."""
        return [(job, result) for job in self.tuned_jobs() + self.jobs if (result := self.result(job)) is not None]

    def tuned_jobs(self) -> list[CampaignJob]:
        """The runs with the learning rates that finished searches selected."""
        searches: dict[str, list[tuple[CampaignJob, StoredResult]]] = {}
        for job in self.jobs:
            if job.kind == "search" and is_chosen(job.tuned_name, self.options) and (result := self.result(job)):
                searches.setdefault(job.tuned_name, []).append((job, result))
        tuned = []
        for finished in searches.values():
            converged = [(job, result) for job, result in finished if result.status != "diverged"]
            if converged and len(finished) == len(finished[0][0].stage.lrs):
                best, _ = max(converged, key=lambda pair: pair[1].metrics["server"]["last"] or 0.0)
                tuned.append(best.tuned())
        return tuned

    def missing(self) -> list[tuple[CampaignJob, float]]:
        """Jobs without a result in order, with their estimated wall time in seconds.

        Tuned runs come first, because each completes a search. First seeds precede others, and jobs whose experiment
        did not learn with another seed come last. The time comes from other seeds, or from the size of the experiment.
        """
        finished = self.finished()
        done = {job.name for job, _ in finished}
        failed = {job.protocol_hash for job, result in finished if not result.has_learned}
        alone: dict[str, float] = {}
        for job, result in finished:
            if not result.cost.note:
                alone[job.protocol_hash] = max(result.device_seconds, alone.get(job.protocol_hash, 0.0))
        waiting = [job for job in self.tuned_jobs() + self.jobs if job.name not in done]
        waiting.sort(key=lambda job: (job.protocol_hash in failed, job.stage.seed))
        jobs = self.options.jobs
        return [(job, SETUP_SECONDS + job.seconds(jobs, alone.get(job.protocol_hash))) for job in waiting]

    def require_data(self) -> None:
        """Raise a ``UserError`` if no missing job has its dataset; otherwise, those without it are skipped."""
        missing = [job.config.data for job, _ in self.missing()]
        if missing and not any(is_available(data.dataset, data.dir) for data in missing):
            commands = "; ".join(f"fedflat data get {name}" for name in dict.fromkeys(data.dataset for data in missing))
            raise UserError(f"no dataset found in {missing[0].dir or 'the default folder'}: {commands}")

    def work(self) -> None:
        """Run missing jobs until none fits into the remaining time."""
        while any(self._attempt(job, seconds) for job, seconds in self.missing()):
            pass

    def _attempt(self, job: CampaignJob, seconds: float) -> bool:
        """Run a job, unless it does not fit, lacks its dataset, failed before, or runs in another process."""
        data, left = job.config.data, self._end - time.time()
        if job.name in self._failed or seconds > left or not is_available(data.dataset, data.dir):
            return False
        try:
            with locked(self.options.work / "locks" / job.name):
                if self.result(job) is not None:
                    return False
                self.report(f"start {job.name}: about {seconds:.0f} of the {left:.0f} s left")
                self._run(job)
        except LockedError:
            return False
        except Exception as error:  # a failing run must not stop the queue
            self._failed.add(job.name)
            self.report(f"failed {job.name}: {error}\n{traceback.format_exc()}")
        return True

    def _run(self, job: CampaignJob) -> None:
        result = self._with_same_settings(job) or self._train(job)
        write_result(self.options.results, result)
        shutil.rmtree(self._folder(job), ignore_errors=True)
        score = 100 * (result.metrics["server"].get("last") or 0.0)
        self.report(f"{result.status} {job.name}: {score:.2f} after {result.cost.seconds:.0f} s")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _folder(self, job: CampaignJob) -> Path:
        """The folder of an unfinished run."""
        return self.options.work / "runs" / job.name

    def _train(self, job: CampaignJob) -> StoredResult:
        """Execute a run. In the result of a search run, the held-out training data take the place of the test set."""
        is_search, monitor = job.kind == "search", AverageMonitor()
        (record,) = run_each([job.config], [self._folder(job)], () if is_search else (monitor,), jobs=1)
        cells = () if is_search else job.cells
        if is_search:
            record = replace(record, history=[line | {"test": line["validation"]} for line in record.history])
        queries = [] if record.status == "diverged" else [query for cell in cells if (query := model_query(cell))]
        run = MeasuredRun.of(record, measure(record, queries, self.options.small))
        result = make_result(
            job.result_name, cells, record, run, monitor.averages, self.options.jobs, self.options.commit
        )
        return _of_kind(result, job)

    def _with_same_settings(self, job: CampaignJob) -> StoredResult | None:
        """The stored result with the paper's settings, if those are the ones that a search selected."""
        if (result := self.result(replace(job, kind="paper"))) is None:
            return None
        cost = RunCost(seconds=0, note=f"included in {result.file}")
        return _of_kind(result, job).model_copy(update={"cost": cost})

    def report(self, text: str) -> None:
        """Log a line of progress."""
        line = f"{datetime.now(UTC):%H:%M:%S} [{os.getpid()}] {text}"
        if self.options.log is not None:
            with self.options.log.open("a") as log:
                log.write(f"{line}\n")
        if sys.stderr.isatty():
            print(line, file=sys.stderr, flush=True)

    def listing(self) -> str:
        """The missing runs with their estimated seconds."""
        missing = self.missing()
        lines = [f"{seconds:7.0f}  {job.name}" for job, seconds in missing]
        return "\n".join([f"{len(missing)} of {len(self.jobs)} runs are missing. Seconds and name, in order:", *lines])


def _of_kind(result: StoredResult, job: CampaignJob) -> StoredResult:
    """The result of a job, marked as that of a search or a tuned run if it is one."""
    if job.kind == "paper":
        return result
    return result.model_copy(update={"kind": job.kind, "selection": job.selection})


def work_in_processes(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Let several processes work on the queue, and replace those that die."""
    end = time.time() + 60 * options.minutes
    command = [sys.executable, __file__, *words, "--until", f"{end:.1f}"]
    processes = [subprocess.Popen(command) for _ in range(options.jobs)]
    replacements = options.jobs
    while processes:
        time.sleep(0.2)
        for process in [process for process in processes if process.poll() is not None]:
            processes.remove(process)
            if process.returncode != 0 and replacements:
                replacements -= 1
                processes.append(subprocess.Popen(command))


def main(words: Sequence[str] | None = None) -> str:
    """Run the missing jobs that fit; returns the table, or nothing in a process that shares the queue."""
    words = sys.argv[1:] if words is None else words
    options = parse_arguments(words)
    campaign = Campaign(options)
    if options.list:
        return campaign.listing()
    if options.until is not None:
        campaign.work()
        return ""
    if not options.table:
        campaign.require_data()
        if options.jobs > 1:
            work_in_processes(options, words)
        else:
            campaign.work()
    entries = Ledger(result for _, result in campaign.finished()).entries
    return markdown(LEDGER_COLUMNS, [entry.row() for entry in entries])


if __name__ == "__main__":
    try:
        text = main()
    except UserError as error:
        raise SystemExit(f"campaign.py: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("campaign.py: interrupted; the same command continues") from None
    if text:
        print(text)
