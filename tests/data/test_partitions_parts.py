"""Partition modifiers (long tail, held-out clients) and their texts."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat.data import (
    PARTITION_MODIFIERS,
    PARTITIONERS,
    canonical_partition,
    fixes_clients,
    full_partition,
    make_partition,
)
from fedflat.errors import UserError

CIFAR_LIKE = np.arange(50_000) % 10
PARTITIONS = [
    "iid",
    "dirichlet",
    "dirichlet(alpha=0)",
    "dirichlet-classwise",
    "dirichlet-lda",
    "pathological",
    "pachinko",
    "natural",
]


def divided(text: str, seed: int = 0, validation: float = 0.0, clients: int = 20):
    targets = np.arange(4000) % 10
    return targets, make_partition(text, targets, 10, clients, seed, validation, np.arange(4000) // 200, targets // 2)


def test_the_long_tail_of_cifar10_is_the_published_one() -> None:
    partition = make_partition("iid+longtail(factor=100)", CIFAR_LIKE, 10, 10, 0)
    assert partition.histogram(CIFAR_LIKE, 10).sum(0).tolist() == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    described = partition.describe(CIFAR_LIKE, 10)
    assert described["thinned"] == 50_000 - 12_406 and described["coverage"] == 1
    assert described["heterogeneity"] < 0.05, "clients are compared with the long-tailed whole"


@pytest.mark.parametrize("text", [*PARTITIONS, "dirichlet-reuse", "virtual"])
def test_a_long_tail_combines_with_every_partition(text: str) -> None:
    if text == "pathological":
        text = "pathological(classes=3)"
    targets, partition = divided(f"{text}+longtail(factor=10)", validation=0.1)
    expected = [int(360 * 10 ** (-label / 9) + 1e-9) for label in range(10)]
    taken = np.concatenate([partition.validation, partition.dropped])
    used = np.unique(np.concatenate(list(partition.clients)))
    assert np.bincount(targets).tolist() == (np.bincount(targets[taken]) + expected).tolist()
    assert not np.intersect1d(used, taken).size and len(np.unique(taken)) == len(taken)
    if text not in ("dirichlet-reuse", "virtual"):
        assert np.array_equal(np.sort(np.concatenate([used, taken])), np.arange(4000))


@settings(max_examples=80)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any), st.floats(1, 1e9), st.integers(0, 2**40))
def test_a_long_tail_never_adds_and_never_empties_a_class(counts: list, factor: float, seed: int) -> None:
    targets = np.repeat(np.arange(len(counts)), counts)
    partition = make_partition(f"iid+longtail(factor={factor!r})", targets, len(counts), 1, seed)
    left = partition.histogram(targets, len(counts))[0]
    assert (left <= counts).all() and ((left > 0) == (np.array(counts) > 0)).all()
    assert len(partition.dropped) + left.sum() == len(targets)


def test_a_tail_of_factor_one_changes_nothing() -> None:
    digests = [
        make_partition(text, CIFAR_LIKE, 10, 10, 0).digest() for text in ("dirichlet", "dirichlet+longtail(factor=1)")
    ]
    assert digests[0] == digests[1]


def test_the_kept_examples_are_a_function_of_the_seed() -> None:
    dropped = [make_partition("iid+longtail", CIFAR_LIKE, 10, 10, seed).dropped for seed in (0, 0, 1)]
    assert np.array_equal(dropped[0], dropped[1]) and not np.array_equal(dropped[0], dropped[2])


@settings(max_examples=30)
@given(st.sampled_from(PARTITIONS), st.floats(0.01, 0.99), st.integers(0, 2**40))
def test_held_out_clients_are_clients_that_do_not_train(text: str, share: float, seed: int) -> None:
    _, partition = divided(f"{text}+held-out(share={share!r})", seed)
    _, whole = divided(text, seed)
    assert len(partition.unseen) == min(max(round(share * 20), 1), 19) and len(partition.clients) == 20 - len(
        partition.unseen
    )
    seen, unseen = ({tuple(indices) for indices in part} for part in (partition.clients, partition.unseen))
    assert seen | unseen == {tuple(indices) for indices in whole.clients}, "the partition itself is what it is without"
    together = np.concatenate([*partition.clients, *partition.unseen])
    assert len(np.unique(together)) == len(together), "no example of an unseen client is seen"
    order = [tuple(indices) for indices in whole.clients]
    assert sorted(seen, key=order.index) == [tuple(indices) for indices in partition.clients]


def test_held_out_clients_are_random_and_a_function_of_the_seed() -> None:
    unseen = [{tuple(indices) for indices in divided("natural+held-out", seed)[1].unseen} for seed in (0, 0, 1)]
    assert unseen[0] == unseen[1] != unseen[2]


def test_a_description_counts_the_unseen() -> None:
    targets, partition = divided("dirichlet+held-out(share=0.25)", validation=0.1)
    described = partition.describe(targets, 10)
    assert (described["clients"], described["unseen"], len(described["histogram"])) == (15, 5, 15)
    assert described["coverage"] == 1, "what unseen clients have is not offered to the others"
    assert partition.digest() != divided("dirichlet+held-out(share=0.3)", validation=0.1)[1].digest()


def test_modifiers_and_validation_set_cover_every_example() -> None:
    _, partition = divided("dirichlet(alpha=0.3,sigma=0.4)+held-out(share=0.3)+longtail(factor=20)", validation=0.15)
    everything = np.concatenate([*partition.clients, *partition.unseen, partition.validation, partition.dropped])
    assert np.array_equal(np.sort(everything), np.arange(4000))
    assert partition.text == "dirichlet(alpha=0.3,sigma=0.4)+longtail(factor=20.0)+held-out(share=0.3)"
    back = pickle.loads(pickle.dumps(partition))
    assert back.digest() == partition.digest() and len(back.dropped) == len(partition.dropped)


def test_sequences_need_a_partition_without_labels() -> None:
    characters = np.random.default_rng(0).integers(0, 90, (300, 80))
    for text in ("iid", "natural", "iid(sigma=0.5)+held-out"):
        partition = make_partition(text, characters, 90, 10, 0, 0.1, groups=np.arange(300) % 10)
        assert len(partition.clients) + len(partition.unseen) == 10 and len(partition.validation) == 30
        described = partition.describe(characters, 90)
        assert (
            np.sum(described["histogram"]) == 80 * sum(map(len, partition.clients)) and described["sizes"]["max"] < 300
        )
    for text in ("dirichlet", "iid+longtail"):
        with pytest.raises(UserError, match="each has 80"):
            make_partition(text, characters, 90, 10, 0)


def test_texts() -> None:
    assert canonical_partition("iid + held-out( share=0.20 ) + longtail") == "iid+longtail+held-out"
    assert full_partition("virtual(size=20)") == "virtual(size=20,alpha=0.1)"
    for name in PARTITIONERS:
        for text in (
            name,
            *(f"{name}+{part}" for part in PARTITION_MODIFIERS if part == "longtail" or name in PARTITIONS),
        ):
            assert canonical_partition(full_partition(text)) == text == canonical_partition(text)
    assert [name for name in PARTITIONERS if fixes_clients(name)] == [
        "natural",
        "listed",
        "centralised",
    ] and fixes_clients("virtual(clients=3)+longtail")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("longtail", "longtail .*dirichlet[+]longtail"),
        ("iid+longtale", "'longtale'.*longtail"),
        ("iid+longtail+longtail(factor=3)", "longtail more than once"),
        ("longtail(factor=10)+iid", "longtail .*dirichlet[+]longtail"),
        ("dirichlet+held-out+iid", "only longtail and held-out"),
        ("iid+longtail(factor=0.01)", "factor=0.01 is out of range; expected a number at least 1"),
        ("iid+held-out(share=0)", "share=0 is out of range; expected a number above 0 and at most 0.99"),
        ("dirichlet-reuse+held-out", "held-out .*dirichlet-reuse.*share examples"),
        ("virtual(clients=9)+held-out", "held-out .*virtual.*share examples"),
    ],
)
def test_invalid_texts_raise_a_clear_error(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make_partition(text, CIFAR_LIKE, 10, 10, 0)
    assert "\n" not in str(caught.value)


def test_infeasible_modifiers_raise_a_clear_error() -> None:
    with pytest.raises(UserError, match=r"held-out .*at least 2 clients"):
        make_partition("centralised+held-out", CIFAR_LIKE, 10, 1, 0)
    with pytest.raises(UserError, match=r"natural client 1 .*longtail"):
        make_partition(
            "natural+longtail(factor=1000)",
            CIFAR_LIKE,
            10,
            None,
            0,
            groups=np.arange(50_000) // 10 % 10 * (CIFAR_LIKE == 9),
        )
