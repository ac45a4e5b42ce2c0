"""fedflat papers: published tables and figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from fedflat.cli.shared.flags import JSON
from fedflat.cli.shared.screen import facts, print_json, screen, table
from fedflat.errors import UserError

if TYPE_CHECKING:
    from fedflat.papers import Paper, PaperTable
    from fedflat.papers.schema import Protocol


def papers(
    name: str | None = typer.Argument(
        None, metavar="PAPER[/TABLE]", help="a paper, or one of its tables or figures", show_default=False
    ),
    cells: bool = typer.Option(False, "--cells", help="list a table's cells with their requirements"),
    markdown: bool = typer.Option(False, "--markdown", help="print a table in Markdown"),
    as_json: bool = JSON,
) -> None:
    """List papers, or show one: its protocols and tables, or a table's published numbers.

    Example: fedflat papers fedswa/table3
    """
    from fedflat.papers import Paper, PaperTable, find
    from fedflat.papers import papers as all_papers
    from fedflat.papers.document import paper_document, table_document, table_markdown

    found = None if name is None else find(name)
    if (cells or markdown) and not isinstance(found, PaperTable):
        raise UserError("--cells and --markdown need a table, e.g. fedflat papers fedswa/table3 --cells")
    if found is None:
        if as_json:
            print_json([paper_document(paper) for paper in all_papers().values()])
        else:
            _print_papers(all_papers())
    elif isinstance(found, Paper):
        if as_json:
            print_json(paper_document(found))
        else:
            _print_paper(found)
    elif as_json:
        print_json(table_document(found))
    elif markdown:
        print(table_markdown(found))
    elif cells:
        _print_cells(found)
    else:
        _print_table(found)


def _print_papers(found: dict[str, Paper]) -> None:
    rows = [[p.name, p.file.title, f"{p.file.venue}", ", ".join(_short(p))] for p in found.values()]
    screen().print(table(("paper", "title", "where", "tables and figures"), rows))
    screen().print("\nDetails: fedflat papers NAME, fedflat papers NAME/table3", style="dim")


def _short(paper: Paper) -> list[str]:
    """Tables and figures in short form: table2, ..., figure1-12."""
    figures = [name.removeprefix("figure") for name in paper.tables if name.startswith("figure")]
    return [name for name in paper.tables if name.startswith("table")] + [f"figures {', '.join(figures)}"]


def _print_paper(paper: Paper) -> None:
    console, file = screen(), paper.file
    console.print(f"\n{file.title}", style="bold")
    console.print(f"{', '.join(file.authors)}. {file.venue}\n", highlight=False)
    for name, protocol in file.protocols.items():
        _print_protocol(name, protocol)
    rows = [
        [t.full_name, t.file.caption, len(t.cells), sum(bool(c.needs) for c in t.cells.values()) or None]
        for t in paper.tables.values()
    ]
    console.print(table(("name", "what it shows", "cells", "not yet"), rows, numbers=("cells", "not yet")))
    console.print("\nnot yet: cells with unmet requirements (fedflat papers NAME --cells)", style="dim")


def _print_protocol(name: str, protocol: Protocol) -> None:
    console = screen()
    console.print(f"Protocol {name}", style="bold")
    console.print(f"{protocol.says}.", highlight=False)
    settings = ", ".join(f"{key}={value}" for key, value in protocol.settings.items() if "{" not in str(value))
    varying = ", ".join(key for key, value in protocol.settings.items() if "{" in str(value))
    seeds = f"mean of {protocol.seeds} seeds" if protocol.seeds else "number of seeds not stated"
    unit = "as a share" if protocol.unit == "share" else f"in {protocol.unit}"
    console.print(facts({"number": f"{protocol.number}, {unit}; {seeds}", "settings": settings, "by cell": varying}))
    for line in protocol.assumed:
        console.print(f"assumed: {line}", style="dim", highlight=False)
    console.print()


def _print_table(found: PaperTable) -> None:
    from fedflat.papers.document import printed_rows

    console = screen()
    console.print(f"\n{found.full_name}: {found.file.caption}\n", style="bold", highlight=False)
    heads = ["", *("\n".join(labels) for labels in _without_repetition(found.columns))]
    console.print(
        table(
            heads, [[None if text == "-" else text for text in row] for row in printed_rows(found)], numbers=heads[1:]
        )
    )
    console.print()
    for name, protocol in found.protocols.items():
        _print_protocol(name, protocol)
    for stated in found.file.states:
        console.print(f"stated in the text: {stated.value}, {stated.says}", highlight=False)
    for note in found.file.notes:
        about = f" ({', '.join(note.cells)})" if note.cells and note.cells != ["*"] else ""
        console.print(f"{note.kind}{about}: {note.says}", highlight=False, markup=False)
    for need in dict.fromkeys(cell.needs for cell in found.cells.values() if cell.needs):
        console.print(f"cannot run yet; requires: {need}", style="yellow", highlight=False)
    for weights in dict.fromkeys(cell.weights for cell in found.cells.values() if cell.weights):
        console.print(f"starts from {weights}: provide them with --set init=FILE", style="yellow", highlight=False)
    console.print(
        f"\nReproduce it: fedflat reproduce {found.full_name} [--cells ...] [--scale small]", style="dim", markup=False
    )


def _without_repetition(columns: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Header labels, each only above the first column of its group.

    >>> _without_repetition([("a", "x"), ("a", "y"), ("b", "x")])
    [('a', 'x'), ('', 'y'), ('b', 'x')]
    """
    shown = []
    for before, labels in zip([(), *columns], columns, strict=False):
        same = next((level for level, label in enumerate(labels) if before[level : level + 1] != (label,)), 0)
        shown.append(tuple("" if level < same else label for level, label in enumerate(labels)))
    return shown


def _print_cells(found: PaperTable) -> None:
    rows = [
        [
            cell.name,
            cell.published and cell.published.text,
            cell.statistic.text,
            cell.evaluated,
            " | ".join(config.algorithm for config in cell.configs),
            cell.configs[0].data.partition if cell.configs else None,
            cell.needs,
        ]
        for cell in found.cells.values()
    ]
    heads = ("cell", "published", "number", "of model", "algorithm", "partition", "needs")
    told = [place for place in range(len(heads)) if any(row[place] for row in rows)]
    made = table(
        [heads[place] for place in told], [[row[place] for place in told] for row in rows], numbers=("published",)
    )
    made.columns[0].no_wrap = True  # names to copy into --cells
    screen().print(made)
