"""Datasets of texts: files, tokens, packing, natural clients, the cache, and errors."""

from __future__ import annotations

import datetime
import importlib.util
import json
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from fedflat.data import MappedTensor, from_texts, load, make_partition
from fedflat.data.files.tokeniser import ByteTokeniser
from fedflat.errors import UserError

END = ByteTokeniser.END
ROWS = [{"text": word * (1 + n), "label": word, "topic": n % 2} for n in range(5) for word in ("ab", "xyz")]


def decoded(tokens: torch.Tensor) -> str:
    return "".join("." if token == END else chr(token) for token in tokens.tolist() if token >= 0)


def write(file: Path, rows: Iterable[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_packed_rows_predict_every_token_of_a_client_once() -> None:
    rows = [{"text": text, "author": author} for text, author in (("abcde", "x"), ("123", "y"), ("fg", "x"))]
    data = from_texts(rows, rows, group="author", length=3)
    assert data.kind == "text" and data.num_classes == 257 and data.group_names == ("x", "y")
    assert [decoded(row) for row in data.train.inputs] == ["abc", "123", "de.", "fg."]
    assert [decoded(row) for row in data.train.targets] == ["bcd", "23.", "e.f", "g."]
    assert data.train.groups is not None and data.train.groups.tolist() == [0, 1, 0, 0]
    assert data.train.targets[3].tolist() == [ord("g"), END, -100]
    alone = from_texts(rows, rows, length=100, pack=False)
    assert [decoded(row) for row in alone.train.inputs] == ["abcde", "123.", "fg."]  # as long as the longest text
    assert [decoded(row) for row in from_texts(["ab"], ["ab"], length=1).train.targets] == ["b", "."]


def test_groups_may_be_anything_with_a_text() -> None:
    rows = [{"text": "abc", "day": datetime.date(2020, 1, number)} for number in (1, 2)]
    assert from_texts(rows, rows, group="day", length=3).group_names == ("2020-01-01", "2020-01-02")


def test_classes_may_be_the_clients() -> None:
    data = from_texts(ROWS, target="label", group="label", length=4)
    assert data.group_names == data.classes
    assert data.train.groups is not None
    assert torch.equal(data.train.groups, data.train.targets)


def test_texts_have_classes_and_every_fifth_text_of_a_class_is_a_test_text() -> None:
    data = from_texts(iter(ROWS), target="label", group="topic", length=4)
    assert data.classes == ("ab", "xyz") and data.input_shape == (4,)
    assert len(data.train) == 8 and [decoded(row) for row in data.test.inputs] == ["abab", "xyzx"]
    assert data.train.targets.tolist() == [0, 1] * 4 and data.train.inputs[0].tolist() == [*b"ab", END, -100]
    numbered = [{**row, "label": str(len(row["label"]) + 7)} for row in ROWS]  # 10 comes after 9, unlike for words
    assert from_texts(numbered, target="label").train.targets.tolist() == [9, 10] * 4


def test_files_are_tokenised_once_and_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "reviews.jsonl", ROWS)
    text = f"text(path={file},target=label,group=topic,length=6)"
    data = load(text, tmp_path / "data")
    assert isinstance(data.train.inputs, MappedTensor) and data.classes == ("ab", "xyz")
    natural = make_partition("natural", data.train.targets, 2, None, 0, groups=data.train.groups)
    assert [len(client) for client in natural.clients] == [4, 4]
    monkeypatch.setattr(ByteTokeniser, "sequences", None)  # tokenising again would fail
    assert load(text, tmp_path / "data").content == data.content
    monkeypatch.undo()
    write(file, ROWS[:6] * 3)
    assert len(load(text, tmp_path / "data").train) > 8
    (tmp_path / "split").mkdir()
    (tmp_path / "split" / "train.csv").write_text('text,label\n"a, b",1\n"c\nd",0\n', encoding="utf-8")
    (tmp_path / "split" / "test.csv").write_text("text,label\nq,1\n", encoding="utf-8-sig")  # as Excel writes it
    table = load(f"text(path={tmp_path / 'split'},target=label)", tmp_path / "data")
    assert [decoded(row) for row in table.train.inputs] == ["a, b.", "c\nd."] and table.test.targets.tolist() == [1]
    (tmp_path / "book.txt").write_text("to be\n\nor not\n" * 5, encoding="utf-8")
    (tmp_path / "BOOK.TXT").write_text((tmp_path / "book.txt").read_text())
    book = load(str(tmp_path / "BOOK.TXT"), tmp_path / "data")
    assert isinstance(book.train.targets, MappedTensor) and decoded(book.train.inputs[0]).startswith("to be.or not.to")
    (tmp_path / "novels.csv").write_text("text\n" + ("a" * 140_000 + "\n") * 5, encoding="utf-8")
    novels = load(f"text(path={tmp_path / 'novels.csv'},length=1000)", tmp_path / "data")
    assert (len(novels.train), len(novels.test)) == (561, 140)


def test_hugging_face_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    rows = {"text": ["no", "yes", "fine"], "label": [0, 1, 1]}
    split = datasets.Dataset.from_dict(rows, features=features)
    both = datasets.DatasetDict({"train": split, "test": split})
    both.save_to_disk(tmp_path / "hf")
    hub = {("reviews",): both, ("many", "short"): both}  # datasets on the Hub
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: hub[names])
    for text in ("hub=reviews", "hub=many,subset=short"):
        assert load(f"text({text},target=label)", tmp_path / "data").classes == ("bad", "good")
    with pytest.raises(UserError, match=r"cannot load absent .*load_dataset\('absent'\).save_to_disk\('DIR'\)"):
        load("text(hub=absent)", tmp_path / "data")
    data = load(f"text(path={tmp_path / 'hf'},target=label)", tmp_path / "data")
    assert data.classes == ("bad", "good") and data.test.targets.tolist() == [0, 1, 1]
    assert [decoded(row) for row in from_texts(split, split, pack=False).train.inputs] == ["no.", "yes.", "fine"]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            ROWS,
            "target=lable",
            r"row 0 of the training set of text.* has no column 'lable'; .*target= \(columns: text,",
        ),
        ([{"text": 5}], "", "column 'text' of row 0 .* is a int; expected a text"),
        ([{"text": ""}], "", "the text of row 0 .* is empty; remove"),
        ([*ROWS, {"text": "a", "label": None}], "target=label", "the target of row 10 .* is missing"),
        ([*ROWS, {"text": "a", "label": ["b"]}], "target=label", "'label' of row 10 .* is a list; expected a word"),
        ([*ROWS, {"text": "a", "label": 0.5}], "target=label", "'label' of the training set .* contains fractions"),
        ([["a"]], "", "line 1 of .* is a list; expected a JSON object"),
        (ROWS[:3], "", "the test set of text.* is empty; .*every fifth"),
        (ROWS, "tokeniser=5", "tokeniser=5 is invalid"),
        (ROWS, "length=0", "length=0 is out of range"),
    ],
)
def test_invalid_texts_are_rejected(rows: list[Any], options: str, message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "texts.jsonl", rows)
    with pytest.raises(UserError, match=message):
        load(f"text(path={file},{options})" if options else str(file), tmp_path / "data")


