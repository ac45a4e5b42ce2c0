"""The exception of all checks."""

from __future__ import annotations


class Broken(AssertionError):
    """A property that the checked object violates.

    Args:
        name: the checked object.
        identity: the violated property, also available as an attribute.
        reason: by how much, and where to look.
    """

    def __init__(self, name: str, identity: str, reason: str) -> None:
        super().__init__(f'{name} violates "{identity}": {reason}')
        self.identity = identity
