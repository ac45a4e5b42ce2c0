"""Federated algorithms as points in a space of slots."""

from fedflat.algorithms.algorithm import Algorithm
from fedflat.algorithms.composition import algorithm, canonical
from fedflat.algorithms.registration import register

__all__ = ["Algorithm", "algorithm", "canonical", "register"]
