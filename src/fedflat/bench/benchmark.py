"""Times the rounds of contenders: fedflat, a plain PyTorch loop, other simulators, and a bound on their speed.

On a GPU, contenders are measured one after another; on a CPU, they take turns. Results are JSON-compatible values.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from fedflat.bench.contender_process import Contender, ContenderProcess, Failed, LocalContender, RoundTimes
from fedflat.bench.contenders import Fedflat
from fedflat.bench.environments import install
from fedflat.bench.machine import Load, cpu_seconds, hardware, versions
from fedflat.bench.peers import Simulator, SimulatorProcess
from fedflat.bench.request import Request
from fedflat.bench.results import ContenderResult, different_work, row, samples_per_round
from fedflat.errors import UserError

FORMAT = 1
"""Version of the format of results."""
ROUNDS_PER_TURN = 5
"""Measured rounds per turn on a CPU; the first round of a turn is not among them."""
MAX_OTHER_LOAD = 0.1
"""Largest share of the cores that other processes may use during a turn that counts."""
MIN_QUIET_TURNS = 3
"""Least number of turns without much other load; if there are fewer, turns with other load count, too."""


class Log:
    """Shows progress lines to the user; those that belong to the results are kept as ``notes``."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show = show
        self.notes: list[str] = []

    def note(self, line: str) -> None:
        """Show a line and keep it."""
        self.notes.append(line)
        self.show(line)

    def note_failure(self, contender: Contender, failure: Failed) -> None:
        """Note why a contender was not measured."""
        self.note(f"{contender} was not measured: {failure.reason}")


