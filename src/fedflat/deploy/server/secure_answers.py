"""The format of the sites' answers in secure aggregation; their content is not trusted."""

from __future__ import annotations

from typing import Any

from flwr.app import RecordDict

from fedflat.deploy.trust.secure_sum import KEY_BYTES, SECURE

Tags = dict[int, dict[int, bytes]]
"""What sites state to each other, by sender and receiver."""


def values_of(records: RecordDict, *names: str) -> list[Any]:
    """Return values of an answer, None for those that are missing; their types are unknown."""
    record = records.config_records.get(SECURE) or {}
    return [record.get(name) for name in names]


def receive_tags(tags: Tags, client: int, records: RecordDict, others: list[int]) -> str:
    """Keep what a site states to others; returns its flaw."""
    receivers, proofs = values_of(records, "clients", "tags")
    if receivers != others or not are_bytes(proofs, KEY_BYTES, len(others)):
        return "its statement to other sites has an unexpected format"
    tags[client] = dict(zip(others, proofs, strict=True))
    return ""


def are_bytes(values: Any, length: int, count: int | None = None) -> bool:
    """Whether ``values`` is a list of bytes, each of a length, with ``count`` entries if that is given."""
    if not isinstance(values, list) or (count is not None and len(values) != count):
        return False
    return all(isinstance(value, bytes) and len(value) == length for value in values)
