"""The published algorithms: their slots with the papers' defaults, their origin, and known differences.

Adding an algorithm is one entry of ``FOUR_PAPERS`` or ``LATER_METHODS``.
"""

from fedflat.algorithms.cards.card import Card
from fedflat.algorithms.cards.four_papers import FOUR_PAPERS
from fedflat.algorithms.cards.later_methods import LATER_METHODS

CARDS: dict[str, Card] = FOUR_PAPERS | LATER_METHODS
"""Published algorithms by name."""

__all__ = ["CARDS", "Card"]
