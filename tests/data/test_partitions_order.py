"""A partition does not depend on the order of the examples, and never takes long.

Under another order other examples may be drawn, but the class counts of every client, of the validation set and of the
long tail are exactly the same, and within a class every example is equally likely to go to any client. Natural clients
follow their examples exactly.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat.data import make_partition
from fedflat.errors import UserError

BY_CLASS = [
    "iid",
    "iid(sigma=1)",
    "dirichlet",
    "dirichlet(alpha=0)",
    "dirichlet(alpha=0.3,sigma=0.7)",
    "dirichlet-reuse",
    "dirichlet-classwise",
    "dirichlet-lda",
    "pathological",
    "pachinko",
    "virtual",
    "dirichlet+longtail(factor=5)",
    "pachinko+longtail(factor=2)+held-out",
    "centralised",
]


@settings(max_examples=40)
@given(st.sampled_from(BY_CLASS), st.integers(0, 2**40), st.sampled_from([0.0, 0.2]), st.randoms(use_true_random=False))
def test_class_counts_do_not_depend_on_the_order(text: str, seed: int, validation: float, random) -> None:
    targets = np.repeat(np.arange(6), [40, 60, 50, 50, 45, 55])
    order = np.array(random.sample(range(300), 300))

    def counts(labels: np.ndarray) -> list:
        clients = 1 if text == "centralised" else 12
        partition = make_partition(text, labels, 6, clients, seed, validation, coarse=labels // 2)
        others = (*partition.unseen, partition.validation, partition.dropped)
        return [
            partition.histogram(labels, 6).tolist(),
            *(np.bincount(labels[part], minlength=6).tolist() for part in others),
        ]

    try:
        expected = counts(targets)
    except UserError:
        with pytest.raises(UserError):
            counts(targets[order])
        return
    assert counts(targets[order]) == expected


@settings(max_examples=40)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=200), st.randoms(use_true_random=False))
def test_natural_clients_follow_their_examples(groups: list, random) -> None:
    order = np.array(random.sample(range(len(groups)), len(groups)))
    first, second = (
        make_partition("natural", np.zeros(len(groups), int), 1, None, 0, groups=np.array(groups)[o])
        for o in (slice(None), order)
    )
    assert [indices.tolist() for indices in first.clients] == [
        np.sort(order[indices]).tolist() for indices in second.clients
    ]


@pytest.mark.parametrize(
    "text", ["iid", "dirichlet(alpha=0.5)", "dirichlet-lda", "virtual(size=10)", "iid+longtail(factor=4)"]
)
def test_every_example_of_a_class_is_as_likely_as_any_other(text: str) -> None:
    targets = np.arange(40) % 2
    received = np.zeros(40)
    for seed in range(600):
        np.add.at(received, make_partition(text, targets, 2, 4, seed).clients[0], 1)
    for label in (0, 1):
        of_class = received[targets == label]
        chi_square = ((of_class - of_class.mean()) ** 2 / of_class.mean()).sum()
        assert chi_square < 43.8, "the 0.999 quantile with 19 degrees of freedom"


@settings(max_examples=15)
@given(
    st.sampled_from(
        ["iid", "dirichlet", "dirichlet-reuse", "dirichlet-classwise", "dirichlet-lda", "pathological", "pachinko"]
    ),
    st.integers(1, 3000),
    st.integers(1, 300),
    st.one_of(st.sampled_from([0.0, 1e-320, 1e-9, 1e9, 1e308]), st.floats(1e-4, 1e4)),
    st.floats(0, 2),
    st.integers(0, 2**40),
)
def test_no_partition_hangs(name: str, clients: int, classes: int, alpha: float, skew: float, seed: int) -> None:
    weights = np.arange(1, classes + 1) ** -skew
    targets = np.repeat(np.arange(classes), np.ceil(6000 * weights / weights.sum()).astype(int))
    inside = {
        "iid": "",
        "pathological": f"classes={1 + int(min(alpha, 9))}",
        "pachinko": f"alpha={alpha or 0.1!r},beta={alpha or 10!r}",
    }
    start = time.process_time()
    try:
        make_partition(
            f"{name}({inside.get(name, f'alpha={alpha!r}')})", targets, classes, clients, seed, coarse=targets // 7
        )
    except UserError:
        assert name == "pathological" or (alpha == 0 and clients < classes)
    assert time.process_time() - start < 10