@pytest.mark.parametrize("kind", [str, dict, "DataFrame"])
def test_collections_of_other_things_than_texts_are_rejected(kind: Any) -> None:
    columns = {"text": ["ab", "xyz"], "label": [0, 1]}
    train = pytest.importorskip("pandas").DataFrame(columns) if kind == "DataFrame" else kind(columns)
    with pytest.raises(UserError, match=rf"train is a {type(train).__name__}; expected a list of texts"):
        from_texts(train)
    with pytest.raises(UserError, match="test is a"):
        from_texts(ROWS, train)


def test_other_errors_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text"\n', encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes("\xe9t\xe9".encode("latin-1"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for text, message in (
        ("broken.jsonl", "line 2 of .*broken.jsonl is not valid JSON"),
        ("latin.txt", "latin.txt cannot be read .*UTF-8"),
        ("absent.jsonl", "absent.jsonl does not exist"),
        ("text(path=.)", "has no texts; expected a .jsonl, .txt, .csv file"),
        ("text", "text needs a path"),
        ("text(hub=imdb)", r"requires datasets; .*fedflat\[hub\]"),
        ("text(path=broken.jsonl,tokeniser=gpt2)", r"the tokeniser gpt2 requires transformers; .*fedflat\[text\]"),
    ):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UserError, match=message):
            load(text, tmp_path / "data")
    with pytest.raises(UserError, match="the tokeniser is a int; expected a tokeniser of transformers, or bytes"):
        from_texts(["a"], ["a"], tokeniser=5)
    with pytest.raises(UserError, match="length=0 is out of range"):
        from_texts(["a"], ["a"], length=0)
    for row, message in ((5, "expected a text"), ("a", ""), ("a", "tokens exists; name a new one")):
        with pytest.raises(UserError, match=message) if message else nullcontext():
            from_texts([row], ["a"], folder=tmp_path / "new" / "tokens")  # a failed call leaves no folder behind
