"""Small scale: the same structure, small everything, and a stand-in for data and models that are not at hand or too large."""

from __future__ import annotations

from pathlib import Path

from fedflat.data import DATASETS, canonical_split, data_folder
from fedflat.experiment.config import Config
from fedflat.text import parse

ROUNDS, STEPS, BATCH, CLIENTS, PER_ROUND, EXAMPLES = 4, 2, 8, 10, 3, 200
EMBEDDED, ITS_MODEL, ITS_SPLIT = "digits", "mlp(hidden=32)", "dirichlet(alpha=0.1)"
ITS_CLASSES = 10
SMALLER = {"vgg11": "resnet20", "resnet18": "resnet20", "mobilenetv2": "resnet20"}
"""What stands for models that would take minutes."""


def at_hand(data: str, folder: Path | None) -> bool:
    """Whether a data set's files are here."""
    source = DATASETS.get(parse(data)[0].name)
    return source is not None and not source.missing(data_folder(folder))


def small(config: Config, folder: Path | None = None) -> tuple[Config, tuple[str, ...]]:
    """A config at small scale, and what stands for what in it."""
    there = at_hand(config.data.name, folder)
    name = config.data.name if there else EMBEDDED
    model = SMALLER.get(parse(config.model)[0].name, config.model) if there else ITS_MODEL
    split = config.data.split if there else _split_of_digits(config.data.split)
    alone = canonical_split(split) == "centralised"
    clients = 1 if alone else config.data.clients if there else CLIENTS
    everyone = config.federation.per_round == config.data.clients
    per_round = 1 if alone else CLIENTS if everyone and not there else min(config.federation.per_round, PER_ROUND)
    data = config.data.model_copy(update={"name": name, "folder": folder, "split": split, "clients": clients})
    training = config.training.model_copy(update={"rounds": ROUNDS, "epochs": 1, "steps": STEPS, "batch": BATCH})
    made = config.model_copy(
        update={
            "model": model,
            "data": data,
            "federation": config.federation.model_copy(update={"per_round": per_round}),
            "training": training,
            "evaluation": config.evaluation.model_copy(update={"every": 1, "final": 0, "examples": EXAMPLES}),
            "engine": config.engine.model_copy(update={"workers": 1}),
        }
    )
    pairs = ((data.name, config.data.name), (model, config.model), (split, config.data.split))
    return made, tuple(f"{new} for {old}" for new, old in pairs if new != old)


def _split_of_digits(split: str) -> str:
    """The same split, where the embedded data can be divided by it; what it needs may be missing there."""
    first = parse(split)[0]
    if first.name in ("natural", "pachinko"):
        return ITS_SPLIT
    if first.name == "pathological" and int(str(first.values.get("classes", 2))) > ITS_CLASSES // 2:
        return f"pathological(classes={ITS_CLASSES // 2})"
    return split
