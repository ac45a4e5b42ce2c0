"""fedflat papers: published tables and figures."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedflat.cli.shared.flags import JSON, no_default
from fedflat.cli.shared.screen import key_values, print_json, print_section, screen, table
from fedflat.errors import UserError

if TYPE_CHECKING:
    from fedflat.papers import Paper, PaperTable
    from fedflat.papers.schema import Protocol


def papers(
    name: str | None = typer.Argument(
        None,
        metavar="NAME",
        help="a paper, or a table or figure, e.g. fedswa/table3",
        show_default=False,
    ),
    list_cells: bool = typer.Option(False, "--list-cells", help="list a table's cells with their requirements"),
    markdown: Path | None = typer.Option(
        None, "--markdown", metavar="FILE.md", help="also write the table to this file"
    ),
    measured: bool = typer.Option(False, "--measured", help="show measured cells with published numbers and verdicts"),
    dataset: str | None = no_default("--dataset", "with --measured: only this dataset", None, metavar="NAME"),
    method: str | None = no_default("--method", "with --measured: only this method or pattern", None, metavar="NAME"),
    results: Path | None = no_default(
        "--results", "with --measured: stored results [dim](default: those of fedflat)[/dim]", None, metavar="FOLDER"
    ),
    as_json: bool = JSON,
) -> None:
    """List papers, or show one: its protocols and tables, or a table's published numbers.

    Example: fedflat papers fedswa/table3
    """
    from fedflat.experiment.store.files import require_folder, write_atomically
    from fedflat.papers import PaperTable, find
    from fedflat.papers import papers as all_papers
    from fedflat.papers.document import paper_document, table_document, table_markdown

    item = None if name is None else find(name)
    if markdown is not None:
        require_folder(markdown)
    if measured and list_cells:
        raise UserError("--measured and --list-cells exclude each other; use one of them")
    if measured:
        _print_measured(name, dataset, method, results, markdown, as_json)
        return
    if dataset or method or results:
        raise UserError("--dataset, --method and --results need --measured")
    if isinstance(item, PaperTable):
        if markdown is not None:
            write_atomically(markdown, table_markdown(item) + "\n")
        if as_json:
            print_json(table_document(item))
        else:
            (_print_cells if list_cells else _print_table)(item)
    elif list_cells or markdown is not None:
        raise UserError("--list-cells and --markdown need a table, e.g. fedflat papers fedswa/table3 --list-cells")
    elif as_json:
        print_json(paper_document(item) if item else [paper_document(paper) for paper in all_papers().values()])
    elif item:
        _print_paper(item)
    else:
        _print_papers(all_papers().values())


def _print_measured(
    name: str | None, dataset: str | None, method: str | None, results: Path | None, file: Path | None, as_json: bool
) -> None:
    """Print the measured cells of the chosen papers, datasets and methods, and a summary per paper.

    Args:
        name: a paper or table; default: all.
        dataset: name of a dataset; default: all.
        method: name of a method, or a pattern; default: all.
        results: folder of stored results; default: those that come with fedflat.
        file: Markdown file to which the cells are also written.
        as_json: print JSON instead of tables.
    """
    from fedflat.experiment.store.files import write_atomically
    from fedflat.papers.document import markdown
    from fedflat.papers.ledger import LEDGER_COLUMNS, SUMMARY_COLUMNS, Ledger
    from fedflat.papers.results import embedded_results, read_results

    ledger = Ledger(embedded_results() if results is None else read_results(results))
    entries = ledger.choose(name, dataset, method)
    rows = [entry.row() for entry in entries]
    if file is not None:
        write_atomically(file, markdown(LEDGER_COLUMNS, rows) + "\n")
    if as_json:
        print_json([entry.document() for entry in entries])
        return
    if not entries:
        raise UserError(f"there is no stored result in {results}; fedflat reproduce ... --record {results} adds some")
    # Columns that are empty in every row are left out.
    is_filled = [any(column) for column in zip(*rows, strict=True)]
    heads, cells = compress(LEDGER_COLUMNS, is_filled), (compress(row, is_filled) for row in rows)
    numeric = ("published", "measured", "seeds", "difference", "minutes")
    screen().print(table(heads, cells, numeric=numeric, whole=("cell",)))
    paper = name and name.strip("/").lower().partition("/")[0]
    print_section("All measured cells", table(SUMMARY_COLUMNS, [r for r in ledger.summary() if paper in (None, r[0])]))
    note = "\nminutes: device time of the runs behind a cell, which may measure other cells as well"
    screen().print(note, style="dim")


def _print_papers(papers: Iterable[Paper]) -> None:
    """Print one row per paper; its figures are summarised, e.g. as ``figures 2, 3``."""
    rows = []
    for paper in papers:
        figures = [name.removeprefix("figure") for name in paper.tables if name.startswith("figure")]
        tables = [name for name in paper.tables if name.startswith("table")]
        contents = [*tables, f"figures {', '.join(figures)}"] if figures else tables
        rows.append([paper.name, paper.file.title, str(paper.file.venue), ", ".join(contents)])
    screen().print(table(("paper", "title", "where", "tables and figures"), rows))
    screen().print(
        "\nDetails: fedflat papers NAME, NAME/table3 or NAME/figure1; measured results: fedflat papers --measured",
        style="dim",
    )


def _print_paper(paper: Paper) -> None:
    """Print the protocols of a paper, and one row per table or figure."""
    console, file = screen(), paper.file
    console.print(f"\n{file.title}", style="bold")
    console.print(f"{', '.join(file.authors)}. {file.venue}\n")
    for name, protocol in file.protocols.items():
        _print_protocol(name, protocol, [(protocol.number, protocol.unit)])
    rows = []
    for item in paper.tables.values():
        not_runnable = sum(bool(cell.needs) for cell in item.cells.values())
        rows.append([item.full_name, item.file.caption, len(item.cells), not_runnable or None])
    console.print(table(("name", "what it shows", "cells", "not runnable"), rows, numeric=("cells", "not runnable")))
    console.print("\nnot runnable: cells with unmet requirements (fedflat papers NAME --list-cells)", style="dim")


def _print_protocol(name: str, protocol: Protocol, numbers: Iterable[tuple[str, str]]) -> None:
    """Print the settings that a paper states for its experiments, and those that fedflat assumes.

    Args:
        name: name of the protocol.
        protocol: the settings.
        numbers: what the printed numbers are, e.g. ``mean``, and their units, which may be empty.
    """
    console = screen()
    console.print(f"Protocol {name}", style="bold")
    console.print(f"{protocol.says}.")
    # A setting with a placeholder such as {partition} has a different value in every cell.
    varying = [key for key, value in protocol.settings.items() if "{" in str(value)]
    fixed = [f"{key}={value}" for key, value in protocol.settings.items() if key not in varying]
    seeds = f"mean of {protocol.seeds} seeds" if protocol.seeds else "number of seeds not stated"
    units = {"": "", "share": ", as a share"}
    shown = [number + units.get(unit, f", in {unit}") for number, unit in dict.fromkeys(numbers)]
    texts = {"number": "; ".join([*shown, seeds]), "settings": ", ".join(fixed), "by cell": ", ".join(varying)}
    console.print(key_values(texts))
    for assumption in protocol.assumed:
        console.print(f"assumed: {assumption}", style="dim")
    console.print()


def _print_table(item: PaperTable) -> None:
    """Print a published table with its protocols, notes and unmet requirements."""
    from fedflat.papers.document import printed_rows

    console, cells = screen(), item.cells.values()
    console.print(f"\n{item.full_name}: {item.file.caption}\n", style="bold")
    columns = ["", *("\n".join(labels) for labels in _without_repetition(item.columns))]
    rows = [[None if text == "-" else text for text in row] for row in printed_rows(item)]
    console.print(table(columns, rows, numeric=columns[1:]))
    console.print()
    for name, protocol in item.protocols.items():
        numbers = [(cell.statistic.text, cell.unit) for cell in cells if cell.words["protocol"] == name]
        _print_protocol(name, protocol, numbers)
    for statement in item.file.states:
        console.print(f"stated in the text: {statement.value}, {statement.says}")
    for note in item.file.notes:
        about = f" ({', '.join(note.cells)})" if note.cells and note.cells != ["*"] else ""
        console.print(f"{note.kind}{about}: {note.says}")
    for requirement in dict.fromkeys(cell.needs for cell in cells if cell.needs):
        console.print(f"cannot run yet; requires: {requirement}", style="yellow")
    for weights in dict.fromkeys(cell.weights for cell in cells if cell.weights):
        console.print(f"starts from {weights}: provide them with --set init=FILE", style="yellow")
    console.print(f"\nReproduce it: fedflat reproduce {item.full_name} [--cells ...] [--scale small]", style="dim")


def _without_repetition(columns: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the header labels of columns, each only above the first column of its group.

    >>> _without_repetition([("a", "x"), ("a", "y"), ("b", "x")])
    [('a', 'x'), ('', 'y'), ('b', 'x')]
    """
    headers = []
    for labels, previous in zip(columns, [(), *columns], strict=False):
        equal = takewhile(lambda pair: pair[0] == pair[1], zip(labels, previous, strict=False))
        shared = len(list(equal)) if labels != previous else 0  # number of labels, from the top
        headers.append(("",) * shared + labels[shared:])
    return headers


def _print_cells(item: PaperTable) -> None:
    """Print one row per cell; columns that are empty in every row are left out."""
    rows = [
        {
            "cell": cell.name,
            "published": cell.published and cell.published.text,
            "number": cell.statistic.text,
            "of model": cell.evaluated,
            "algorithm": " | ".join(config.algorithm for config in cell.configs),
            "partition": cell.configs[0].data.partition if cell.configs else None,
            "needs": cell.needs,
        }
        for cell in item.cells.values()
    ]
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    cells = ([row[name] for name in columns] for row in rows)
    screen().print(table(columns, cells, numeric=("published",), whole=("cell",)))  # names to copy into --cells
