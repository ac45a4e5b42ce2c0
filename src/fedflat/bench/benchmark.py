"""Measure contenders against each other: on a GPU one by one, on a CPU in turns. The result is plain values."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from fedflat.algorithms import algorithm, canonical
from fedflat.bench.contenders import Fedflat, Plain, SpeedBound
from fedflat.bench.machine import Load, hardware, versions
from fedflat.bench.others import OTHERS, Other
from fedflat.bench.setting import BenchmarkSetting, plan_of, sampler_of
from fedflat.bench.stage import Contender, Failed, Performer, RoundTimes
from fedflat.errors import UserError, one_of
from fedflat.experiment.setup.problem import build_partition, build_problem
from fedflat.processes import available_cores
from fedflat.text import parse

FORMAT = 1
ROUNDS_PER_TURN = 5
"""Measured rounds per turn on a CPU, after one that does not count."""
COUNTED_ROUNDS = 5
"""Rounds over which samples are counted."""
PLAIN, NONE = "plain", "none"
MAX_OTHER_LOAD = 0.1
"""Largest share of the cores that other processes may use during a turn that counts."""
MIN_QUIET_TURNS = 3
"""Number of quiet turns from which the others are discarded."""
PRECISIONS = ("float32", "tf32", "bf16")
ENGINES = ("auto", "loop", "lanes", "ray")
Tell = Callable[[str], None]
"""Shows a line of text on progress."""


@dataclass(frozen=True)
class Request:
    """What to measure, and for how many rounds."""

    setting: BenchmarkSetting
    algorithms: Sequence[str] = ("fedavg",)
    precisions: Sequence[str] = ("float32",)
    engines: Sequence[str] = ("auto",)
    clients: Sequence[int] = (100,)
    against: Sequence[str] = (PLAIN, *OTHERS)
    rounds: int = 10
    warm_up: int = 2
    together: int = 1
    """Contenders that set up at the same time on a GPU."""

    def check(self) -> None:
        """Raise a ``UserError`` for a request that cannot be measured."""
        setting = self.setting
        _require_known("precision", self.precisions, PRECISIONS)
        _require_known("engine", self.engines, ENGINES)
        _require_known("contender", self.against, (PLAIN, *OTHERS, NONE))
        lower = [precision for precision in self.precisions if precision != "float32"]
        if lower and not setting.on_gpu:
            raise UserError(f"--precision {lower[0]} needs a GPU; use float32 on the CPU")
        if setting.device == "cuda" and not setting.on_gpu:
            raise UserError("--device cuda needs a GPU, but torch finds none; use --device cpu")
        if "mixup" in [call.name for call in parse(setting.augmentation)]:
            raise UserError("the plain loop has no mixup; measure with --augmentation crop-flip or none")
        data, on_cpu = setting.load_data(), replace(setting, device="cpu")
        for clients in self.clients:
            build_problem(on_cpu.config(clients=clients), data=data)

    def contenders(self) -> list[Contender]:
        """Everything to measure, in the order of the table."""
        setting, clients = self.setting, self.clients[0]
        default_engine = "lanes" if setting.on_gpu else "loop"
        contenders: list[Contender] = []
        for number, precision, engine, text in itertools.product(
            self.clients, self.precisions, self.engines, self.algorithms
        ):
            resolved_engine = default_engine if engine == "auto" else engine
            contenders.append(Fedflat(setting, canonical(algorithm(text)), precision, resolved_engine, number))
        if PLAIN in self.against:
            contenders += [Plain(setting, precision=precision, clients=clients) for precision in self.precisions]
        contenders += [other(setting, clients=clients) for other in self._others() if other.installed()]
        # On a CPU, compiling makes one large batch slower, and a bound should be the least possible time.
        compilations = sorted({setting.on_gpu and setting.compiled(engine) for engine in self.engines})
        for precision in self.precisions:
            for compiled in compilations:
                engine = "compiled" if compiled else "eager"
                contenders.append(SpeedBound(setting, "", precision, engine, clients, compiled))
        return contenders

    def _others(self) -> list[type[Other]]:
        """The requested simulators, installed or not."""
        return [OTHERS[name] for name in self.against if name in OTHERS]

    def notes(self) -> list[str]:
        """Contenders that are not installed, and how to install them."""
        return [
            f"{other.name} is not installed and was not measured; install it with: {other.install}"
            for other in self._others()
            if not other.installed()
        ]


def _require_known(kind: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise a ``UserError`` for the first name that is not known."""
    for name in names:
        if name not in known:
            raise one_of(kind, name, known)


@dataclass(frozen=True)
class ContenderResult:
    """The measurements of one contender."""

    contender: Contender
    seconds: list[float]
    """Per round, after the warm-up."""
    first: float
    """Seconds of the set-up and the first round together."""
    device_bytes: int | None
    """Peak GPU memory."""
    host_bytes: int | None
    """Peak memory of its processes."""

    @property
    def median(self) -> float:
        """Seconds per round."""
        return median(self.seconds)


