"""Every partitioner has its documented properties for any number of clients, classes and any alpha."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat.data import PARTITIONERS, Partition, canonical_partition, make_partition
from fedflat.data.partitioners.dirichlet import log_dirichlet, softmax
from fedflat.errors import UserError

ALPHAS = st.one_of(st.sampled_from([1e-320, 1e-9, 0.01, 0.1, 0.6, 1.0, 1e6, 1e308]), st.floats(1e-3, 1e3))
SEEDS = st.integers(0, 2**40)
CIFAR_LIKE = np.arange(50_000) % 10


@st.composite
def labels(draw: st.DrawFn, classes: int | None = None) -> tuple[np.ndarray, int]:
    """Up to 12 classes, some of them perhaps rare or absent, in any order."""
    number = classes or draw(st.integers(1, 12))
    counts = draw(st.lists(st.integers(0, 40), min_size=number, max_size=number).filter(any))
    order = np.random.default_rng(draw(SEEDS))
    return order.permutation(np.repeat(np.arange(number), counts)), number


def everyone(partition: Partition) -> np.ndarray:
    return np.concatenate([*partition.clients, partition.validation])


def assert_true_partition(partition: Partition, count: int) -> None:
    assert np.array_equal(np.sort(everyone(partition)), np.arange(count))


def assert_well_formed(partition: Partition, clients: int) -> None:
    assert len(partition.clients) == clients
    for indices in partition.clients:
        assert indices.dtype == np.int64 and len(indices) > 0 and (np.diff(indices) >= 0).all()


@settings(max_examples=150)
@given(
    labels(),
    st.integers(1, 60),
    ALPHAS,
    SEEDS,
    st.sampled_from(["iid", "dirichlet", "dirichlet-lda", "dirichlet-reuse", "dirichlet-classwise"]),
)
def test_partitioners_handle_any_classes_and_clients(
    data: tuple, clients: int, alpha: float, seed: int, name: str
) -> None:
    targets, classes = data
    clients = min(clients, len(targets))
    partition = make_partition(name if name == "iid" else f"{name}(alpha={alpha!r})", targets, classes, clients, seed)
    assert_well_formed(partition, clients)
    if name != "dirichlet-reuse":
        assert_true_partition(partition, len(targets))
    if name != "dirichlet-classwise":
        size, larger = divmod(len(targets), clients)
        assert [len(indices) for indices in partition.clients] == [size + 1] * larger + [size] * (clients - larger)


@settings(max_examples=100)
@given(labels(), st.integers(1, 60), SEEDS, st.sampled_from(["dirichlet", "dirichlet-reuse", "dirichlet-classwise"]))
def test_alpha_zero_gives_one_class_per_client(data: tuple, clients: int, seed: int, name: str) -> None:
    targets, classes = data
    present = len(np.unique(targets))
    clients = min(max(clients, present), len(targets))
    partition = make_partition(f"{name}(alpha=0)", targets, classes, clients, seed)
    assert_true_partition(partition, len(targets))
    histogram = partition.histogram(targets, classes)
    assert (np.count_nonzero(histogram, axis=1) == 1).all()
    clients_per_class, examples = np.count_nonzero(histogram, axis=0), np.bincount(targets, minlength=classes)
    roomy = clients_per_class[clients_per_class < examples]
    assert not len(roomy) or clients_per_class.max() - roomy.min() <= 1, (
        "as many clients for each class, as far as it has examples for them"
    )
    for label in range(classes):
        held = histogram[histogram[:, label] > 0, label]
        assert not len(held) or held.max() - held.min() <= 1


def test_alpha_zero_on_cifar_is_the_published_split() -> None:
    described = make_partition("dirichlet(alpha=0)", CIFAR_LIKE, 10, 100, 0).describe(CIFAR_LIKE, 10)
    assert described["sizes"] == {"min": 500, "median": 500.0, "max": 500} and described["classes_per_client"] == 1
    assert described["heterogeneity"] == pytest.approx(0.9)
    assert (np.count_nonzero(described["histogram"], axis=0) == 10).all()


def test_alpha_zero_needs_a_client_per_class() -> None:
    with pytest.raises(UserError, match=r"10 classes .*9 clients"):
        make_partition("dirichlet(alpha=0)", CIFAR_LIKE, 10, 9, 0)


@settings(max_examples=25)
@given(st.data(), st.integers(2, 10), st.integers(2, 40), SEEDS)
def test_pathological_is_exact_or_raises_an_error(data: st.DataObject, classes: int, clients: int, seed: int) -> None:
    kept = data.draw(st.integers(1, classes))
    counts = data.draw(st.lists(st.integers(20, 60), min_size=classes, max_size=classes))
    targets = np.repeat(np.arange(classes), counts)
    try:
        partition = make_partition(f"pathological(classes={kept})", targets, classes, clients, seed)
    except UserError:
        roomy = 2 <= kept < classes <= clients <= min(counts) and len(targets) // clients >= 2 * kept
        assert not roomy, "with clients for every class and examples for every client there is always a way"
        return
    assert_true_partition(partition, len(targets))
    assert (np.count_nonzero(partition.histogram(targets, classes), axis=1) == kept).all()
    sizes = [len(indices) for indices in partition.clients]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=40)
@given(st.integers(2, 10), st.integers(1, 5), st.integers(1, 4), SEEDS)
def test_pathological_is_even_for_balanced_classes(classes: int, holders: int, share: int, seed: int) -> None:
    kept = min(2, classes)
    clients = classes * holders
    targets = np.repeat(np.arange(classes), holders * kept * share)
    histogram = make_partition(f"pathological(classes={kept})", targets, classes, clients, seed).histogram(
        targets, classes
    )
    assert set(histogram[histogram > 0].tolist()) == {share}


@pytest.mark.parametrize("clients", [10, 20, 100])
def test_pathological_on_classes_as_uneven_as_those_of_mnist(clients: int) -> None:
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    targets = np.repeat(np.arange(10), counts)
    histogram = make_partition("pathological(classes=2)", targets, 10, clients, 0).histogram(targets, 10)
    assert set(histogram.sum(1).tolist()) == {60_000 // clients} and set(
        np.count_nonzero(histogram, axis=1).tolist()
    ) == {2}
    assert histogram[histogram > 0].min() > 0.3 * 60_000 / clients, "no class of a client is a token one"


@pytest.mark.parametrize(
    ("text", "clients", "message"),
    [
        ("pathological(classes=11)", 100, "cannot have exactly 11 of 10 classes each"),
        ("pathological(classes=2)", 4, "enough clients"),
        ("pathological(classes=1)", 11, "11 clients .*exactly 1 classes"),
    ],
)
def test_pathological_rejects_infeasible_numbers(text: str, clients: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_partition(text, CIFAR_LIKE, 10, clients, 0)


TEXTS = [
    "iid",
    "dirichlet",
    "dirichlet(alpha=0)",
    "dirichlet-reuse",
    "dirichlet-classwise",
    "pathological",
    "natural",
    "centralised",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_partition_is_a_function_of_the_seed(text: str) -> None:
    targets = np.random.default_rng(5).permutation(np.arange(2000) % 10)
    groups = np.arange(2000) % 20
    clients = 1 if text == "centralised" else 20

    def digest(seed: int, labels: object = targets) -> str:
        return make_partition(text, labels, 10, clients, seed, groups=groups).digest()  # type: ignore[arg-type]

    assert digest(3) == digest(3) == digest(3, torch.from_numpy(targets))
    assert (digest(3) != digest(4)) == (text not in ("natural", "centralised"))


@pytest.mark.parametrize("text", ["iid", "dirichlet", "dirichlet-reuse", "dirichlet-classwise", "pathological"])
def test_class_histograms_do_not_depend_on_the_order_of_the_examples(text: str) -> None:
    targets = np.arange(2000) % 10
    shuffled = np.random.default_rng(1).permutation(targets)
    first, second = (make_partition(text, labels, 10, 20, 7).histogram(labels, 10) for labels in (targets, shuffled))
    assert np.array_equal(first, second)


def test_dirichlet_shares_have_the_moments_of_the_distribution() -> None:
    for alpha in (0.05, 0.5, 5.0):
        shares = softmax(log_dirichlet(alpha, (20_000, 4), np.random.default_rng(0)))
        assert shares.mean(0) == pytest.approx(0.25, abs=0.02)
        assert shares.var(0) == pytest.approx(3 / 16 / (4 * alpha + 1), rel=0.05)


def test_clients_follow_their_prior_while_there_is_enough() -> None:
    targets = np.repeat(np.arange(4), 100_000)
    priors = softmax(log_dirichlet(0.5, (3, 4), np.random.default_rng(np.random.SeedSequence([9, 0x5911]))))
    histogram = make_partition("dirichlet-reuse(alpha=0.5)", targets, 4, 3, 9).histogram(targets, 4)
    assert histogram / histogram.sum(1, keepdims=True) == pytest.approx(priors, abs=0.01)


def test_dirichlet_treats_early_and_late_clients_alike() -> None:
    """If clients drew one after another, the last would get the leftovers: many more classes than the first."""
    halves = np.zeros(2)
    for seed in range(10):
        used = np.count_nonzero(
            make_partition("dirichlet", CIFAR_LIKE, 10, 100, seed).histogram(CIFAR_LIKE, 10), axis=1
        )
        halves += used[:50].mean(), used[50:].mean()
    assert abs(halves[0] - halves[1]) / halves.sum() < 0.05


def test_reuse_has_the_measured_coverage() -> None:
    for seed in range(8):
        partition = make_partition("dirichlet-reuse(alpha=0.1)", CIFAR_LIKE, 10, 100, seed)
        described = partition.describe(CIFAR_LIKE, 10)
        assert 0.84 <= described["coverage"] <= 0.96
        assert described["duplicates"] == round((1 - described["coverage"]) * 50_000)
        assert all(len(np.unique(indices)) == 500 for indices in partition.clients), (
            "an example comes back only when its class has been dealt out"
        )


def test_classwise_gives_an_empty_client_one_example() -> None:
    targets = np.repeat([0, 1], [30, 10])
    partition = make_partition("dirichlet-classwise(alpha=1e-9)", targets, 2, 6, 0)
    sizes = sorted(len(indices) for indices in partition.clients)
    assert sizes[:4] == [1, 1, 1, 1] and sum(sizes) == 40


def test_iid_is_nearly_homogeneous_and_dirichlet_in_between() -> None:
    scores = [
        make_partition(text, CIFAR_LIKE, 10, 100, 0).describe(CIFAR_LIKE, 10)["heterogeneity"]
        for text in ("iid", "dirichlet(alpha=0.6)", "dirichlet(alpha=0.1)", "dirichlet(alpha=0)")
    ]
    assert scores == sorted(scores) and scores[0] < 0.08 and scores[3] == pytest.approx(0.9)


def test_a_description_by_hand() -> None:
    targets = np.array([0, 0, 1, 1, 1, 1])
    partition = Partition((np.array([0, 1]), np.array([2, 2, 3])), np.array([5]), "by hand", 0)
    described = partition.describe(targets, 2)
    assert described["histogram"] == [[2, 0], [0, 3]] and described["sizes"] == {"min": 2, "median": 2.5, "max": 3}
    assert (
        described["coverage"] == pytest.approx(4 / 5)
        and described["duplicates"] == 1
        and described["classes_per_client"] == 1
    )
    assert described["heterogeneity"] == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert json.loads(json.dumps(described)) == described
    other = Partition((np.array([0, 1, 2]), np.array([2, 3])), np.array([5]), "by hand", 0)
    assert partition.digest() != other.digest(), "where one client ends and the next begins is part of the partition"


@settings(max_examples=50)
@given(labels(), SEEDS, st.floats(0, 0.9), st.sampled_from(["iid", "dirichlet", "dirichlet-classwise"]))
def test_validation_is_a_stratified_share_taken_first(data: tuple, seed: int, share: float, text: str) -> None:
    targets, classes = data
    expected = [round(share * int(count)) for count in np.bincount(targets, minlength=classes)]
    if sum(expected) == len(targets):
        return
    partition = make_partition(text, targets, classes, 1, seed, validation=share)
    assert_true_partition(partition, len(targets))
    assert np.bincount(targets[partition.validation], minlength=classes).tolist() == expected
    other = make_partition("iid", targets, classes, 1, seed, validation=share)
    assert np.array_equal(partition.validation, other.validation), (
        "the same examples are held out whatever the partition"
    )


def test_the_validation_set_is_a_function_of_the_seed() -> None:
    held_out = [make_partition("iid", CIFAR_LIKE, 10, 10, seed, validation=0.1).validation for seed in (0, 0, 1)]
    assert np.array_equal(held_out[0], held_out[1]) and not np.array_equal(held_out[0], held_out[2])


def test_no_validation_by_default() -> None:
    assert len(make_partition("iid", CIFAR_LIKE, 10, 10, 0).validation) == 0
    for share in (-0.1, 1.0):
        with pytest.raises(UserError, match="at least 0 and below 1"):
            make_partition("iid", CIFAR_LIKE, 10, 10, 0, validation=share)
    for text in ("centralised", "virtual(clients=3)", "iid+longtail"):
        with pytest.raises(UserError, match=r"share of 0\.6 leaves no training examples"):
            make_partition(text, np.arange(5), 5, None, 0, validation=0.6)


def test_natural_clients_are_the_groups() -> None:
    groups = np.array([30, 10, 30, 20, 10])
    partition = make_partition("natural", np.zeros(5, int), 1, None, 0, groups=groups)
    assert [indices.tolist() for indices in partition.clients] == [[1, 4], [3], [0, 2]]
    assert (
        make_partition("natural", np.zeros(5, int), 1, 3, 0, groups=torch.from_numpy(groups)).digest()
        == partition.digest()
    )
    with pytest.raises(UserError, match="3 clients, not 4"):
        make_partition("natural", np.zeros(5, int), 1, 4, 0, groups=groups)
    with pytest.raises(UserError, match="no natural clients"):
        make_partition("natural", np.zeros(5, int), 1, None, 0)
    with pytest.raises(UserError, match=r"natural client .*validation"):
        make_partition("natural", np.zeros(5, int), 1, None, 0, validation=0.8, groups=groups)


def test_natural_clients_are_divided_until_there_are_enough() -> None:
    groups = np.repeat([0, 1, 2], [10, 4, 7])

    def clients(text: str) -> list[list[int]]:
        partition = make_partition(text, np.zeros(21, int), 1, None, 0, groups=groups)
        assert sorted(np.concatenate(partition.clients)) == list(range(21))
        return [groups[indices].tolist() for indices in partition.clients]

    assert clients("natural(clients=5)") == [[0] * 5, [0] * 5, [1] * 4, [2] * 4, [2] * 3]
    assert clients("natural(clients=3)") == clients("natural")
    for count in (2, 22):
        with pytest.raises(UserError, match=f"clients={count}; expected 3.* to 21"):
            clients(f"natural(clients={count})")


def test_too_many_clients_for_the_examples() -> None:
    with pytest.raises(UserError, match=r"4 training examples are too few for 50 clients.* --clients N"):
        make_partition("iid", np.arange(4), 4, 50, 0)


def test_centralised_is_one_client() -> None:
    partition = make_partition("centralised", CIFAR_LIKE, 10, None, 0)
    assert (
        np.array_equal(partition.clients[0], np.arange(50_000))
        and partition.digest() == make_partition("centralised", CIFAR_LIKE, 10, 1, 1).digest()
    )
    with pytest.raises(UserError, match="set clients to 1"):
        make_partition("centralised", CIFAR_LIKE, 10, 100, 0)


@pytest.mark.parametrize(
    ("text", "clients", "seed", "message"),
    [
        ("dirichlet", 50_001, 0, "50000 training examples .*50001 clients"),
        ("iid", 0, 0, "at least 1 client, not 0"),
        ("iid", None, 0, "needs a number of clients; set it: --clients N"),
        ("iid", 10, -1, "seed is -1"),
        ("dirichlet(alpha=-0.1)", 10, 0, "out of range; expected a number at least 0"),
        ("dirichlet(beta=1)", 10, 0, "dirichlet has no parameter 'beta'"),
        ("dirichlett", 10, 0, "'dirichlett'.*dirichlet"),
        ("iid+dirichlet", 10, 0, "two partitions"),
    ],
)
def test_infeasible_partitions_raise_a_clear_error(text: str, clients: int | None, seed: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_partition(text, CIFAR_LIKE, 10, clients, seed)


@pytest.mark.parametrize(("labels", "message"), [([0, 1, 2], "labels reach 2, but"), ([0, -1, 1], "begin at -1")])
def test_labels_must_be_classes(labels: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_partition("iid", np.array(labels), 2, 2, 0)


def test_texts_are_canonical() -> None:
    assert (
        canonical_partition("dirichlet(alpha=0.1)") == "dirichlet"
        and canonical_partition("dirichlet(alpha=0)") == "dirichlet(alpha=0.0)"
    )
    assert canonical_partition("pathological( classes = 5 )") == "pathological(classes=5)"
    assert make_partition("dirichlet(alpha=0.10)", CIFAR_LIKE, 10, 10, 0).text == "dirichlet"
    assert all(canonical_partition(name) == name for name in PARTITIONERS)


@pytest.mark.parametrize(
    "text",
    ["iid", "dirichlet", "dirichlet(alpha=1e-9)", "dirichlet-reuse", "dirichlet-classwise", "pathological(classes=10)"],
)
def test_large_partitions_are_fast(text: str) -> None:
    hundred_classes = np.arange(50_000) % 100
    start = time.process_time()
    make_partition(text, hundred_classes, 100, 1000, 0)
    assert time.process_time() - start < 3
