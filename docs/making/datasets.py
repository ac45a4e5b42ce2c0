"""A page for each dataset, generated from its source and card."""

from __future__ import annotations

import re

from fedflat.data import DATASETS
from fedflat.data.sources.source import DatasetSource
from making.markdown import block, code, joined, table
from making.specs import first_paragraph, parameter_table

PAGE = "data.md"


def pages() -> dict[str, str]:
    """The page of every registered dataset, by path."""
    return {
        f"data/{name}.md": user_page(source) if source.example else published_page(source)
        for name, source in DATASETS.items()
    }


def published_page(source: DatasetSource) -> str:
    """The page of a published dataset."""
    name, card = source.name, source.card
    facts = {
        "training / test examples": card.examples,
        "shape of an example": card.shape,
        "classes": card.classes,
        "natural clients": card.clients or "none",
        "publication": card.citation,
        "licence": card.licence and f"{card.licence} (not legal advice; see the publisher)",
        "how to get it": how_to_get(source),
        "verified": card.checks,
    }
    lines = [f"# {name}", "", f"**{_sentence(source.title)}** {first_paragraph(type(source))}", ""]
    lines += table(("", ""), [fact for fact in facts.items() if fact[1]])
    lines += ["## Usage", "", *block(_commands(source), "bash")]
    python = [
        "from fedflat.data import describe, load",
        "",
        f'data = load("{name}")',
        "describe(data)  # sizes, classes, statistics, content hash",
    ]
    lines += block(python, "py" if source.files else "python")  # built-in datasets can be run as a test
    lines += parameter_table(source.options)
    if source.downloads:
        rows = [(f"<{d.url}>", code(d.md5), _files(d.files)) for d in source.downloads]
        lines += ["## Files", "", *table(("address", "md5", "in the data directory"), rows)]
    if source.instructions:
        lines += ["## Manual download", "", _linked(_sentence(source.instructions)), ""]
    return joined(lines, [f"See also: [all datasets](../{PAGE}), [partitions](../partitions.md).", ""])


def user_page(source: DatasetSource) -> str:
    """The page of a kind of user data."""
    lines = [f"# {source.name}", "", f"**{_sentence(source.title)}** {first_paragraph(type(source))}", ""]
    model = {"arrays": "mlp", "text": "char-lstm"}.get(source.name, "lenet5")
    commands = [
        f"fedflat data describe '{source.example}'",
        f"fedflat run fedavg --dataset '{source.example}' --model {model} --clients 10 --rounds 20",
    ]
    lines += ["## Usage", "", *block(commands, "bash"), *parameter_table(source.options)]
    more = f"File formats: [your own data](../{PAGE}#your-own-data). Tutorial: [bring your own](../how-to/bring-your-own.md)."
    return joined(lines, [more, ""])


def how_to_get(source: DatasetSource) -> str:
    """How to obtain the files of a dataset, in a few words."""
    if not source.files:
        return "built in"
    if not source.downloads:
        return "manually, see below"
    command = f"`fedflat data get {source.name}`" + (f" ({source.card.size})" if source.card.size else "")
    return f"{command}; the rest manually, see below" if source.instructions else command


def _commands(source: DatasetSource) -> list[str]:
    name, card = source.name, source.card
    get = [f"fedflat data get {name}"] if source.files else []
    if hasattr(source, "of"):  # test images of another dataset
        return [*get, f"fedflat evaluate runs/fedavg-{source.of}-seed0 --on corruptions"]
    natural, skewed = "natural", "'dirichlet(alpha=0.1)' --clients 50"
    run = f"fedflat run fedavg --dataset {name} --model {card.model} --partition {natural if card.clients else skewed}"
    return [*get, f"fedflat data describe {name}", run]


def _files(files: tuple[str, ...]) -> str:
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return ", ".join(map(code, files[:3])) + more


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _linked(text: str) -> str:
    return re.sub(r"(https?://[^\s,)]+?)(?=[.,):]*(\s|$))", r"<\1>", text)
