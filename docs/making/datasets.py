"""A page for each dataset: what the code knows of it, and what stands in the tables of docs/data.md."""

from __future__ import annotations

import inspect
import re

from fedflat.cli.lookup.algorithm_card import parameter_rows
from fedflat.data import DATASETS, OWN
from fedflat.data.sources.source import Source
from making.markdown import block, code, joined, rows_of, table

LICENCES = {
    "digits": "CC BY 4.0 (UCI: Optical Recognition of Handwritten Digits), as part of scikit-learn",
    "digit_masks": "that of digits, of which they are made",
    "mnist": "CC BY-SA 3.0",
    "fashion_mnist": "MIT",
    "cifar10": "none stated; its author asks to be cited",
    "cifar100": "none stated; its author asks to be cited",
    "cifar10_c": "CC BY 4.0",
    "cifar100_c": "CC BY 4.0",
    "femnist": "made by LEAF (BSD-2-Clause) from NIST Special Database 19",
    "shakespeare": "made by LEAF (BSD-2-Clause) from the works of Shakespeare, which are in the public domain",
    "tiny_imagenet": "none stated; pictures of ImageNet, whose terms are for non-commercial research",
    "landmarks": "lists CC BY 4.0; every photograph has the licence of its author",
    "office_home": "for non-commercial research and teaching",
    "pacs": "none stated",
    "camvid": "none stated where it is fetched from",
    "cityscapes": "its own terms, for non-commercial use, accepted on registration",
    "idda": "its own terms, on request",
}
MODELS = {
    "digits": "mlp",
    "digit_masks": "'bisenetv2(width=0.25,auxiliary=false)'",
    "femnist": "femnist-cnn",
    "shakespeare": "char-lstm",
    "landmarks": "mobilenetv2",
    "camvid": "bisenetv2",
    "cityscapes": "bisenetv2",
    "idda": "bisenetv2",
    "mnist": "lenet5",
    "fashion_mnist": "lenet5",
}
NATURAL = ("femnist", "shakespeare", "landmarks", "office_home", "pacs", "cityscapes", "idda", "digit_masks")
BUILT_IN = ("digits", "digit_masks")
OWN_TEXTS = {
    "images": "images(path=pets,size=64)",
    "domains": "domains(path=pets,size=64)",
    "arrays": "arrays(path=mine.npz)",
    "hub": "hub(path=ylecun/mnist)",
}
PAGE = "data.md"


def pages() -> dict[str, str]:
    """A page for each published dataset, and one for each kind of own data."""
    facts = rows_of(PAGE, "## Available datasets")
    checked = rows_of(PAGE, "### Verification")
    made = {f"data/{name}.md": one(source, facts[name], _checked(name, checked)) for name, source in DATASETS.items()}
    return made | {f"data/{name}.md": own(name, source) for name, source in OWN.items()}


def one(source: Source, facts: list[str], checked: str) -> str:
    """The page of a published dataset."""
    name = source.name
    _, sizes, shape, classes, clients, publisher, get = facts
    lines = [f"# {name}", "", f"{_sentence(source.title)} {_about(source)}".strip(), ""]
    rows = [
        ("training / test examples", sizes),
        ("shape of an example", shape),
        ("classes", classes),
        ("natural clients", "none" if clients == "-" else clients),
        ("publisher", publisher),
        ("licence", f"{LICENCES[name]} (the publisher's word counts)"),
        ("how to get it", get.replace(", see below", f", see [datasets](../{PAGE})")),
        ("checked", checked),
    ]
    lines += table(("", ""), rows)
    lines += ["## Use it", "", *block(_commands(name), "bash")]
    lines += block(
        [
            "from fedflat.data import describe, load",
            "",
            f'data = load("{name}")',
            "describe(data)  # sizes, classes, statistics, content hash",
        ],
        "python" if name in BUILT_IN else "py",
    )
    lines += _options(source)
    if source.downloads:
        rows = [
            (f"<{d.url}>", code(d.md5), ", ".join(map(code, d.files[:3])) + (f" and {len(d.files) - 3} more" if len(d.files) > 3 else ""))
            for d in source.downloads
        ]
        lines += ["## Files", "", *table(("address", "md5", "in the data folder"), rows)]
    if source.instructions:
        lines += ["## By hand", "", _linked(_sentence(source.instructions)), ""]
    return joined(
        lines, [f"More, and every other dataset: [datasets](../{PAGE}). How it is spread over clients: [partitions](../partitions.md).", ""]
    )


def own(name: str, source: Source) -> str:
    """The page of a kind of files that a user brings."""
    lines = [
        f"# {name}",
        "",
        f"{_sentence(source.title)} {_about(source)}".strip(),
        "",
        f"Named like any dataset, `{OWN_TEXTS[name]}`:",
        "",
    ]
    lines += block(
        [
            f"fedflat data describe '{OWN_TEXTS[name]}'",
            f"fedflat run fedavg --dataset '{OWN_TEXTS[name]}' --model mlp --clients 10 --rounds 20",
        ],
        "bash",
    )
    return joined(
        lines,
        _options(source),
        [
            f"What the files must look like: [your own data](../{PAGE}#your-own-data); step by step: [bring your own](../how-to/bring-your-own.md).",
            "",
        ],
    )


def _commands(name: str) -> list[str]:
    get = [] if name in BUILT_IN else [f"fedflat data get {name}"]
    if name.endswith("_c"):
        return [*get, f"fedflat evaluate runs/fedavg-{name.removesuffix('_c')}-seed0 --on corruptions"]
    partition = "--partition natural --set data.clients=null" if name in NATURAL else "--partition 'dirichlet(alpha=0.1)' --clients 50"
    return [*get, f"fedflat data describe {name}", f"fedflat run fedavg --dataset {name} --model {MODELS.get(name, 'cnn')} {partition}"]


def _options(source: Source) -> list[str]:
    rows = [
        (code(row["parameter"]), code(row["default"]) or "needed", row["range"], row["meaning"])
        for row in parameter_rows(source.options, type(source.options)())
    ]
    return ["## Parameters", "", *table(("parameter", "default", "range", "meaning"), rows)] if rows else []


def _about(source: Source) -> str:
    return _sentence(" ".join((inspect.getdoc(type(source)) or "").replace("``", "`").split()))


def _sentence(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if not text or text.endswith(".") else ".")


def _linked(text: str) -> str:
    return re.sub(r"(https?://[^\s,)]+?)(?=[.,)]*(\s|$))", r"<\1>", text)


def _checked(name: str, rows: dict[str, list[str]]) -> str:
    return next((cells[1] for key, cells in rows.items() if re.search(rf"\b{name}\b", cells[0])), "nothing: it is built in")
