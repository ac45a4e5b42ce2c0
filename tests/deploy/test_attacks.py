"""One of five sites attacks: refused updates leave no trace, and a robust centre bounds the effect of others."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from flwr.app import Array, ArrayRecord, Message

from fedflat.deploy.server.app import serve
from fedflat.deploy.server.nodes import NOT_CONNECTED
from fedflat.experiment.store.run_folder import Record

from .direct import SMALL, federation_of

SITES, ATTACKER = 5, 4
SETTINGS: dict[str, Any] = {
    **SMALL,
    "algorithm": "fedmoswa",
    "model": "mlp(hidden=32)",
    "data.clients": SITES,
    "data.partition": "iid",
    "federation.clients_per_round": SITES,
    "training.rounds": 4,
    "training.local_steps": 25,
    "training.lr": 0.2,
    "evaluation.every": 99,
    "deploy.timeout": 5.0,
}
Arrays = dict[str, np.ndarray]
Attack = Callable[[Arrays, dict[str, Any]], object]
"""Changes the arrays and the numbers of an update, in place."""


def array(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Attack:
    def attack(arrays: Arrays, numbers: dict[str, Any]) -> None:
        arrays[name] = change(arrays[name])

    return attack


def number(name: str, value: float) -> Attack:
    return lambda arrays, numbers: numbers.update({name: value})


def poisoned(value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda vector: np.where(np.arange(len(vector)) == 3, value, vector).astype(vector.dtype)


REFUSED: dict[str, tuple[Attack, str]] = {
    "a NaN": (array("displacement", poisoned(math.nan)), "displacement.*NaN"),
    "an infinity": (array("drift.dm", poisoned(math.inf)), "drift.dm.*infinite"),
    "a vector too short": (array("displacement", lambda vector: vector[:-1]), r"displacement.*\(\d+,\)"),
    "a matrix": (
        array("displacement", lambda vector: vector.reshape(2, -1)),
        r"displacement.*\(2, \d+\)",
    ),
    "another type": (
        array("displacement", lambda vector: vector.astype(np.float64)),
        "displacement is float64, not float32",
    ),
    "a missing vector": (lambda arrays, numbers: arrays.pop("drift.dm"), "drift.dm"),
    "an unknown vector": (
        lambda arrays, numbers: arrays.update(hook=np.zeros(20_000, "datetime64[s]")),
        "unknown hook",
    ),
    "a thousandfold step": (
        array("displacement", lambda vector: vector * 1000),
        "norm of displacement.* 30 times",
    ),
    "a thousandfold step back": (
        array("displacement", lambda vector: vector * -1000),
        "norm of displacement.* 30 times",
    ),
    "squares that overflow": (array("drift.dm", lambda vector: vector * 1e25), "norm of drift.dm"),
    "a lied sample count": (number("examples", 1e9), "1e[+]09 examples"),
    "lied steps": (number("steps", 1000), "1000 steps"),
    "lied rates": (number("lr_sum", 1e-9), "learning rates.*1e-09"),
    "a loss that is no number": (number("loss", math.nan), "its loss is nan"),
    "a loss that would end the run": (number("loss", 1e12), "its mean loss is 1.25e[+]11, but the cohort's median is"),
    "an impossible cost": (number("samples", 1e300), "it claims 1e[+]300 samples"),
}


def federated(
    folder: Path, attacks: list[Attack], sites: int = SITES, **more: Any
) -> tuple[Record, list[dict[str, Any]]]:
    """A run whose last site attacks, one attack per round, and the lines of its ledger."""
    settings = {**SETTINGS, **more, "deploy.out": str(folder / "run")}
    grid = federation_of(folder, settings, sites)

    def tamper(reply: Message) -> Message:
        asked = grid.sent[-1].metadata
        if "arrays" in reply.content and asked.dst_node_id == 100 + ATTACKER:
            _attacked(reply, attacks[int(asked.group_id)])
        return reply

    grid.tamper = tamper
    record = serve(grid, settings)
    return record, [json.loads(line) for line in (folder / "run" / "participation.jsonl").read_text().splitlines()]


def _attacked(reply: Message, attack: Attack) -> None:
    arrays: Mapping[str, Array] = reply.content.array_records["arrays"]
    changed, numbers = (
        {name: array.numpy().copy() for name, array in arrays.items()},
        reply.content.metric_records["numbers"],
    )
    attack(changed, numbers)
    reply.content["arrays"] = ArrayRecord({name: Array(array) for name, array in changed.items()})


def accuracy(record: Record) -> float:
    return float(record.history[-1]["test"]["server"]["accuracy"])


def test_refused_updates_leave_no_trace(tmp_path: Path) -> None:
    """With another attack in every round, the result is bit-identical to a run without the attacker."""
    more = {"training.rounds": len(REFUSED), "training.local_steps": 8}
    record, lines = federated(tmp_path / "with", [attack for attack, _ in REFUSED.values()], **more)
    without, noted = federated(tmp_path / "without", [], SITES - 1, **more)
    for line, (name, (_, why)) in zip(lines, REFUSED.items(), strict=True):
        assert line["accepted"] == [0, 1, 2, 3], name
        assert re.search(why, line["rejected"][str(ATTACKER)]), line
    assert all(line["missing"] == {str(ATTACKER): NOT_CONNECTED} for line in noted)
    assert torch.equal(record.models["server"].weights, without.models["server"].weights)
    assert accuracy(record) == accuracy(without)
    assert accuracy(record) > 0.85


def test_an_attack_succeeds_without_inspection(tmp_path: Path) -> None:
    """Without inspection, one site of five ruins the model."""
    attack = REFUSED["a thousandfold step back"][0]
    assert accuracy(federated(tmp_path, [attack] * 4, **{"deploy.bound": 1e9})[0]) < 0.3


@pytest.mark.parametrize("centre", ["mean", "median", "trimmed", "clipped"])
def test_a_robust_centre_bounds_an_unnoticed_attack(centre: str, tmp_path: Path) -> None:
    """Twenty times the update, reversed: its norm is not suspicious."""

    def back(arrays: Arrays, numbers: dict[str, Any]) -> None:
        arrays.update({name: -20 * array for name, array in arrays.items()})

    record, lines = federated(tmp_path, [back] * 4, **{"federation.aggregation": centre, "federation.trim": 0.2})
    assert all(line["accepted"] == list(range(SITES)) for line in lines)
    assert accuracy(record) < 0.3 if centre == "mean" else accuracy(record) > 0.85


CLAIMS: dict[str, list[tuple[str, float, str]]] = {
    "feddisco": [
        ("weights.divergence", 99.0, r"is 99, which is not between 0 and 2\.3"),  # log 10
        ("weights.divergence", -1.0, "is -1, which is not between 0"),
    ],
    "feddisco(metric=l2)": [("weights.divergence", 1.0, r"is 1, which is not between 0 and 0\.949")],
    "fedscam": [
        ("perturbation.c", 5.0, "is 5, which is not between -1 and 1"),
        ("perturbation.h", -5.0, "is -5, which is not between 0 and inf"),
    ],
}


@pytest.mark.parametrize("text", CLAIMS)
def test_numbers_that_choose_weights_have_bounds(text: str, tmp_path: Path) -> None:
    lies = [array(name, lambda value, claim=claim: np.full_like(value, claim)) for name, claim, _ in CLAIMS[text]]
    settings: dict[str, Any] = {"algorithm": text, "training.rounds": len(lies), "training.local_steps": 1}
    _, lines = federated(tmp_path, lies, **settings)
    for line, (name, _, reason) in zip(lines, CLAIMS[text], strict=True):
        assert line["accepted"] == [0, 1, 2, 3]
        assert re.search(f"{name} {reason}", line["rejected"][str(ATTACKER)])
