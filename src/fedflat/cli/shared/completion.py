"""Shell completion of algorithm names."""

from __future__ import annotations

import ast
from pathlib import Path

CARDS = Path(__file__).parents[2] / "algorithms" / "named.py"


def algorithm_names(incomplete: str) -> list[str]:
    """Named algorithms that start with ``typed``.

    >>> algorithm_names("fedlesam")
    ['fedlesam', 'fedlesam-s', 'fedlesam-d']
    """
    return [name for name in _named() if name.startswith(incomplete)]


def _named() -> list[str]:
    """Algorithm names parsed from source, because importing torch would make completion slow."""
    for statement in ast.parse(CARDS.read_text(encoding="utf-8")).body:
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and statement.target.id == "CARDS"
        ):
            assert isinstance(statement.value, ast.Dict)
            return [str(key.value) for key in statement.value.keys if isinstance(key, ast.Constant)]
    return []
