"""A page for each partition: definition, parameters, what it measures, and its picture."""

from __future__ import annotations

import inspect

import numpy as np

from fedflat.cli.lookup.algorithm_card import parameter_rows
from fedflat.data import PARTITION_MODIFIERS, PARTITIONERS, make_partition
from fedflat.reporting.figures.partition import COLOURS
from making.markdown import block, code, joined, rows_of, table
from making.svg import FAINT, INK, boxes, drawing, rule, words

SHOWN = {
    "iid": ("iid", "iid(sigma=0.5)"),
    "dirichlet": ("dirichlet(alpha=0.6)", "dirichlet(alpha=0.1)", "dirichlet(alpha=0)"),
    "dirichlet-reuse": ("dirichlet-reuse(alpha=0.1)",),
    "dirichlet-classwise": ("dirichlet-classwise(alpha=0.1)",),
    "dirichlet-lda": ("dirichlet-lda(alpha=1)", "dirichlet-lda(alpha=0.1)"),
    "pathological": ("pathological(classes=2)", "pathological(classes=4)"),
    "pachinko": ("pachinko(alpha=0.1,beta=10)",),
    "natural": ("natural",),
    "virtual": ("virtual(size=100,alpha=0.1)",),
    "centralised": ("centralised",),
    "listed": (),
    "longtail": ("iid+longtail(factor=10)", "dirichlet(alpha=0.1)+longtail(factor=10)"),
    "held-out": ("dirichlet(alpha=0.1)+held-out(share=0.2)",),
}
"""What is drawn for each: 5,000 examples of ten equally frequent classes over 50 clients."""
CLIENTS, EXAMPLES, CLASSES = 50, 5000, 10
WIDTH, PANEL, TOP, LEFT = 720, 132, 30, 46
PAGE = "partitions.md"


def pages() -> dict[str, str]:
    """A page and a picture for each partition, and for each part that can be added to one."""
    rows = rows_of(PAGE, "## Available partitions")
    by_name = {key.lstrip("+").partition("(")[0]: cells for key, cells in rows.items()}
    by_name |= {key.lstrip("+").partition("(")[0]: cells for key, cells in rows_of(PAGE, "### Modifiers").items()}
    found = {}
    for name, spec in (PARTITIONERS | PARTITION_MODIFIERS).items():
        found[f"partitions/{name}.md"] = one(name, spec, by_name[name])
        if SHOWN[name]:
            found[f"images/partitions/{name}.svg"] = picture(SHOWN[name])
    return found


def one(name: str, spec: type, cells: list[str]) -> str:
    """The page of a partition."""
    about = " ".join((inspect.getdoc(spec) or "").replace("``", "`").split())
    lines = [f"# {name}", "", about, ""]
    facts = [("source", cells[-1])]
    if len(cells) > 3:
        facts = [("every example with exactly one client", cells[2]), ("sizes of clients", cells[3]), *facts]
    lines += table(("", ""), facts)
    rows = [(code(row["parameter"]), code(row["default"]), row["range"], row["meaning"]) for row in parameter_rows(spec(), spec())]
    lines += ["## Parameters", "", *table(("parameter", "default", "range", "meaning"), rows)] if rows else []
    if SHOWN[name]:
        lines += [
            "## What it looks like",
            "",
            f"![Class counts per client under {name}](../images/partitions/{name}.svg)",
            "",
            _caption(name),
            "",
        ]
    lines += ["## Use it", "", *block(_commands(name), "bash")]
    return joined(lines, [f"All partitions, measured, and what papers mean by their names: [partitions](../{PAGE}).", ""])


def _caption(name: str) -> str:
    if name == "natural":
        return "Six writers, invented for the picture, who wrote more or less and favour some classes; in `femnist` they are real."
    return f"{EXAMPLES:,} examples of {CLASSES} equally frequent classes, seed 0. A column is a client, a colour a class; clients are sorted by their most frequent class."


