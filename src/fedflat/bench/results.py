"""The results of a benchmark: one row per contender, compared with the bound, the plain loop and fedflat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from fedflat.bench.contender_process import Contender
from fedflat.bench.contenders import Fedflat, Plain, SpeedBound
from fedflat.bench.environments import installed_versions
from fedflat.bench.peers import Simulator
from fedflat.bench.plain import PlainLoop
from fedflat.bench.setting import BenchmarkSetting, plan_of
from fedflat.experiment.setup.engine import sampler_of
from fedflat.experiment.setup.problem import build_partition
from fedflat.processes import available_cores

COUNTED_ROUNDS = 5
"""Rounds over which the number of training samples per round is averaged."""
MAX_LOSS_DIFFERENCE = 0.25
"""Largest difference between training losses of equal work, as a share of the decrease of fedflat's loss."""


@dataclass(frozen=True)
class ContenderResult:
    """The measurements of one contender."""

    contender: Contender
    seconds: list[float]
    """Seconds of each measured round, after the warm-up."""
    first_seconds: float
    """Seconds of the set-up and the first round together."""
    device_bytes: int | None
    """Peak GPU memory; None if unknown or without a GPU."""
    host_bytes: int | None
    """Peak CPU memory of the contender's processes; None if unknown."""
    loss: float | None = None
    """Training loss after all rounds; None for the bound."""
    cpu_seconds: float | None = None
    """CPU time per round, of all processes of the contender; None if unknown or on a GPU."""

    @property
    def median(self) -> float:
        """Median seconds per round."""
        return median(self.seconds)


def samples_per_round(setting: BenchmarkSetting, clients: int) -> float:
    """Return how many samples the clients of a round train on in total, averaged over ``COUNTED_ROUNDS`` rounds.

    A sample that SAM passes through the model twice counts once.
    """
    config = setting.config(clients=clients)
    client_indices = build_partition(config, setting.load_data()).clients  # example indices of each client
    plan, sampler = plan_of(config), sampler_of(config, len(client_indices))
    samples = 0
    for round in range(COUNTED_ROUNDS):
        for client in sampler(config.seed, round):
            batches = plan.batches(config.seed, round, client, len(client_indices[client]))
            samples += sum(len(batch) for batch in batches)
    return samples / COUNTED_ROUNDS


def row(result: ContenderResult, results: Sequence[ContenderResult], samples: float) -> dict[str, Any]:
    """Return one row of the table: a contender, compared with the bound and the plain loop of the same precision.

    Times are compared round by round: a ratio of two contenders is the median over rounds of the ratio in each round.

    Args:
        result: the contender of the row.
        results: all contenders.
        samples: training samples per round of this contender.
    """
    contender, setting = result.contender, result.contender.setting
    comparable = [other for other in results if other.contender.precision == contender.precision]
    plain = next((other for other in comparable if isinstance(other.contender, Plain)), None)
    bound = _bound_for(contender, comparable)
    is_bound = isinstance(contender, SpeedBound)
    # The bound uses full batches only. Clients with less data than a batch see fewer samples.
    samples_of_bound = setting.clients_per_round * setting.batch_size * setting.local_steps
    samples_per_round = float(samples_of_bound) if is_bound else samples
    # On a CPU, the bound is measured on one core and divided by the number of cores: perfect use of all of them.
    cores = 1 if setting.on_gpu else available_cores()
    seconds = result.median / (cores if is_bound else 1)
    share = None  # the contender's samples per second, divided by those of the bound
    if bound is not None and result is not bound:
        share = ratio(bound, result) / cores * samples_per_round / samples_of_bound
    return {
        "contender": contender.name,
        "algorithm": contender.algorithm or None,
        "precision": contender.precision,
        "engine": contender.engine or None,
        "clients": contender.clients,
        "seconds_per_round": seconds,
        "seconds": result.seconds,
        "cpu_seconds_per_round": result.cpu_seconds,
        "samples_per_round": samples_per_round,
        "samples_per_second": samples_per_round / seconds,
        "share_of_bound": share,
        "times_plain": None if plain is None or result is plain or is_bound else ratio(plain, result),
        "set_up_seconds": max(0.0, result.first_seconds - result.median),
        "peak_device_bytes": result.device_bytes,
        "peak_host_bytes": result.host_bytes,
        "loss": result.loss,
        "versions": installed_versions(contender.environment) if isinstance(contender, Simulator) else None,
    }


def _bound_for(contender: Contender, results: Sequence[ContenderResult]) -> ContenderResult | None:
    """Return the bound to compare a contender with, or None if ``results`` contain no bound.

    Compiled contenders are compared with the compiled bound, and all others with the eager bound. If that bound was
    not measured, they are compared with the first one.
    """
    setting = contender.setting
    is_compiled = isinstance(contender, Fedflat) and setting.compiled(contender.engine)
    bounds = [result for result in results if isinstance(result.contender, SpeedBound)]
    for bound in bounds:
        if isinstance(bound.contender, SpeedBound) and bound.contender.compiled == is_compiled:
            return bound
    return bounds[0] if bounds else None


def ratio(numerator: ContenderResult, denominator: ContenderResult) -> float:
    """Return the median over rounds of one contender's seconds divided by another's seconds in the same round."""
    return median(a / b for a, b in zip(numerator.seconds, denominator.seconds, strict=True))


def different_work(results: Sequence[ContenderResult]) -> list[str]:
    """Return a warning for every contender whose training loss suggests that it does different work than fedflat.

    That is the case if both losses differ by more than ``MAX_LOSS_DIFFERENCE`` times the decrease of fedflat's loss.
    Contenders draw different cohorts and batches, so small differences are normal.
    """
    comparable = [result for result in results if result.contender.algorithm == "fedavg" and result.loss is not None]
    if not comparable or not isinstance(comparable[0].contender, Fedflat):  # fedflat comes first, if it was measured
        return []
    ours, clients = comparable[0].loss or 0.0, comparable[0].contender.clients
    setting = replace(comparable[0].contender.setting, device="cpu")
    initial = PlainLoop(setting.config(clients=clients), setting.load_data()).loss()
    return [
        f"{result.contender} may do different work: its training loss went from {initial:.4f} to {result.loss:.4f}, "
        f"that of fedflat to {ours:.4f}"
        for result in comparable
        if result.contender.clients == clients
        and not abs((result.loss or 0.0) - ours) <= MAX_LOSS_DIFFERENCE * abs(initial - ours)  # also if it is NaN
    ]
