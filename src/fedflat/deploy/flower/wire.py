"""What travels: flat vectors as arrays under their full names, never pickles; numbers beside them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedflat.algorithms.algorithm import Algorithm, States, flat_fields, flat_state
from fedflat.deploy.trust.inspection import Form
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import Training

MODEL, DISPLACEMENT, GRADIENT, BUFFERS, INTEGERS = "model", "displacement", "gradient", "buffers", "integers/"
ARRAYS, NUMBERS, WORDS, REFUSAL = "arrays", "numbers", "words", "refusal"
"""The records of a message."""


def arrays_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors as arrays to be sent."""
    return ArrayRecord({name: Array(tensor.detach().cpu().contiguous().numpy()) for name, tensor in tensors.items()})


def tensors_of(record: ArrayRecord) -> dict[str, Tensor]:
    """Arrays that came, as tensors."""
    return {name: torch.from_numpy(array) for name, array in numpy_of(record).items()}


def numpy_of(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Arrays that came; one that cannot be read is an empty array of bytes, which no inspection lets pass."""
    found = {}
    for name, array in record.items():
        try:
            found[name] = np.array(array.numpy())
        except Exception:  # whatever a stranger's bytes may do to a reader of arrays
            found[name] = np.zeros(0, np.uint8)
    return found


def numbers_of(records: RecordDict) -> dict[str, float]:
    """The numbers of an answer; whatever is none is left out."""
    said = records.metric_records.get(NUMBERS) or {}
    return {name: value for name, value in said.items() if isinstance(value, int | float)}


def why_not(records: RecordDict) -> str | None:
    """The reason that an answer gives for saying no; none where it does not."""
    said = records.config_records.get(REFUSAL)
    return None if said is None else str(said.get("why", "it gives no reason"))


def content(
    tensors: Mapping[str, Tensor] | None = None,
    words: Mapping[str, int | float | str] | None = None,
    numbers: Mapping[str, float] | None = None,
) -> RecordDict:
    """The content of a message."""
    records = RecordDict()
    if tensors is not None:
        records[ARRAYS] = arrays_of(tensors)
    if words is not None:
        records[WORDS] = ConfigRecord(dict(words))
    if numbers is not None:
        records[NUMBERS] = MetricRecord({name: float(value) for name, value in numbers.items()})
    return records


def joined_as(client: int, examples: int) -> dict[str, int | float | str]:
    """The words by which a site is known from its greeting on."""
    return {"client": client, "examples": examples}


def refusal(why: str) -> RecordDict:
    """The content of an answer that says no."""
    return RecordDict({REFUSAL: ConfigRecord({"why": why})})


def sent_down(algorithm: Algorithm, server: States) -> dict[str, Tensor]:
    """What of the server's state clients receive."""
    fields = flat_fields(algorithm.server_fields())
    return {name: value for name, value in flat_state(server).items() if fields[name].sent}


def forms_up(problem: Problem, training: Training) -> dict[str, Form]:
    """Every array that a client sends after training."""
    size, real = problem.layout.size, torch.empty(0, dtype=problem.dtype).numpy().dtype
    forms = {DISPLACEMENT: Form((size,), real)}
    for name, field in flat_fields(training.algorithm.message_fields()).items():
        forms[name] = Form((size,) if field.vector else (), real)
    if not training.own_statistics:
        _, buffers, integers = problem.initial()
        if len(buffers):
            forms[BUFFERS] = Form((len(buffers),), real)
        forms |= {
            INTEGERS + name: Form(tuple(value.shape), value.cpu().numpy().dtype) for name, value in integers.items()
        }
    return forms
