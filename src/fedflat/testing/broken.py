"""The exception that every check raises."""

from __future__ import annotations


class Broken(AssertionError):
    """Raised if the checked object violates a property.

    Args:
        name: name of the checked object.
        property_name: the violated property, also available as an attribute.
        reason: how it is violated, and where to look for the cause.
    """

    def __init__(self, name: str, property_name: str, reason: str) -> None:
        super().__init__(f'{name} violates "{property_name}": {reason}')
        self.property_name = property_name