def benchmark(request: Request, command: str, tell: Tell) -> dict[str, Any]:
    """Measure all contenders.

    Args:
        request: what to measure.
        command: the command line, for the record.
        tell: called with a line of text on progress.

    Returns:
        Hardware, versions, settings and one row per contender, as JSON-compatible values.
    """
    request.check()
    notes = request.notes()
    for note in notes:
        tell(note)
    results = _one_by_one(request, tell, notes) if request.setting.on_gpu else _in_turns(request, tell, notes)
    if not any(isinstance(result.contender, Fedflat) for result in results):
        reason = next(note for note in notes if note.startswith(Fedflat.name))
        raise UserError(f"nothing could be measured: {reason}")
    samples = {clients: samples_per_round(request.setting, clients) for clients in request.clients}
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
        "notes": notes,
    }


def samples_per_round(setting: BenchmarkSetting, clients: int) -> float:
    """Mean number of training samples per round; SAM's second pass does not count."""
    config = setting.config(clients=clients)
    clients_examples = build_partition(config, setting.load_data()).clients
    plan, sampler = plan_of(config), sampler_of(config, len(clients_examples))
    samples = 0
    for round in range(COUNTED_ROUNDS):
        for client in sampler(config.seed, round):
            samples += sum(map(len, plan.batches(config.seed, round, client, len(clients_examples[client]))))
    return samples / COUNTED_ROUNDS


def row(result: ContenderResult, results: Sequence[ContenderResult], samples: float) -> dict[str, Any]:
    """One row of the table; ratios are medians over rounds measured side by side.

    Args:
        result: the contender of the row.
        results: all contenders.
        samples: training samples per round of this contender.
    """
    contender, setting = result.contender, result.contender.setting
    comparable = [other for other in results if other.contender.precision == contender.precision] or list(results)
    plain = next((other for other in comparable if isinstance(other.contender, Plain)), None)
    bound = _bound_for(contender, comparable)
    is_bound = isinstance(contender, SpeedBound)
    # Clients with less data than a batch see fewer samples than the bound.
    samples_of_bound = setting.clients_per_round * setting.batch_size * setting.local_steps
    samples = float(samples_of_bound) if is_bound else samples
    # On a CPU the bound uses one core, but stands for a perfect use of all of them.
    cores = 1 if setting.on_gpu else available_cores()
    seconds = result.median / (cores if is_bound else 1)
    share = None
    if bound is not None and result is not bound:
        share = ratio(bound, result) / cores * samples / samples_of_bound
    return {
        "contender": contender.name,
        "algorithm": contender.algorithm or None,
        "precision": contender.precision,
        "engine": contender.engine or None,
        "clients": contender.clients,
        "seconds_per_round": seconds,
        "seconds": result.seconds,
        "samples_per_round": samples,
        "samples_per_second": samples / seconds,
        "share_of_bound": share,
        "times_plain": None if plain is None or result is plain or is_bound else ratio(plain, result),
        "set_up_seconds": max(0.0, result.first - result.median),
        "peak_device_bytes": result.device_bytes,
        "peak_host_bytes": result.host_bytes,
    }


def _bound_for(contender: Contender, results: Sequence[ContenderResult]) -> ContenderResult | None:
    """The first bound that is compiled if the contender is, or else the first bound; None without any."""
    setting = contender.setting
    is_compiled = isinstance(contender, Fedflat) and setting.on_gpu and setting.compiled(contender.engine)
    bounds = [result for result in results if isinstance(result.contender, SpeedBound)]
    for bound in bounds:
        if isinstance(bound.contender, SpeedBound) and bound.contender.compiled == is_compiled:
            return bound
    return bounds[0] if bounds else None


def ratio(numerator: ContenderResult, denominator: ContenderResult) -> float:
    """The seconds of one contender divided by those of another: the median over rounds measured side by side."""
    return median(a / b for a, b in zip(numerator.seconds, denominator.seconds, strict=True))


def _one_by_one(request: Request, tell: Tell, notes: list[str]) -> list[ContenderResult]:
    """Measure each contender alone; ``request.together`` of them set up at the same time."""
    results = []
    contenders = request.contenders()
    for start in range(0, len(contenders), request.together):
        performers = [Performer(contender) for contender in contenders[start : start + request.together]]
        try:
            for performer in performers:
                tell(f"{performer.contender}: setting up")
                performer.start_rounds(1)
            first_rounds = [performer.wait_for_rounds() for performer in performers]  # all before any is measured
            for performer, first in zip(performers, first_rounds, strict=True):
                result = _measure_alone(performer, first, request, notes, tell)
                if result is not None:
                    results.append(result)
        finally:
            for performer in performers:
                performer.end()
    return results


