"""Random numbers as functions of seed, purpose, client and counter, for many clients at once and without any state."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def uniform(seed: int, purpose: str, clients: IntArray, counter: IntArray | int = 0) -> FloatArray:
    """Uniform random numbers between 0 and 1, both excluded.

    Args:
        seed: seed of the run.
        purpose: what the numbers are for, e.g. ``speed``; different purposes draw independently.
        clients: client numbers [n].
        counter: number of the draw for each client: one integer, or one per client [n].

    >>> clients = np.arange(3)
    >>> bool((uniform(0, "speed", clients) == uniform(0, "speed", clients)).all())
    True
    """
    key = np.uint64((seed * 0x9E3779B97F4A7C15 + zlib.crc32(purpose.encode())) % 2**64)
    with np.errstate(over="ignore"):  # the arithmetic is modulo 2^64
        bits = _mixed(_mixed(key + clients.astype(np.uint64)) + np.asarray(counter).astype(np.uint64))
    return (np.asarray((bits >> np.uint64(11)) + 0.5, dtype=np.float64)) * 2.0**-53


def normal(seed: int, purpose: str, clients: IntArray) -> FloatArray:
    """Standard normal random numbers, one per client [n], by the Box-Muller transform."""
    radius = np.sqrt(-2 * np.log(uniform(seed, purpose, clients, 0)))
    values: FloatArray = radius * np.cos(2 * np.pi * uniform(seed, purpose, clients, 1))
    return values


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit integers so that similar inputs have unrelated outputs (the finaliser of SplitMix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
