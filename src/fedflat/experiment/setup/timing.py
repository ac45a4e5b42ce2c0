"""Builds the policy and the client clock of a config."""

from __future__ import annotations

import torch

from fedflat.algorithms import Algorithm
from fedflat.engines.problem.problem import Problem
from fedflat.errors import UserError
from fedflat.experiment.config import Config
from fedflat.setting_names import parse_measurements
from fedflat.timing import Asynchronous, ClientClock, Clock, Policy, StepLimit, Synchronous, clock_spec, policy_spec

ROW_MEASUREMENTS = ("drift", "clients")
"""In-run measurements that need the updates of a cohort that trained together."""


def policy_of(config: Config) -> Policy:
    """The policy of a run."""
    return policy_spec(config.federation.policy)


def has_time(config: Config) -> bool:
    """Whether a run has virtual time: a clock, or a policy other than ``wait``."""
    return config.federation.clock is not None or config.federation.policy != "wait"


def depends_on_time(config: Config) -> bool:
    """Whether the cohorts of a run depend on virtual time, because of its policy or of unavailable clients."""
    text = config.federation.clock
    return config.federation.policy != "wait" or (text is not None and clock_spec(text).availability is not None)


def floats_sent(config: Config, algorithm: Algorithm, problem: Problem) -> tuple[int, int]:
    """How many floats a client receives and sends per participation."""
    size, statistics = problem.layout.size, problem.buffer_layout.size
    extra = 0 if config.training.statistics == "own" else statistics
    return algorithm.floats_down(size) + extra, algorithm.floats_up(size) + extra


def client_clock(config: Config, algorithm: Algorithm, problem: Problem) -> ClientClock:
    """The times of a run's clients; without a clock, everything takes no time."""
    text = config.federation.clock
    bytes_per_float = torch.finfo(problem.dtype).bits // 8
    down, up = (floats * bytes_per_float for floats in floats_sent(config, algorithm, problem))
    return ClientClock(clock_spec(text) if text else Clock(), config.seed, algorithm.backward_passes, down, up)


def step_limit(config: Config, algorithm: Algorithm, problem: Problem) -> StepLimit | None:
    """How many steps clients complete before the deadline of a run; None if it does not end training early."""
    if not has_time(config):
        return None
    policy = policy_of(config)
    return policy.step_limit(client_clock(config, algorithm, problem)) if isinstance(policy, Synchronous) else None


def check_asynchronous(config: Config, algorithm: Algorithm) -> None:
    """Raise a ``UserError`` if a run has an asynchronous policy that its other settings do not allow."""
    policy, federation = policy_of(config), config.federation
    if not isinstance(policy, Asynchronous):
        return
    setting = f"federation.policy={federation.policy}"
    conflict = next(filter(None, (slot.asynchronous_conflict() for _, slot in algorithm.slots())), None)
    if conflict:
        raise UserError(
            f"{setting} does not work with {config.algorithm}: {conflict}; use a synchronous policy, or an algorithm "
            "such as fedavg, fedprox, scaffold or fedmoswa"
        )
    keeps_momentum = any(fields for slot, fields in algorithm.server_fields().items() if slot != "server")
    if policy.scale(0) != 1 and not policy.mixes_models and keeps_momentum:
        raise UserError(
            f"{setting} scales displacements, from which {config.algorithm} also computes server state; use "
            "fedbuff without sum and reference, and set the learning rate of the server, e.g. fedavg+sgd(server_lr=2)"
        )
    if federation.aggregation != "mean":
        raise UserError(
            f"{setting} does not work with federation.aggregation={federation.aggregation}, which needs the updates of "
            "a cohort that starts together; use mean"
        )
    if federation.sampling != "fixed" or federation.dropout:
        option = "sampling=bernoulli" if federation.sampling == "bernoulli" else f"dropout={federation.dropout}"
        raise UserError(
            f"{setting} keeps clients_per_round clients in flight, so federation.{option} has no meaning; remove it, "
            "or let clients be unavailable, as in --clock 'lognormal+markov'"
        )
    measurements = parse_measurements(config.flatness.what)
    impossible = [name for name in measurements if name in ROW_MEASUREMENTS]
    if config.flatness.every is not None and impossible:
        others = "+".join(name for name in measurements if name not in impossible) or "lambda_max"
        raise UserError(
            f"{setting} has no cohorts that train together, so {' and '.join(impossible)} cannot be measured; "
            f"use --flatness every={config.flatness.every},what={others}"
        )
