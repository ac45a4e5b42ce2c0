"""What does not hold."""

from __future__ import annotations


class Broken(AssertionError):
    """An identity that what was checked breaks: its name, and how far off it is."""

    def __init__(self, what: str, identity: str, how: str) -> None:
        super().__init__(f'{what} breaks the identity "{identity}": {how}')
        self.identity = identity
