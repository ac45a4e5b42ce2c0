"""The content of messages: flat vectors as arrays under their full names (never pickles), a header and numbers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedflat.algorithms.algorithm import Algorithm, States, flat_fields, flat_state

MODEL, DISPLACEMENT, GRADIENT, BUFFERS, INTEGERS = "model", "displacement", "gradient", "buffers", "integers/"
"""Names of arrays that do not belong to a slot; the last one is a prefix."""
ARRAYS, NUMBERS, HEADER, REFUSAL, RECEIPT = "arrays", "numbers", "header", "refusal", "receipt"
"""Names of the records of a message."""
EXPERIMENT, ROUND, CLIENT, BASE, CHALLENGE = CLAIMS = ("experiment", "round", "client", "base", "challenge")
"""Names in a header that the answer must repeat in its receipt; BASE is the digest of the message's arrays."""
STATE_VERSION = "state_version"
"""Name in a header: version of the state that the client trains from, as in ``client_memory``."""
FIRST_BASE = "first_base"
"""Name in a header: in the second phase of a round, the digest of the first phase's arrays; otherwise empty."""


def message_content(
    tensors: Mapping[str, Tensor] | ArrayRecord | None = None,
    header: Mapping[str, int | float | str] | None = None,
    numbers: Mapping[str, float] | None = None,
) -> RecordDict:
    """Return the content of a message.

    Args:
        tensors: sent as arrays, by name: a constant such as ``MODEL``, or ``slot.field`` for the state of an algorithm.
            An ``ArrayRecord`` is not copied, so that messages to many sites can share it.
        header: what the message is about: experiment, round, client, ...
        numbers: metrics and counts of a reply.
    """
    records = RecordDict()
    if tensors is not None:
        records[ARRAYS] = tensors if isinstance(tensors, ArrayRecord) else array_record(tensors)
    if header is not None:
        records[HEADER] = ConfigRecord(dict(header))
    if numbers is not None:
        records[NUMBERS] = MetricRecord({name: float(value) for name, value in numbers.items()})
    return records


def array_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Return tensors as the arrays of a message."""
    return ArrayRecord({name: Array(tensor.detach().cpu().contiguous().numpy()) for name, tensor in tensors.items()})


def refusal(reason: str) -> RecordDict:
    """Return the content of a reply that refuses a task."""
    return RecordDict({REFUSAL: ConfigRecord({"why": reason})})


def tensors_of(record: ArrayRecord, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return received arrays as tensors on a device."""
    return {name: torch.from_numpy(array).to(device) for name, array in numpy_of(record).items()}


def numpy_of(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Return received arrays; an unreadable one becomes an empty uint8 array, which the receiver's checks refuse."""
    arrays = {}
    for name, array in record.items():
        try:
            arrays[name] = np.array(array.numpy())
        except Exception:  # untrusted bytes may raise anything
            arrays[name] = np.zeros(0, np.uint8)
    return arrays


def numbers_of(records: RecordDict) -> dict[str, float]:
    """Return the numbers in a reply by name; values of other types, which an untrusted site may send, are dropped."""
    numbers = records.metric_records.get(NUMBERS) or {}
    return {name: value for name, value in numbers.items() if isinstance(value, int | float)}


def refusal_reason(records: RecordDict) -> str | None:
    """Return why a reply refuses its task; None if it does not."""
    record = records.config_records.get(REFUSAL)
    return None if record is None else str(record.get("why", "it gives no reason"))


def client_header(client: int, examples: int) -> dict[str, int | float | str]:
    """Return the part of a header that says which client a node joined as, and with how many examples."""
    return {CLIENT: client, "examples": examples}


def broadcast_state(algorithm: Algorithm, server: States) -> dict[str, Tensor]:
    """Return the part of the server's state that clients receive, by flat name (``slot.field``)."""
    fields = flat_fields(algorithm.server_fields())
    return {name: value for name, value in flat_state(server).items() if fields[name].sent}
