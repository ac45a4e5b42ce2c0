"""Sections of pages on specs, the frozen dataclasses that hold the parameters of a dataset, partition or model."""

from __future__ import annotations

import inspect
from typing import Any

from fedflat.cli.lookup.algorithm_card import parameter_rows
from making.markdown import code, table


def first_paragraph(thing: Any) -> str:
    """The first paragraph of a docstring, as one line of Markdown."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].replace("``", "`").split())


def parameter_table(spec: object) -> list[str]:
    """A section with the parameters of a spec; empty if it has none."""
    required = "required, or `hub`" if hasattr(spec, "hub") else "required"
    rows = [
        (
            code(row["parameter"]),
            required if row["parameter"] == "path" else code(row["default"]),
            row["range"],
            row["meaning"],
        )
        for row in parameter_rows(spec, type(spec)())
    ]
    return ["## Parameters", "", *table(("parameter", "default", "range", "meaning"), rows)] if rows else []
