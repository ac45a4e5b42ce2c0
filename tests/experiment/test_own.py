"""What users bring in Python is refused in a sentence where it is something else."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import fedflat
from fedflat.errors import UserError

SMALL = {"rounds": 1, "clients": 12, "per_round": 2, "steps": 1, "workers": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": fedflat.Classification}, "task is the class Classification and not one of it"),
        ({"task": "accuracy"}, "task is a str; expected an object with metric"),
        ({"data": 123}, "data is an int; expected the name of a data set"),
        ({"base": {"seed": 1}}, "base is a dict; expected a YAML file or a config"),
        ({"callbacks": fedflat.Callback}, "this is <class"),
        ({"callbacks": None}, "this is None"),
        ({"model": nn.Sequential(nn.Flatten(), nn.LazyLinear(10))}, r"1\.weight of custom:Sequential has no shape yet"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_is_something_else_is_refused(arguments: dict[str, Any], message: str) -> None:
    for call in (fedflat.run, fedflat.rounds):
        with pytest.raises(UserError, match=message):
            call("fedavg", **SMALL, **arguments)


@pytest.mark.parametrize("algorithms", [[None], None])
def test_only_texts_are_compared(algorithms: Any) -> None:
    with pytest.raises(UserError, match=r"algorithms are compared by their texts, such as .*; this is None"):
        fedflat.compare(algorithms, seeds=1, **SMALL)


def test_one_callback_needs_no_list() -> None:
    class Counting(fedflat.Callback):
        rounds = 0

        def round_done(self, run: object) -> None:
            self.rounds += 1

    counting = Counting()
    fedflat.run("fedavg", callbacks=counting, **SMALL)
    assert counting.rounds == 1
