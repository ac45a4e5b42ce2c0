"""From a config to local training and client sampling."""

from __future__ import annotations

from fedflat.algorithms import Algorithm
from fedflat.algorithms.descent import Descent
from fedflat.algorithms.lr_schedule import Schedule
from fedflat.engines.round.aggregation import Aggregation
from fedflat.engines.round.contract import Training
from fedflat.engines.round.plan import Plan, Sampler
from fedflat.errors import UserError
from fedflat.experiment.config import Config


def training_of(config: Config, algorithm: Algorithm, clients: int) -> Training:
    """The local training of a config with ``clients`` clients."""
    t, f = config.training, config.federation
    obstacles = [slot.requires_mean() for _, slot in algorithm.slots() if slot.requires_mean()]
    if f.aggregation != "mean" and obstacles:
        raise UserError(
            f"federation.aggregation={f.aggregation} does not work with {config.algorithm}: {obstacles[0]}, which "
            "holds only for the mean; use mean, or an algorithm without client state, such as fedavg or fedmoswa"
        )
    return Training(
        algorithm,
        Descent(t.weight_decay, t.momentum, t.clip, t.clip_mode),
        Schedule(t.lr, t.lr_decay, t.rounds),
        Plan(t.batch_size, t.local_epochs, t.local_steps, f.partial),
        config.seed,
        clients,
        Aggregation(f.weighting, f.aggregation, f.trim, f.longest),
        t.statistics == "own",
    )


def sampler_of(config: Config, clients: int) -> Sampler:
    """The sampler of each round's cohort."""
    f = config.federation
    return Sampler(clients, min(f.clients_per_round, clients), f.sampling, f.dropout)
