"""Differential privacy in a round: clipping what clients send, and Gaussian noise on their messages or on the means.

Every engine calls ``protect_rows`` after training and ``protect_means`` after averaging. Seeded noise depends only on
the run's seed, the round and the client, so it is the same on every engine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedflat.engines.round.cohort_buffers import CohortBuffers
from fedflat.engines.round.contract import Training
from fedflat.randomness import generator


def protect_rows(training: Training, round: int, cohort_buffers: CohortBuffers, clients: Sequence[int]) -> None:
    """Clip the messages of a cohort in place and, with local privacy, add noise to them.

    The displacement and all vectors that a client sends are clipped together, i.e. as one long vector.

    Args:
        training: how clients train; without ``privacy``, nothing changes.
        round: number of the round, from 0.
        cohort_buffers: the rows that the clients wrote.
        clients: number of the client in each row.
    """
    privacy = training.privacy
    if privacy is None:
        return
    for row, client in enumerate(clients):
        vectors = [cohort_buffers.displacement[row], *(rows[row] for rows in cohort_buffers.sent.values())]
        clip_together(vectors, privacy.clip)
        if privacy.is_local:
            _add_noise(vectors, training, privacy.noise_multiplier * privacy.clip, round, 1 + client)


def protect_means(
    training: Training, round: int, means: dict[str, Tensor], lr_sums: Tensor, count: int
) -> dict[str, Tensor]:
    """Add noise to the means of a cohort's messages, unless its clients have done so.

    Args:
        training: how clients train; without ``privacy``, nothing changes.
        round: number of the round, from 0.
        means: means by name, as in ``cohort.weighted_rows``.
        lr_sums: each client's sum of learning rates [cohort].
        count: number of clients in the cohort.

    Returns:
        The means, where all means of displacements follow from one that has noise.
    """
    privacy = training.privacy
    if privacy is None:
        return means
    noisy = {name: mean for name, mean in means.items() if name == "displacement" or name.startswith("sent/")}
    if not privacy.is_local:
        _add_noise(list(noisy.values()), training, privacy.noise_multiplier * privacy.clip / count, round, 0)
    displacement = noisy["displacement"]
    # Algorithms that use the direction require equal sums of learning rates.
    return means | noisy | {"uniform": displacement, "direction": -displacement / lr_sums.mean()}


def clip_together(vectors: Sequence[Tensor], clip: float) -> None:
    """Scale vectors in place by one factor such that their joint l2 norm is at most ``clip``."""
    # In float64, so that the factor does not depend on how an engine splits the sum.
    norms = [torch.linalg.vector_norm(vector, dtype=torch.float64) for vector in vectors]
    factor = (clip / torch.stack(norms).norm()).clamp(max=1.0)  # 1 for a zero message
    for vector in vectors:
        vector.mul_(factor.to(vector.dtype))


def _add_noise(vectors: Sequence[Tensor], training: Training, deviation: float, round: int, stream: int) -> None:
    """Add Gaussian noise with a standard deviation to vectors in place; stream 0 is the server, 1 + i is client i."""
    assert training.privacy is not None
    draw = secure_normal
    if not training.privacy.is_secure:
        seed = int(generator(training.seed, "privacy", round, stream).integers(2**62))
        draw = partial(_seeded_normal, generator=torch.Generator(vectors[0].device).manual_seed(seed))
    for vector in vectors:
        vector.add_(draw(vector), alpha=deviation)


def _seeded_normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers of a seeded generator, with the shape, dtype and device of ``like``."""
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)


def secure_normal(like: Tensor) -> Tensor:
    """Standard normal numbers from the operating system's secure generator, with shape, dtype and device of ``like``.

    Pairs of uniform numbers are transformed in float64 (Box and Muller 1958).
    """
    pairs = (like.numel() + 1) // 2
    bits = np.frombuffer(os.urandom(16 * pairs), dtype=np.uint64).reshape(2, pairs)
    uniform = ((bits >> np.uint64(11)) + 0.5) * 2.0**-53  # strictly between 0 and 1
    radius, angle = np.sqrt(-2 * np.log(uniform[0])), 2 * np.pi * uniform[1]
    normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[: like.numel()]
    return torch.from_numpy(normal).to(like).reshape(like.shape)
