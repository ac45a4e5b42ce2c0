"""Measuring contenders against one another, and what comes of it as plain values."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from fedflat.algorithms import algorithm, canonical
from fedflat.bench.contenders import Bound, Fedflat, Plain
from fedflat.bench.machine import Load, hardware, versions
from fedflat.bench.others import OTHERS, Other
from fedflat.bench.setting import Setting, plan_of, sampler_of
from fedflat.bench.stage import Contender, Done, Failed, Performer
from fedflat.data import fixes_clients, make_partition
from fedflat.engines.cpu.worker_pool import available_cores
from fedflat.errors import UserError, one_of
from fedflat.experiment.setup.problem import federation
from fedflat.text import parse

FORMAT = 1
SPELL = 5
"""Rounds that a contender does in its turn on a CPU, after one that does not count."""
COUNTED = 5
"""Rounds over which samples are counted."""
PLAIN, NONE = "plain", "none"
QUIET = 0.1
"""The share of the cores that other processes may take in a round that counts."""
ENOUGH = 3
"""Quiet rounds from which on the others do not count."""
PRECISIONS = ("float32", "tf32", "bf16")
ENGINES = ("auto", "loop", "lanes", "ray")
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What to measure, and how often."""

    setting: Setting
    algorithms: Sequence[str] = ("fedavg",)
    precisions: Sequence[str] = ("float32",)
    engines: Sequence[str] = ("auto",)
    clients: Sequence[int] = (100,)
    against: Sequence[str] = (PLAIN, *OTHERS)
    rounds: int = 10
    warm_up: int = 2
    together: int = 1
    """How many contenders set up at the same time on a GPU."""

    def check(self) -> None:
        """Refuse what cannot be measured."""
        setting = self.setting
        for what, given, known in (
            ("precision to measure", self.precisions, PRECISIONS),
            ("engine", self.engines, ENGINES),
            ("contender", self.against, (PLAIN, *OTHERS, NONE)),
        ):
            for name in given:
                if name not in known:
                    raise one_of(what, name, known)
        lower = [precision for precision in self.precisions if precision != "float32"]
        if lower and not setting.on_gpu:
            raise UserError(f"--precision {lower[0]} is for a GPU, and this measures on the CPU; use float32")
        if setting.device == "cuda" and not setting.on_gpu:
            raise UserError("--device cuda was asked for, but torch sees no GPU here; use --device cpu")
        if "mixup" in [call.name for call in parse(setting.augmentation)]:
            raise UserError(
                "mixup blends targets, which the plain loop does not; measure with --augmentation crop-flip or none"
            )
        data, here = setting.dataset(), replace(setting, device="cpu")
        for clients in self.clients:
            federation(here.config(clients=clients), data=data)

    def contenders(self) -> list[Contender]:
        """Everything to measure, in the order of the table."""
        found: list[Contender] = []
        for clients in self.clients:
            for precision in self.precisions:
                for engine in self.engines:
                    shown = engine if engine != "auto" else "lanes" if self.setting.on_gpu else "loop"
                    found += [
                        Fedflat(self.setting, canonical(algorithm(text)), precision, shown, clients)
                        for text in self.algorithms
                    ]
        if PLAIN in self.against:
            found += [
                Plain(self.setting, precision=precision, clients=self.clients[0]) for precision in self.precisions
            ]
        found += [other(self.setting, clients=self.clients[0]) for other in self._others() if other.installed()]
        for precision in self.precisions:
            # On a CPU the compiler makes one large batch slower, not faster, and a bound should be the least there is.
            for compiled in sorted({self.setting.on_gpu and self.setting.compiled(engine) for engine in self.engines}):
                engine = "compiled" if compiled else "eager"
                found.append(Bound(self.setting, "", precision, engine, self.clients[0], compiled))
        return found

    def _others(self) -> list[type[Other]]:
        return [OTHERS[name] for name in self.against if name in OTHERS]

    def notes(self) -> list[str]:
        """What is not measured because it is not there."""
        absent = [other for other in self._others() if not other.installed()]
        return [
            f"{other.name} is not installed, so it was not measured; install it with: {other.install}"
            for other in absent
        ]


@dataclass(frozen=True)
class Measured:
    """What was measured of one contender."""

    contender: Contender
    seconds: list[float]
    """Of each round after the warm-up."""
    first: float
    """Set-up and first round together."""
    device_bytes: int | None
    host_bytes: int | None

    @property
    def median(self) -> float:
        """Seconds per round."""
        return median(self.seconds)


