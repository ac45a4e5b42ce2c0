"""Inputs for calling the methods of a slot or an average by hand, from plain lists of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedflat.algorithms.slot import CohortMeans, LocalContext
from fedflat.algorithms.state import State
from fedflat.averaging import RunInfo
from fedflat.models.layout import Layout

Numbers = Sequence[float] | float | Tensor


def local_context(
    y: Numbers,
    z: Numbers,
    *,
    server: Mapping[str, Numbers] | None = None,
    client: Mapping[str, Numbers] | None = None,
    local: Mapping[str, Numbers] | None = None,
    drift: Mapping[str, Numbers] | None = None,
    step: int = 0,
    steps: int = 1,
    lr_sum: float = 0.0,
    lr: float = 0.1,
    round: int = 0,
    own_gradient: Numbers | None = None,
    common_gradient: Numbers | None = None,
) -> LocalContext:
    """Build the context that a slot sees in a local step from plain numbers, for a model with one tensor, ``weight``.

    Args:
        y: the client's current weights.
        z: the model that the client received.
        server: the slot's server state, by name.
        client: the slot's client state, kept between rounds, by name.
        local: the slot's state within the round, by name.
        drift: the local state of the drift slot, which a perturbation may read.
        step: local step, counted from 0.
        steps: number of local steps.
        lr_sum: sum of the learning rates of the steps taken so far.
        lr: learning rate of every step.
        round: round, counted from 0.
        own_gradient: the client's full-batch gradient at z, if the drift requests it.
        common_gradient: the cohort's mean full-batch gradient at z, if the drift requests it.

    >>> local_context(y=[1.0, 3.0], z=[1.0, 1.0]).displacement
    tensor([0., 2.])
    """
    received = _tensor(z)
    return LocalContext(
        y=_tensor(y),
        z=received,
        server=_state(server),
        client=_state(client),
        local=_state(local),
        drift=_state(drift),
        step=torch.tensor(float(step)),
        steps=torch.tensor(float(steps)),
        lr_sum=torch.tensor(lr_sum),
        first_lr=torch.tensor(lr),
        next_lr=torch.tensor(lr),
        round=torch.tensor(round),
        layout=Layout(("weight",), (tuple(received.shape),)),
        own_gradient=None if own_gradient is None else _tensor(own_gradient),
        common_gradient=None if common_gradient is None else _tensor(common_gradient),
    )


def cohort_means(
    z: Numbers,
    displacement: Numbers,
    *,
    mean: Mapping[str, Numbers] | None = None,
    lr_sum: float = 0.1,
    share: float = 1.0,
    cohort_size: int = 1,
    round: int = 0,
    normalised: Numbers | None = None,
    common_gradient: Numbers | None = None,
) -> CohortMeans:
    """Build the cohort means that a slot's ``aggregate`` receives, from plain numbers.

    Args:
        z: model that the clients received; also the server model.
        displacement: mean displacement of the clients.
        mean: means of the slot's messages, by name.
        lr_sum: sum of a client's learning rates over its local steps, the same for all clients.
        share: cohort size divided by the number of clients.
        cohort_size: number of clients in the cohort.
        round: round, counted from 0.
        normalised: mean of the displacements, each divided by the drift's divisor, if it has one.
        common_gradient: the cohort's mean full-batch gradient at z, if the drift requests it.

    >>> cohort_means(z=[1.0, 2.0], displacement=[-0.1, 0.1], lr_sum=0.1).direction
    tensor([ 1., -1.])
    """
    mean_displacement = _tensor(displacement)
    return CohortMeans(
        x=_tensor(z),
        z=_tensor(z),
        displacement=mean_displacement,
        uniform=mean_displacement,
        direction=-mean_displacement / lr_sum,
        mean=_state(mean),
        share=share,
        cohort_size=cohort_size,
        round=round,
        normalised=None if normalised is None else _tensor(normalised),
        common_gradient=None if common_gradient is None else _tensor(common_gradient),
    )


def run_info(rounds: int, size: int = 2, cycle: int = 1) -> RunInfo:
    """Build the information about a run that an average needs, for calling averages by hand.

    No parameter of the model counts as part of the classifier.

    Args:
        rounds: number of rounds of the run.
        size: number of parameters of the model.
        cycle: rounds after which the learning-rate schedule repeats.
    """
    return RunInfo(rounds, cycle, torch.zeros(size, dtype=torch.bool), lambda name, count: [torch.zeros(size)] * count)


def _tensor(numbers: Numbers) -> Tensor:
    return numbers if isinstance(numbers, Tensor) else torch.tensor(numbers)


def _state(values: Mapping[str, Numbers] | None) -> State:
    return {name: _tensor(numbers) for name, numbers in (values or {}).items()}
