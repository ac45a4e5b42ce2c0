"""Softmax regression with a matrix and a bias: logits W a + c, mean cross-entropy over a client's examples."""

import numpy as np
from numpy.typing import NDArray

from .problem import Quadratics, Setting
from .trace import Vector


class Softmax(Quadratics):
    """Clients with features[i][n_i, F] and labels[i][n_i]; x holds W [C, F] by rows, then c [C]."""

    def __init__(self, features: list[NDArray[np.float64]], labels: list[NDArray[np.int64]], classes: int) -> None:
        self.features, self.labels, self.classes = features, labels, classes
        self.n = np.ones(len(features))  # uniform weights, although clients have different numbers of examples

    @property
    def N(self) -> int:
        return len(self.features)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [(self.classes, self.features[0].shape[1]), (self.classes,)]

    def gradient(self, i: int, x: Vector) -> Vector:
        a, (rows, columns) = self.features[i], self.shapes[0]
        W, c = x[: rows * columns].reshape(rows, columns), x[rows * columns :]
        powers = np.exp(a @ W.T + c)
        errors = powers / powers.sum(1, keepdims=True) - np.eye(rows)[self.labels[i]]
        return np.concatenate([(errors.T @ a).ravel(), errors.sum(0)]) / len(a)


def golden_softmax() -> Setting:
    """The two-client problem of the golden iterates of section 6.2."""
    features = [
        np.array([[1.0, 0.0], [0.5, -1.0], [-1.0, 0.5], [2.0, 1.0]]),
        np.array([[0.0, 1.0], [1.0, 1.0], [-1.0, -1.0]]),
    ]
    problem = Softmax(features, [np.array([0, 1, 2, 0]), np.array([1, 2, 2])], 3)
    x0 = np.array([0.1, -0.2, 0, 0.3, -0.1, 0.05, 0.05, -0.05, 0])
    return Setting(problem, x0, 0.5, 2, [[0], [1], [0, 1]])