def _measure_alone(
    performer: Performer, first: RoundTimes | Failed, request: Request, notes: list[str], tell: Tell
) -> ContenderResult | None:
    """Measure a contender that has done its first round; None if it fails."""
    first_seconds = _warm_up(performer, first, request, notes, tell)
    if first_seconds is None:
        return None
    tell(f"{performer.contender}: measuring {request.rounds} rounds")
    times = performer.rounds(request.rounds)
    if isinstance(times, Failed):
        _note_failure(performer.contender, times, notes, tell)
        return None
    result = ContenderResult(
        performer.contender, times.seconds, first_seconds, times.device_bytes, performer.host_bytes()
    )
    tell(f"{performer.contender}: {result.median:.4g} s per round")
    return result


def _in_turns(request: Request, tell: Tell, notes: list[str]) -> list[ContenderResult]:
    """Measure all contenders in turns, so that other load affects all alike; the others are paused meanwhile."""
    performers = [Performer(contender) for contender in request.contenders()]
    try:
        first_seconds: dict[Performer, float] = {}
        for performer in performers:
            tell(f"{performer.contender}: setting up")
            seconds = _warm_up(performer, performer.rounds(1), request, notes, tell)
            if seconds is not None:
                first_seconds[performer] = seconds
            performer.pause()
        seconds_by_turn, loads = _take_turns(list(first_seconds), request.rounds, notes, tell)
        counted = quiet_turns(loads)
        _note_load(loads, counted, notes, tell)
        for performer in performers:
            performer.resume()
        results = []
        for performer, turns in seconds_by_turn.items():
            seconds_per_round = list(itertools.chain.from_iterable(turns[turn] for turn in counted))
            first, memory = first_seconds[performer], performer.host_bytes()
            results.append(ContenderResult(performer.contender, seconds_per_round, first, None, memory))
        return results
    finally:
        for performer in performers:
            performer.end()


def _take_turns(
    performers: Sequence[Performer], rounds: int, notes: list[str], tell: Tell
) -> tuple[dict[Performer, list[list[float]]], list[float]]:
    """Let paused contenders do ``rounds`` rounds each, a few at a time.

    Returns:
        The seconds of every round by contender and turn, without contenders that failed; and the load by other
        processes in every turn, as a share of all cores.
    """
    seconds: dict[Performer, list[list[float]]] = {performer: [] for performer in performers}
    loads: list[float] = []
    starts = range(0, rounds, ROUNDS_PER_TURN)
    for turn, start in enumerate(starts, 1):
        if not seconds:
            break
        tell(f"measuring turn {turn} of {len(starts)}")
        load = Load()
        for performer in list(seconds):
            times = _take_turn(performer, min(ROUNDS_PER_TURN, rounds - start))
            if isinstance(times, Failed):
                _note_failure(performer.contender, times, notes, tell)
                del seconds[performer]
            else:
                seconds[performer].append(times.seconds)
        loads.append(load.share_of_others())
    return seconds, loads


def _take_turn(performer: Performer, rounds: int) -> RoundTimes | Failed:
    """Some rounds of one contender; a first one, which warms the caches, does not count."""
    performer.resume()
    times = performer.rounds(1)
    if not isinstance(times, Failed):
        times = performer.rounds(rounds)
    performer.pause()
    return times


def _warm_up(
    performer: Performer, first: RoundTimes | Failed, request: Request, notes: list[str], tell: Tell
) -> float | None:
    """Let a contender warm up after its first round; returns the seconds of that round, or None if it failed."""
    if isinstance(first, Failed):
        _note_failure(performer.contender, first, notes, tell)
        return None
    if request.warm_up:
        warm_up = performer.rounds(request.warm_up)
        if isinstance(warm_up, Failed):
            _note_failure(performer.contender, warm_up, notes, tell)
            return None
    return first.seconds[0]


def quiet_turns(loads: Sequence[float]) -> list[int]:
    """The turns without much load by other processes, if there are enough of them; otherwise all turns.

    >>> quiet_turns([0.0, 0.9, 0.02, 0.5, 0.1]), quiet_turns([0.5, 0.0])
    ([0, 2, 4], [0, 1])
    """
    quiet = [turn for turn, load in enumerate(loads) if load <= MAX_OTHER_LOAD]
    return quiet if len(quiet) >= MIN_QUIET_TURNS else list(range(len(loads)))


def _note_load(loads: Sequence[float], counted: Sequence[int], notes: list[str], tell: Tell) -> None:
    """Add a note if other processes disturbed the measurement; ``counted`` are the turns that count."""
    if len(counted) < len(loads):
        notes.append(
            f"{len(counted)} of {len(loads)} turns count: during the others, "
            f"other processes used more than {MAX_OTHER_LOAD:.0%} of the cores"
        )
    elif max((loads[turn] for turn in counted), default=0.0) > MAX_OTHER_LOAD:
        notes.append(f"other processes used {median(loads):.0%} of the cores; measure again on an idle machine")
    else:
        return
    tell(notes[-1])


def _note_failure(contender: Contender, failure: Failed, notes: list[str], tell: Tell) -> None:
    notes.append(f"{contender} was not measured: {failure.reason}")
    tell(notes[-1])
