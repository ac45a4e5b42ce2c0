"""The exception that every check raises."""

from __future__ import annotations

from collections.abc import Iterable


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


def verify(name: str, properties: Iterable[tuple[str, str | None]]) -> list[str]:
    """Return the names of the properties; raises ``Broken`` for the first with a reason why ``name`` violates it."""
    verified = []
    for property_name, reason in properties:
        if reason:
            raise Broken(name, property_name, reason)
        verified.append(property_name)
    return verified