def _commands(name: str) -> list[str]:
    if name == "listed":
        return ["fedflat run fedavg --partition 'listed(path=partition.json)' --set data.clients=null --rounds 20"]
    text = SHOWN[name][-1]
    if name == "natural":
        return ["fedflat run fedavg --dataset femnist --model femnist-cnn --partition natural --set data.clients=null"]
    if name == "pachinko":
        return [f"fedflat run fedavg --dataset cifar100 --model resnet18 --partition '{text}' --clients 500"]
    clients = "--set data.clients=null" if name == "centralised" else f"--clients {CLIENTS}"
    rounds = " --clients-per-round 1" if name == "centralised" else ""
    return ([] if name == "centralised" else [f"fedflat data describe digits --partition '{text}' --clients {CLIENTS}"]) + [
        f"fedflat run fedavg --partition '{text}' {clients}{rounds} --rounds 20"
    ]


# --- pictures --------------------------------------------------------------------------------------------------------------------


def picture(texts: tuple[str, ...]) -> str:
    """Class counts per client of some partitions, one below the other."""
    parts: list[str] = []
    for number, text in enumerate(texts):
        counts = histogram(text)
        parts += _panel(text, counts, number * (PANEL + TOP + 14))
    return drawing(WIDTH, len(texts) * (PANEL + TOP + 14) + 6, parts, ", ".join(texts))


def histogram(text: str) -> np.ndarray:
    """How many examples of each class every client has."""
    targets, groups = np.arange(EXAMPLES) % CLASSES, None
    if text == "natural":
        rng = np.random.default_rng(0)
        groups = rng.choice(6, EXAMPLES, p=[0.05, 0.1, 0.1, 0.2, 0.25, 0.3])
        favoured = rng.random(EXAMPLES) < 0.4
        targets = np.where(favoured, (groups * 2 + rng.integers(0, 3, EXAMPLES)) % CLASSES, targets)
    clients = None if text in ("natural", "centralised") else CLIENTS
    partition = make_partition(text, targets, CLASSES, clients, 0, groups=groups, coarse=targets // 2)
    return partition.histogram(targets, CLASSES)


def _panel(text: str, counts: np.ndarray, top: float) -> list[str]:
    share = counts.max(1) / np.maximum(counts.sum(1), 1)
    counts = counts[np.lexsort((-share, counts.argmax(1)))]
    sizes = counts.sum(1)
    size = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
    many = "1 client" if len(counts) == 1 else f"{len(counts)} clients"
    found = f"{many}, {size} examples each, {np.count_nonzero(counts, axis=1).mean():.1f} classes per client"
    bottom, scale, column = top + TOP + PANEL, PANEL / sizes.max(), (WIDTH - LEFT - 14) / len(counts)
    parts = [words(LEFT, top + 20, text, size=13, colour=INK, bold=True), words(WIDTH - 14, top + 20, found, size=11, anchor="end")]
    for value in (0, int(sizes.max())):
        parts += [
            rule(LEFT, bottom - value * scale, WIDTH - 14, bottom - value * scale),
            words(LEFT - 6, bottom - value * scale + 4, str(value), size=10, colour=FAINT, anchor="end"),
        ]
    gap = 0.12 if len(counts) > 1 else 0.35
    for label in range(counts.shape[1]):
        first, held = counts.argmax(1), counts[:, label]
        below = np.where(
            first == label,
            0,
            counts.max(1) + np.where(np.arange(counts.shape[1]) < label, counts, 0).sum(1) - np.where(first < label, counts.max(1), 0),
        )
        rectangles = [
            (LEFT + (i + gap / 2) * column, bottom - (below[i] + held[i]) * scale, (1 - gap) * column, held[i] * scale)
            for i in range(len(counts))
            if held[i]
        ]
        if rectangles:
            parts.append(boxes(rectangles, COLOURS[label % len(COLOURS)]))
    return parts
