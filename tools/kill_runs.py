"""Kill runs at random moments, resume them, and compare their files with those of undisturbed runs.

python tools/kill_runs.py --kills 300 --log kills.jsonl

Every trial starts a run of an algorithm with state, kills it with SIGKILL once or twice, and resumes it. The seed and
the number of a trial determine its algorithm, its checkpoint interval and the moments of its kills. Trials in the log
are not repeated, so the command can be interrupted and continued.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fedflat
from fedflat.algorithms import algorithm
from fedflat.algorithms.algorithm import flat_fields
from fedflat.algorithms.named import NAMED
from fedflat.experiment.store import checkpoint
from fedflat.experiment.store.run_folder import RunFolder

SETTINGS: dict[str, Any] = {
    "rounds": 12,
    "clients": 12,
    "clients_per_round": 4,
    "local_steps": 2,
    "workers": 1,
    "device": "cpu",
    "model": "mlp(hidden=8)",
    "save_every": 4,
    "progress": False,
}
INTERVALS = ("fixed", "timed")
"""Checkpoints every 2 rounds, or as by default when enough time has passed (here 20 ms instead of 5 s)."""
CLOCK = "lognormal(sigma=1)+uplink(mbps=0.1)+diurnal(share=0.7,period=20)"
WITH_POLICY = {
    "scaffold+ema": "fedbuff(buffer=3)",
    "fedmoswa": "fedbuff(buffer=6)",
    "fedavgm": "fedasync",
    "fednova": "deadline(seconds=1,late=partial)",
}
"""Algorithms that run with ``CLOCK`` and a policy; their name in the log is ALGORITHM policy=POLICY."""
NOT_GUARANTEED = {"fixed": ("timing.jsonl", ".lock"), "timed": ("timing.jsonl", ".lock", "state/", "previous.")}
"""Parts of the paths of files that may differ; docs/reliability.md lists them."""


def stateful_algorithms() -> list[str]:
    """The named algorithms whose server or clients keep state, one with averages, and some with virtual time."""
    named = [
        name
        for name in NAMED
        if flat_fields(algorithm(name).client_fields()) or flat_fields(algorithm(name).server_fields())
    ]
    with_policy = [f"{name} policy={policy}" for name, policy in WITH_POLICY.items()]
    return [*named, "scaffold+wima(window=4)+swa(start=0.3,every=2)+ema", *with_policy]


def start_or_resume(text: str, interval: str, folder: Path) -> None:
    """Run an algorithm in a folder, from its last checkpoint if there is one."""
    if interval == "timed":
        checkpoint.ROUNDS_BETWEEN, checkpoint.SECONDS_BETWEEN = 1, 0.02
        checkpoint.MAX_TIME_FRACTION = 1.0
    if RunFolder(folder).exists:
        fedflat.resume(folder, progress=False)
    else:
        name, _, policy = text.partition(" policy=")
        virtual_time: dict[str, Any] = {"clock": CLOCK, "policy": policy} if policy else {}
        every = 2 if interval == "fixed" else None
        fedflat.run(name, out=folder, engine__checkpoint_every=every, **SETTINGS, **virtual_time)


def in_child(work: Callable[[], None], kill_after: float | None = None) -> bool:
    """Call a function in a forked process; returns whether it was killed, after ``kill_after`` seconds."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def guaranteed_files(folder: Path, interval: str) -> dict[str, bytes]:
    """The files of a run that a kill must not change, with their content."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    differing = NOT_GUARANTEED[interval]
    return {name: path.read_bytes() for name, path in files.items() if not any(part in name for part in differing)}


class Trials:
    """Trials with the undisturbed runs that they are compared with."""

    def __init__(self, seed: int, algorithms: list[str], folder: Path) -> None:
        self._seed, self._algorithms, self._folder = seed, algorithms, folder
        self._undisturbed: dict[tuple[str, str], tuple[dict[str, bytes], float]] = {}

    def run(self, number: int) -> dict[str, Any]:
        """Run one trial; returns its log entry."""
        draw = random.Random(f"{self._seed} {number}")
        text, interval = draw.choice(self._algorithms), draw.choice(INTERVALS)
        expected, seconds = self._reference(text, interval)
        folder = self._folder / "killed"
        shutil.rmtree(folder, ignore_errors=True)

        def work() -> None:
            start_or_resume(text, interval, folder)

        kills = sum(in_child(work, draw.uniform(0, seconds)) for _ in range(draw.randint(1, 2)))
        in_child(work)
        files = guaranteed_files(folder, interval) if folder.exists() else {}
        differing = sorted(name for name in {*files, *expected} if files.get(name) != expected.get(name))
        entry = {"seed": self._seed, "trial": number, "algorithm": text, "interval": interval, "kills": kills}
        return {**entry, "differing": differing}

    def _reference(self, text: str, interval: str) -> tuple[dict[str, bytes], float]:
        """The guaranteed files of an undisturbed run, and its duration in seconds."""
        if (text, interval) not in self._undisturbed:
            folder = self._folder / "undisturbed"
            shutil.rmtree(folder, ignore_errors=True)
            start = time.monotonic()
            in_child(lambda: start_or_resume(text, interval, folder))
            if not RunFolder(folder).has_ended:
                raise SystemExit(f"the undisturbed run of {text} failed")
            self._undisturbed[text, interval] = guaranteed_files(folder, interval), time.monotonic() - start
        return self._undisturbed[text, interval]


def print_table(entries: list[dict[str, Any]]) -> None:
    """Print a Markdown table: kills and differing runs by algorithm and interval."""
    print("| algorithm | kills, fixed interval | kills, timed | runs | runs that differ |\n|---|---|---|---|---|")
    for text in [*sorted({entry["algorithm"] for entry in entries}), "all"]:
        chosen = [entry for entry in entries if text in ("all", entry["algorithm"])]
        by_interval = [sum(e["kills"] for e in chosen if e["interval"] == interval) for interval in INTERVALS]
        failed = sum(bool(entry["differing"]) for entry in chosen)
        print(f"| {text} | {by_interval[0]} | {by_interval[1]} | {len(chosen)} | {failed} |")


def main(arguments: list[str] | None = None) -> int:
    """Run trials until the log has enough kills; returns the number of runs that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="number of kills, including those in the log")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path("kills.jsonl"))
    parser.add_argument("--algorithms", nargs="*", default=stateful_algorithms())
    options = parser.parse_args(arguments)
    entries = [json.loads(line) for line in options.log.read_text().splitlines()] if options.log.exists() else []
    entries = [entry for entry in entries if entry["seed"] == options.seed]
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(options.seed, options.algorithms, Path(folder))
        while sum(entry["kills"] for entry in entries) < options.kills:
            entries.append(trials.run(len(entries)))
            with options.log.open("a") as log:
                log.write(json.dumps(entries[-1]) + "\n")
            if entries[-1]["differing"]:
                print(entries[-1], file=sys.stderr)
    print_table(entries)
    return sum(bool(entry["differing"]) for entry in entries)


if __name__ == "__main__":
    sys.exit(main() > 0)