def benchmark(request: Request, command: str, tell: Tell) -> dict[str, Any]:
    """Measure everything that is asked for; the result as plain values, as it goes into a JSON file."""
    request.check()
    notes = request.notes()
    for note in notes:
        tell(note)
    measured = _one_by_one(request, tell, notes) if request.setting.on_gpu else _in_turns(request, tell, notes)
    if not any(isinstance(m.contender, Fedflat) for m in measured):
        raise UserError(f"nothing could be measured: {next(note for note in notes if note.startswith(Fedflat.name))}")
    samples = {clients: samples_per_round(request.setting, clients) for clients in request.clients}
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "hardware": hardware(),
        "versions": versions(),
        "setting": {
            key: str(value) if isinstance(value, Path) else value for key, value in asdict(request.setting).items()
        },
        "rounds": request.rounds,
        "warm_up": request.warm_up,
        "rows": [row(m, measured, samples[m.contender.clients]) for m in measured],
        "notes": notes,
    }


def samples_per_round(setting: Setting, clients: int) -> float:
    """How many training samples the cohorts of the first rounds see on average; the passes of SAM are not counted twice."""
    data, config = setting.dataset(), setting.config(clients=clients)
    number = None if fixes_clients(setting.partition) else clients
    train = data.train
    partition = make_partition(
        setting.partition, train.targets, data.num_classes, number, config.seed, 0.0, train.groups, train.coarse
    ).clients
    plan, sampler = plan_of(config), sampler_of(config, len(partition))
    cohorts = [(number, client) for number in range(COUNTED) for client in sampler(config.seed, number)]
    return (
        sum(
            len(batch)
            for number, client in cohorts
            for batch in plan.batches(config.seed, number, client, len(partition[client]))
        )
        / COUNTED
    )


def row(one: Measured, measured: Sequence[Measured], samples: float) -> dict[str, Any]:
    """One line of the table; quotients are medians over rounds that were measured side by side."""
    contender = one.contender
    same = [m for m in measured if m.contender.precision == contender.precision] or list(measured)
    compiled = (
        isinstance(contender, Fedflat) and contender.setting.on_gpu and contender.setting.compiled(contender.engine)
    )
    bounds = [m for m in same if isinstance(m.contender, Bound)]
    bound = next(
        (m for m in bounds if isinstance(m.contender, Bound) and m.contender.compiled == compiled),
        bounds[0] if bounds else None,
    )
    plain = next((m for m in same if isinstance(m.contender, Plain)), None)
    cores = 1 if contender.setting.on_gpu else available_cores()
    setting = contender.setting
    in_bound = (
        setting.clients_per_round * setting.batch_size * setting.local_steps
    )  # clients with less data than a batch have fewer
    samples = float(in_bound) if isinstance(contender, Bound) else samples
    return {
        "contender": contender.name,
        "algorithm": contender.algorithm or None,
        "precision": contender.precision,
        "engine": contender.engine or None,
        "clients": contender.clients,
        "seconds_per_round": one.median / (cores if isinstance(contender, Bound) else 1),
        "seconds": one.seconds,
        "samples_per_round": samples,
        "samples_per_second": samples / one.median * (cores if isinstance(contender, Bound) else 1),
        "share_of_bound": None if bound is None or one is bound else quotient(bound, one) / cores * samples / in_bound,
        "times_plain": None if plain is None or one is plain or isinstance(contender, Bound) else quotient(plain, one),
        "set_up_seconds": max(0.0, one.first - one.median),
        "peak_device_bytes": one.device_bytes,
        "peak_host_bytes": one.host_bytes,
    }


def quotient(one: Measured, other: Measured) -> float:
    """How many times longer one takes than another: the median over rounds that were measured side by side."""
    return median(a / b for a, b in zip(one.seconds, other.seconds, strict=True))


def _one_by_one(request: Request, tell: Tell, notes: list[str]) -> list[Measured]:
    """Each contender alone while it is measured; some may set up at the same time, where the device has room for them."""
    measured = []
    waiting = request.contenders()
    while waiting:
        some, waiting = waiting[: request.together], waiting[request.together :]
        performers = [Performer(contender) for contender in some]
        try:
            for performer in performers:
                tell(f"{performer.contender}: setting up")
                performer.begin(1)
            for performer, first in [(performer, performer.done()) for performer in performers]:
                found = _alone(performer, first, request, notes, tell)
                if found is not None:
                    measured.append(found)
        finally:
            for performer in performers:
                performer.end()
    return measured


