"""Pages and tables made from the stored results: the ledger, the claims, and generated tables in other pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from statistics import fmean, stdev

from fedflat.papers import papers
from fedflat.papers.claims import check_claims, shown_with_half_width
from fedflat.papers.ledger import LEDGER_COLUMNS, SUMMARY_COLUMNS, Ledger, LedgerEntry
from fedflat.papers.results import embedded_text, read_results
from fedflat.reporting.tables.summary import compare_paired
from making.markdown import DOCS, code, joined, table

ROOT = DOCS.parent
EMBEDDED = "../src/fedflat/papers/data/measured.json"
WITH_TABLES = ("../README.md", "campaign.md")
"""Pages that contain generated tables between two comments."""
BLOCK = re.compile(r"<!-- results: (?P<call>.*?) -->\n.*?<!-- end of results -->", re.DOTALL)


@cache
def ledger() -> Ledger:
    """The ledger of all committed results."""
    return Ledger(read_results(ROOT / "results"))


def pages() -> dict[str, str]:
    """The generated pages and files by path."""
    files = {"ledger.md": ledger_page(), "claims.md": claims_page(), EMBEDDED: embedded_text(ledger().results)}
    return files | {path: with_tables((DOCS / path).read_text("utf-8")) for path in WITH_TABLES}


def ledger_page() -> str:
    """Every measured cell, by paper and dataset."""
    lines = [
        "# Ledger of measured results",
        "",
        "This page lists every cell of the papers' tables that has been measured at full scale. Tables that repeat a",
        "number count it again; the column *distinct* of the summary counts it once. The page is generated from the JSON files in `results/`, one per run. [Measured",
        "results](campaign.md) discusses large differences, such as [MoFedSAM at chance",
        "level](campaign.md#mofedsam-and-weight-decay), and [Claims](claims.md) the papers' claims.",
        "These commands print the same list, or a part of it, in a terminal, and a summary of each paper:",
        "",
        "<!-- runs -->",
        "```bash",
        "fedflat papers --measured",
        "fedflat papers fedswa/table2 --measured --dataset cifar100 --method 'fed*swa'",
        "```",
        "",
        "| column | meaning |",
        "|---|---|",
        "| measured | mean ± standard deviation over seeds, with the paper's settings, and fedflat's where the paper states none (`fedflat papers NAME` lists them as *assumed*); no hyperparameter was tuned for this column, but FedWMSAM's accuracies are, as in its released code, the best of 500 evaluations on the test set; in bf16 unless the experiment sets another precision; if a seed was run more than once, its newest run counts |",
        "| difference, verdict | measured minus published, judged by the [rule](papers.md#tolerance) of `fedflat reproduce`; the tolerance grows with the standard deviation over seeds, and `--json` prints it |",
        "| released | the authors' released code on the same data |",
        "| tuned | fedflat with hyperparameters selected on a validation split of the training data |",
        "| minutes | device time in minutes of all runs behind the cell; these runs may measure other cells as well |",
        "",
        "| verdict | meaning |",
        "|---|---|",
        "| within, above, below | the measured mean lies within the tolerance of the published number, above it or below it |",
        "| unjudged | no tolerance can be computed, because there is one seed and the paper prints no ± |",
        "| not printed | the paper prints no number to compare with |",
        "| ran | the runs deviate from the paper (another number of rounds, another evaluation interval or other settings), so they are shown but not judged |",
        "",
        "## Summary",
        "",
        *table(SUMMARY_COLUMNS, ledger().summary()),
        f"Hardware: {', '.join(sorted({result.environment['hardware'] or 'unknown' for result in ledger().results}))}.",
        "",
    ]
    for name, paper in papers().items():
        entries = [entry for entry in ledger().entries if entry.cell.table.startswith(f"{name}/")]
        if entries:
            lines += [
                f"## {name}",
                "",
                f"{', '.join(paper.file.authors)}: *{paper.file.title}*. {paper.file.venue}.",
                "",
            ]
        for dataset in dict.fromkeys(entry.dataset for entry in entries):
            lines += [f"### {name}: {dataset}", "", *_cells([e for e in entries if e.dataset == dataset])]
    lines += [
        "## Add a result",
        "",
        "<!-- not run: hours on a GPU -->",
        "```bash",
        "fedflat reproduce fedswa/table3 --cells 'fedavg/cifar100-dirichlet-0.1-*' --seeds 3 \\",
        "  --set engine.precision=bf16 --record results",
        "python docs/generate.py",
        "```",
        "",
        "The first command runs a cell and writes one JSON file per seed below `results/`. The second command updates this",
        "page. A test validates every file: its cells must exist, its published numbers must be the paper's, its measured numbers",
        "must follow from its curve, and the hash of its protocol must be that of the paper's experiment. Only the number of rounds, the evaluation interval and the",
        "precision may differ.",
    ]
    return joined(lines)


def claims_page() -> str:
    """The headline claims with claimed and measured differences."""
    rows = [
        (code(claim.claim.paper), claim.claim.claim, claim.claimed_text, claim.measured_text, claim.verdict)
        for claim in check_claims(ledger())
    ]
    return joined(
        [
            "# Claims of the papers",
            "",
            "This page compares headline claims of the four papers with measured results. Each claim is a difference between",
            "two published numbers. The measured difference is paired by seed, and the number after ± is half the width of its",
            "95 % interval (Student's t, not corrected for multiple comparisons). The page is generated from the files in `results/`; the",
            "[ledger](ledger.md) lists the cells, and [Measured results](campaign.md) describes the runs. `fedflat papers",
            "fedswa/table2 --measured --json` prints the value of each seed (`by_seed`).",
            "",
            "To repeat a claim, run its two cells. This command estimates the time for the first claim; it starts the runs",
            "if you leave out `--dry-run`:",
            "",
            "```bash",
            "fedflat reproduce fedswa/table2 --cells 'fedmoswa/cifar100-lenet-5-accuracy' \\",
            "  --cells 'scaffold/cifar100-lenet-5-accuracy' --set engine.precision=bf16 --dry-run",
            "```",
            "",
            "The FedSWA paper's LeNet-5 is the model `cnn`, not `lenet5`.",
            "",
            *table(("paper", "claim", "claimed", "measured", "verdict"), rows),
            "The verdict follows from the interval: a claim is confirmed if the interval excludes zero and contains the",
            "claimed difference. Accuracy differences are in percentage points. With three seeds, intervals are wide, so",
            "small differences remain undecided, and an interval that barely excludes zero, such as that of FedSWA over",
            "FedAvg, is weak evidence. FedWMSAM's accuracies are, as in its released code, the best of 500 evaluations on the",
            "test set and therefore optimistic. The runs behind the eigenvalues in this table did not record training losses",
            "with the eigenvalues, so these differences in lambda_max may be due to differences in training loss.",
            "",
            "## Which flatness claims are measured",
            "",
            "| claims | data | rounds | seeds | results |",
            "|---|---|---|---|---|",
            "| ECCV Table 1: lambda_max of FedAvg, FedSAM and FedASAM, without and with SWA | CIFAR-100, alpha 0 | 20,000, as in the paper | 1 | [Measured results](campaign.md#eccv-tables-1-and-2-cifar-100-alpha-0-5-clients-per-round) |",
            "| ECCV: lambda_max of global models, of clients' models and of their averages | CIFAR-10, alpha 0 and 100 | 1,000 (paper: 20,000, on CIFAR-100) | 1 | [Flatness claims](flatness-claims.md#flatness-claims-of-caldarola-et-al) |",
            "| lambda_max of FedAvg, FedSAM, FedASAM with SWA, and FedMoSWA | Fashion-MNIST, Dirichlet 0.1 | 80 | 1 | [Flatness claims](flatness-claims.md#four-methods-on-fashion-mnist) |",
            "| the same four methods | digits, Dirichlet 0.1 | 60 | 3 | [Flatness claims](flatness-claims.md#four-methods-on-digits) |",
            "",
            "Not measured yet at full scale in ECCV Table 1: FedAvg with E = 2, and alpha 1,000.",
        ]
    )


def with_tables(page: str) -> str:
    """A page with its generated tables up to date."""

    def block(match: re.Match[str]) -> str:
        """The table that a comment such as ``results: column fedswa/table2 cifar10-lenet-5`` asks for."""
        name, *words = match["call"].split()
        return "\n".join([f"<!-- results: {match['call']} -->", *TABLES[name](*words), "<!-- end of results -->"])

    return BLOCK.sub(block, page)


def column(table_name: str, suffix: str, baseline: str = "fedavg") -> list[str]:
    """The measured rows of one column of a table, with averages and the gain over a baseline on the same dataset."""
    measured_cells = {entry.cell.name: entry for entry in ledger().choose(table_name) if entry.outcome.by_seed}
    base = measured_cells[f"{baseline}/{suffix}"]
    entries = [
        entry
        for name, entry in measured_cells.items()
        if name.endswith(f"/{suffix}") and entry.cell.unit != "rounds" and entry.dataset == base.dataset
    ]
    is_best = base.cell.statistic.text == "best"
    rows = []
    for entry in entries:
        _, _, published, measured, seeds, difference, verdict, *_ = entry.row()
        if entry.cell.unit == "share":  # shown in percent
            published = f"{100 * float(published):.2f}"
            measured, difference = (
                _mean([100 * v for v in entry.outcome.values]),
                f"{100 * float(difference or 'nan'):+.2f}",
            )
        models = [_of_model(entry, name) for name in (*(("server",) if is_best else ()), "wima", "ema")]
        gain = "" if entry is base else f"{_published_gain(entry, base)} / {_measured_gain(entry, base)}"
        algorithms = [config.algorithm for config in entry.cell.configs]
        method = code(algorithms[0]) if len(algorithms) == 1 else f"best of {', '.join(map(code, algorithms))}"
        rows.append((method, published, measured, seeds, difference, verdict, gain, *models))
    columns = (
        "algorithm",
        "published",
        "measured",
        "seeds",
        "difference",
        "verdict",
        f"gain over {code(base.cell.configs[0].algorithm)}",
    )
    return table((*columns, *(("last",) if is_best else ()), "WiMA", "EMA"), rows)


def compared(table_name: str, suffix: str, *methods: str) -> list[str]:
    """Published and measured numbers of some methods, one column each."""
    chosen = [entry for entry in ledger().choose(table_name) if entry.cell.name.endswith(f"/{suffix}")]
    entries = {entry.methods[0]: entry for entry in chosen}
    rows = [entries[method].row() for method in methods]
    names = {name.lower(): name for name in papers()[table_name.split("/")[0]].file.methods}
    shown = [
        (name, *(row[LEDGER_COLUMNS.index(name)] for row in rows)) for name in ("published", "measured", "verdict")
    ]
    return table(("", *(names[method] for method in methods)), shown)


def claims() -> list[str]:
    """The claims that have been measured, with both differences."""
    checked = [claim for claim in check_claims(ledger()) if claim.measured]
    rows = [(claim.claim.claim.rstrip("."), claim.claimed_text, claim.measured_text) for claim in checked]
    return table(("claim", "claimed", "measured"), rows)


def cells(table_name: str) -> list[str]:
    """All measured cells of a table."""
    return _cells(ledger().choose(table_name))


TABLES: dict[str, Callable[..., list[str]]] = {
    "cells": cells,
    "claims": claims,
    "column": column,
    "compared": compared,
}


def _cells(entries: Sequence[LedgerEntry]) -> list[str]:
    """A table of entries, without columns that are empty in every row."""
    rows = [entry.row() for entry in entries]
    shown = [index for index in range(len(LEDGER_COLUMNS)) if any(row[index] for row in rows)]
    return table(
        [LEDGER_COLUMNS[i] for i in shown], [[row[i] if i > 1 else code(row[i]) for i in shown] for row in rows]
    )


def _of_model(entry: LedgerEntry, model: str) -> str:
    """The last value of a model over seeds in percent."""
    values = [100 * value for r in entry.counted if (value := r.metrics.get(model, {}).get("last")) is not None]
    return _mean(values) if values else ""


def _mean(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f} ± {stdev(values):.2f}" if len(values) > 1 else f"{fmean(values):.2f}"


def _published_gain(entry: LedgerEntry, base: LedgerEntry) -> str:
    published = [
        e.cell.published.value for e in (entry, base) if e.cell.published and e.cell.published.value is not None
    ]
    return f"{_points(entry) * (published[0] - published[1]):+.1f}"


def _measured_gain(entry: LedgerEntry, base: LedgerEntry) -> str:
    """The difference from a baseline, paired by seed, with half the width of its 95 % interval."""
    pair = compare_paired(entry.outcome.by_seed, base.outcome.by_seed)
    assert pair is not None
    return shown_with_half_width(pair, _points(entry))


def _points(entry: LedgerEntry) -> float:
    """Factor from the cell's unit to percentage points."""
    return 100.0 if entry.cell.unit == "share" else 1.0