def benchmark(request: Request, command: str, show_progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure all contenders.

    Args:
        request: what to measure.
        command: the command line, for the record.
        show_progress: called with a progress line.

    Returns:
        Hardware, versions, settings and one row per contender, as JSON-compatible values.
    """
    request.check()
    log = Log(show_progress)
    measure = _measure_one_by_one if request.setting.on_gpu else _measure_in_turns
    results = measure(request, log)
    if not any(isinstance(result.contender, Fedflat) for result in results):
        # The notes say why each contender failed.
        reason = next(note for note in log.notes if note.startswith(Fedflat.name))
        raise UserError(reason)
    samples = {clients: samples_per_round(request.setting, clients) for clients in request.clients}
    for note in different_work(results):
        log.note(note)
    setting = asdict(request.setting)
    if request.setting.data_dir is not None:
        setting["data_dir"] = str(request.setting.data_dir)
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "hardware": hardware(),
        "versions": versions(),
        "setting": setting,
        "rounds": request.rounds,
        "warm_up": request.warm_up,
        "rows": [row(result, results, samples[result.contender.clients]) for result in results],
        "notes": log.notes,
    }


def _installed_contenders(request: Request, log: Log) -> list[LocalContender | Simulator]:
    """Return all requested contenders, except simulators that cannot be installed."""
    contenders = []
    for contender in request.contenders():
        try:
            if isinstance(contender, Simulator):
                install(type(contender), contender.environment, log.show)
            contenders.append(contender)
        except UserError as error:
            log.note_failure(contender, Failed(str(error)))
    return contenders


def _start(contender: LocalContender | Simulator) -> ContenderProcess:
    return SimulatorProcess(contender) if isinstance(contender, Simulator) else ContenderProcess(contender)


def _measure_one_by_one(request: Request, log: Log) -> list[ContenderResult]:
    """Measure each contender while no other runs, because they would share the GPU.

    Setting up takes long, so groups of ``request.concurrent_setups`` contenders set up concurrently.
    """
    results = []
    contenders = _installed_contenders(request, log)
    for start in range(0, len(contenders), request.concurrent_setups):
        processes: list[ContenderProcess] = []
        try:
            processes += map(_start, contenders[start : start + request.concurrent_setups])
            for process in processes:
                log.show(f"{process.contender}: setting up")
                process.start_rounds(1)
            first_rounds = [process.wait_for_rounds() for process in processes]  # all before any is measured
            for process, first in zip(processes, first_rounds, strict=True):
                result = _measure_alone(process, first, request, log)
                if result is not None:
                    results.append(result)
        finally:
            for process in processes:
                process.end()
    return results


def _measure_alone(
    process: ContenderProcess, first: RoundTimes | Failed, request: Request, log: Log
) -> ContenderResult | None:
    """Measure a contender that has finished its first round, whose times are ``first``; None if a round failed."""
    first_seconds = _warm_up(process, first, request, log)
    if first_seconds is None:
        return None
    log.show(f"{process.contender}: measuring {request.rounds} rounds")
    times = process.rounds(request.rounds)
    if isinstance(times, Failed):
        log.note_failure(process.contender, times)
        return None
    result = ContenderResult(
        process.contender, times.seconds, first_seconds, times.device_bytes, process.host_bytes(), times.loss
    )
    log.show(f"{process.contender}: {result.median:.4g} s per round")
    return result


def _measure_in_turns(request: Request, log: Log) -> list[ContenderResult]:
    """Measure all contenders in turns of a few rounds, so that load by other processes affects all alike.

    A contender is paused while another has its turn. Turns with much load by other processes do not count.
    """
    processes: list[ContenderProcess] = []
    try:
        processes += map(_start, _installed_contenders(request, log))
        first_seconds: dict[ContenderProcess, float] = {}
        for process in processes:
            log.show(f"{process.contender}: setting up")
            seconds = _warm_up(process, process.rounds(1), request, log)
            if seconds is not None:
                first_seconds[process] = seconds
            process.pause()
        ready = list(first_seconds)  # the processes whose set-up and warm-up did not fail
        times_by_turn, loads = _take_turns(ready, request.rounds, log)
        counted = quiet_turns(loads)
        _note_load(loads, counted, log)
        results = []
        for process, turns in times_by_turn.items():
            seconds_per_round = list(itertools.chain.from_iterable(turns[turn].seconds for turn in counted))
            first, memory = first_seconds[process], process.host_bytes()
            cpu_times = [turns[turn].cpu_seconds for turn in counted]
            known = [seconds for seconds in cpu_times if seconds is not None]  # all or none of them
            cpu_per_round = sum(known) / len(seconds_per_round) if known else None
            results.append(
                ContenderResult(
                    process.contender, seconds_per_round, first, None, memory, turns[-1].loss, cpu_per_round
                )
            )
        return results
    finally:
        for process in processes:
            process.end()


def _take_turns(
    processes: Sequence[ContenderProcess], rounds: int, log: Log
) -> tuple[dict[ContenderProcess, list[RoundTimes]], list[float]]:
    """Let paused contenders train ``rounds`` rounds each, ``ROUNDS_PER_TURN`` at a time, in alternating order.

    Returns:
        The times of every turn, for each contender that did not fail; and for each turn, the share of all cores that
        other processes used.
    """
    turns: dict[ContenderProcess, list[RoundTimes]] = {process: [] for process in processes}
    loads: list[float] = []
    starts = range(0, rounds, ROUNDS_PER_TURN)
    for turn, start in enumerate(starts, 1):
        if not turns:
            break
        log.show(f"measuring turn {turn} of {len(starts)}")
        load = Load()
        for process in list(turns)[:: 1 if turn % 2 else -1]:
            times = _take_turn(process, min(ROUNDS_PER_TURN, rounds - start))
            if isinstance(times, Failed):
                log.note_failure(process.contender, times)
                del turns[process]
            else:
                turns[process].append(times)
        loads.append(load.share_of_others())
    return turns, loads


def _take_turn(process: ContenderProcess, rounds: int) -> RoundTimes | Failed:
    """Resume a contender, let it train ``rounds`` rounds, pause it, and return the times of these rounds.

    One round before them does not count, because caches are cold after a pause.
    """
    process.resume()
    times = process.rounds(1)
    if not isinstance(times, Failed):
        before = cpu_seconds(process.pid)
        times = process.rounds(rounds)
        after = cpu_seconds(process.pid)
        if before is not None and after is not None and not isinstance(times, Failed):
            times = times._replace(cpu_seconds=after - before - times.loss_cpu_seconds)
    process.pause()
    return times


def _warm_up(process: ContenderProcess, first: RoundTimes | Failed, request: Request, log: Log) -> float | None:
    """Let a contender train ``request.warm_up`` rounds after its first round, whose times are ``first``.

    Returns the seconds of the first round, or None if any of these rounds failed.
    """
    if isinstance(first, Failed):
        log.note_failure(process.contender, first)
        return None
    if request.warm_up and isinstance(warm_up := process.rounds(request.warm_up), Failed):
        log.note_failure(process.contender, warm_up)
        return None
    return first.seconds[0]


def quiet_turns(loads: Sequence[float]) -> list[int]:
    """Return the indices of the turns that count: those without much load by other processes.

    If there are fewer than ``MIN_QUIET_TURNS`` of them, all turns count. ``loads`` holds the share of all cores that
    other processes used in each turn.

    >>> quiet_turns([0.0, 0.9, 0.02, 0.5, 0.1]), quiet_turns([0.5, 0.0])
    ([0, 2, 4], [0, 1])
    """
    quiet = [turn for turn, load in enumerate(loads) if load <= MAX_OTHER_LOAD]
    return quiet if len(quiet) >= MIN_QUIET_TURNS else list(range(len(loads)))


def _note_load(loads: Sequence[float], counted: Sequence[int], log: Log) -> None:
    """Note if other processes disturbed the measurement.

    Args:
        loads: share of all cores that other processes used in each turn.
        counted: indices of the turns that count.
        log: gets the note.
    """
    if len(counted) < len(loads):
        log.note(
            f"{len(counted)} of {len(loads)} turns count: during the others, "
            f"other processes used more than {MAX_OTHER_LOAD:.0%} of the cores"
        )
    elif max((loads[turn] for turn in counted), default=0.0) > MAX_OTHER_LOAD:
        log.note(f"other processes used {median(loads):.0%} of the cores; measure again on an idle machine")
