"""A page and a drawing for each partitioner and partition modifier, generated from the registry."""

from __future__ import annotations

import numpy as np

from fedflat.data import PARTITION_MODIFIERS, PARTITIONERS, make_partition
from fedflat.data.partitioners.partitioner import Partitioner, PartitionModifier
from fedflat.reporting.figures.partition import COLOURS
from making.markdown import about, block, joined, table
from making.specs import parameter_table
from making.svg import FAINT, INK, boxes, drawing, rule, words

CLIENTS, EXAMPLES, CLASSES = 50, 5000, 10
WIDTH, PANEL, TOP, LEFT = 720, 132, 30, 46
PAGE = "partitions.md"
DATASETS = {"natural": ("femnist", "femnist-cnn"), "pachinko": ("cifar100", "resnet18")}
"""Dataset and model of the example command, for partitions that digits does not support."""


def pages() -> dict[str, str]:
    """The page and the drawing of every partitioner and modifier, by path."""
    files: dict[str, str] = {}
    for name, spec in [*PARTITIONERS.items(), *PARTITION_MODIFIERS.items()]:
        files[f"partitions/{name}.md"] = page(name, spec)
        if spec.examples:
            files[f"images/partitions/{name}.svg"] = picture(spec.examples)
    return files


def page(name: str, spec: type[Partitioner] | type[PartitionModifier]) -> str:
    """The page of a partitioner or modifier."""
    facts = {"source": spec.citation}
    if issubclass(spec, Partitioner):
        facts = {"disjoint clients": "yes" if spec.disjoint else "no", "client sizes": spec.sizes} | facts
    lines = [f"# {name}", "", about(spec), ""]
    lines += table(("", ""), [fact for fact in facts.items() if fact[1]])
    lines += parameter_table(spec())
    if spec.examples:
        image = f"![Class counts per client under {name}](../images/partitions/{name}.svg)"
        lines += ["## Example", "", image, "", _caption(name), ""]
    lines += ["## Usage", "", *block(_commands(name, spec), "bash")]
    return joined(lines, [f"See also: [all partitions](../{PAGE}), with statistics of their clients.", ""])


def _caption(name: str) -> str:
    if name == "natural":
        return (
            "The figure shows six artificial writers with different numbers of examples and favourite classes; "
            "`femnist` has real writers."
        )
    return (
        f"The figure shows how {EXAMPLES:,} examples of {CLASSES} equally frequent classes are distributed with seed 0. "
        "Each column is a client and each colour a class; clients are sorted by their most frequent class."
    )


def _commands(name: str, spec: type[Partitioner] | type[PartitionModifier]) -> list[str]:
    if name == "listed":
        return ["fedflat run fedavg --partition 'listed(path=partition.json)' --rounds 20"]
    text = spec.examples[-1] if spec.examples else name
    quoted = f"'{text}'" if set(text) & set("()+") else text
    fixed = issubclass(spec, Partitioner) and spec().fixes_clients
    clients = "" if fixed else f" --clients {CLIENTS}"
    if name in DATASETS:
        dataset, model = DATASETS[name]
        return [f"fedflat run fedavg --dataset {dataset} --model {model} --partition {quoted}{clients}"]
    if name == "centralised":
        return ["fedflat run fedavg --partition centralised --clients-per-round 1 --rounds 20"]
    return [
        f"fedflat data describe digits --partition {quoted}{clients}",
        f"fedflat run fedavg --partition {quoted}{clients} --rounds 20",
    ]


def picture(texts: tuple[str, ...]) -> str:
    """An SVG of the class counts per client of some partitions, one below the other."""
    parts: list[str] = []
    for number, text in enumerate(texts):
        counts = histogram(text)
        parts += _panel(text, counts, number * (PANEL + TOP + 14))
    return drawing(WIDTH, len(texts) * (PANEL + TOP + 14) + 6, parts, ", ".join(texts))


def histogram(text: str) -> np.ndarray:
    """Number of examples per client and class, [clients, classes]."""
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
    count = "1 client" if len(counts) == 1 else f"{len(counts)} clients"
    caption = f"{count}, {size} examples each, {np.count_nonzero(counts, axis=1).mean():.1f} classes per client"
    bottom, scale, column = top + TOP + PANEL, PANEL / sizes.max(), (WIDTH - LEFT - 14) / len(counts)
    parts = [
        words(LEFT, top + 20, text, size=13, colour=INK, bold=True),
        words(WIDTH - 14, top + 20, caption, size=11, anchor="end"),
    ]
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
            counts.max(1)
            + np.where(np.arange(counts.shape[1]) < label, counts, 0).sum(1)
            - np.where(first < label, counts.max(1), 0),
        )
        rectangles = [
            (LEFT + (i + gap / 2) * column, bottom - (below[i] + held[i]) * scale, (1 - gap) * column, held[i] * scale)
            for i in range(len(counts))
            if held[i]
        ]
        if rectangles:
            parts.append(boxes(rectangles, COLOURS[label % len(COLOURS)]))
    return parts