def _alone(
    performer: Performer, first: Done | Failed, request: Request, notes: list[str], tell: Tell
) -> Measured | None:
    """Measure a contender that has done its first round; None where it fails."""
    set_up = _warmed_up(performer, first, request, notes, tell)
    if set_up is None:
        return None
    tell(f"{performer.contender}: measuring {request.rounds} rounds")
    done = performer.rounds(request.rounds)
    if isinstance(done, Failed):
        _note(performer.contender, done, notes, tell)
        return None
    found = Measured(performer.contender, done.seconds, set_up, done.device_bytes, performer.host_bytes())
    tell(f"{performer.contender}: {found.median:.4g} s a round")
    return found


def _in_turns(request: Request, tell: Tell, notes: list[str]) -> list[Measured]:
    """All contenders in turns, some rounds each: whatever else the machine does, it does to all of them. Those that wait lie still."""
    performers = [Performer(contender) for contender in request.contenders()]
    try:
        first: dict[int, float] = {}
        for number, performer in enumerate(performers):
            tell(f"{performer.contender}: setting up")
            found = _warmed_up(performer, performer.rounds(1), request, notes, tell)
            if found is not None:
                first[number] = found
            performer.rest()
        seconds: dict[int, list[list[float]]] = {number: [] for number in first}
        shares: list[float] = []
        spells = [min(SPELL, request.rounds - before) for before in range(0, request.rounds, SPELL)]
        for turn, spell in enumerate(spells if seconds else (), 1):
            tell(f"measuring turn {turn} of {len(spells)}")
            load = Load()
            for number in list(seconds):
                done = _one_turn(performers[number], spell)
                if isinstance(done, Failed):
                    _note(performers[number].contender, done, notes, tell)
                    del seconds[number]
                else:
                    seconds[number].append(done.seconds)
            shares.append(load.share_of_others())
        kept = quiet_turns(shares)
        _note_load(shares, kept, notes, tell)
        for performer in performers:
            performer.rest(False)
        return [
            Measured(
                performers[number].contender,
                [one for turn in kept for one in found_in[turn]],
                first[number],
                None,
                performers[number].host_bytes(),
            )
            for number, found_in in seconds.items()
        ]
    finally:
        for performer in performers:
            performer.end()


def _one_turn(performer: Performer, rounds: int) -> Done | Failed:
    """Some rounds of one contender; a first one, which brings its memory back to mind, does not count."""
    performer.rest(False)
    again = performer.rounds(1)
    done = again if isinstance(again, Failed) else performer.rounds(rounds)
    performer.rest()
    return done


def _warmed_up(
    performer: Performer, first: Done | Failed, request: Request, notes: list[str], tell: Tell
) -> float | None:
    """Let a contender warm up after its first round; the seconds until that was done, or None where it failed."""
    warm = performer.rounds(request.warm_up) if not isinstance(first, Failed) and request.warm_up else first
    for answer in (first, warm):
        if isinstance(answer, Failed):
            _note(performer.contender, answer, notes, tell)
            return None
    assert not isinstance(first, Failed)
    return first.seconds[0]


def quiet_turns(shares: Sequence[float]) -> list[int]:
    """The turns in which other processes left the machine alone, where these are enough; otherwise all.

    >>> quiet_turns([0.0, 0.9, 0.02, 0.5, 0.1]), quiet_turns([0.5, 0.0])
    ([0, 2, 4], [0, 1])
    """
    quiet = [turn for turn, share in enumerate(shares) if share <= QUIET]
    return quiet if len(quiet) >= ENOUGH else list(range(len(shares)))


def _note_load(shares: Sequence[float], kept: Sequence[int], notes: list[str], tell: Tell) -> None:
    most = max((shares[turn] for turn in kept), default=0.0)
    if len(kept) < len(shares):
        notes.append(
            f"{len(kept)} of {len(shares)} turns count: in the others, other processes took more than {QUIET:.0%} of the cores"
        )
    elif most > QUIET:
        notes.append(
            f"other processes took {median(shares):.0%} of the cores meanwhile: measure again when the machine is quiet"
        )
    else:
        return
    tell(notes[-1])


def _note(contender: Contender, failure: Failed, notes: list[str], tell: Tell) -> None:
    notes.append(f"{contender} was not measured: {failure.sentence}")
    tell(notes[-1])
