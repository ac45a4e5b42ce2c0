"""Models and tokenisers of ``transformers``; skipped if it is not installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fedflat
from fedflat.cli.application import app
from fedflat.data import from_texts
from tests.language.tiny import SMALL

if find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)
WORDS = ["[PAD]", "[END]", "good", "fine", "great", "bad", "poor", "awful", "film", "plot"]
REVIEWS = [
    {"text": f"{WORDS[2 + n % 6]} {WORDS[8 + n % 2]}" + " film" * (n % 3), "label": int(n % 6 > 2)} for n in range(40)
]


@pytest.fixture
def tokeniser() -> Any:
    """A tokeniser of ten words."""
    import transformers  # here, because it takes a second in every process that collects tests
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="film"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "eos_token": "[END]", "unk_token": "film"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


def bert(**options: Any) -> Any:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=10, max_position_embeddings=16, **sizes, **options)
    return transformers.BertForSequenceClassification(config)


def gpt2() -> Any:
    import transformers

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=10, bos_token_id=1, eos_token_id=1, **sizes))


def llama() -> Any:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=10, max_position_embeddings=16, **sizes))


@pytest.mark.parametrize("make", [bert, gpt2, llama])
def test_models_are_trained_resumed_measured_and_saved(make: Callable[[], Any], tokeniser: Any, tmp_path: Path) -> None:
    target = "label" if make is bert else None
    data = from_texts(REVIEWS, REVIEWS[:9], target=target, tokeniser=tokeniser, length=12, pack=False)
    user_objects = {"dataset": data, "model": make()}
    settings = {**SMALL, "rounds": 2, "engine__precision": "float64"}
    one = fedflat.run("scaffold+sam+wima", **user_objects, **settings, workers=1)
    started = fedflat.rounds("scaffold+sam+wima", **user_objects, **settings, workers=2, out=tmp_path / "run")
    next(started)
    started.close()
    resumed = fedflat.resume(tmp_path / "run", **user_objects)
    assert resumed.history[-1]["test"] == one.history[-1]["test"]
    model = resumed.model("wima")
    inputs, labels = data.test.inputs, data.test.targets
    if make is not bert:  # transformers shifts the labels itself
        inputs = labels = torch.cat([inputs, labels[:, -1:]], 1)
    batch = {"input_ids": inputs.clamp(0), "attention_mask": (inputs >= 0).long()}
    loss = model(**batch, labels=labels).loss.item()
    assert loss == pytest.approx(resumed.history[-1]["test"]["wima"]["loss"], rel=1e-6)
    objective = resumed.flatness().objective()
    first, second = torch.randn(2, objective.size, dtype=torch.float64)
    products = objective.hessian_products(None, torch.stack([first, second]))
    assert products[0] @ second == pytest.approx(products[1] @ first)  # the Hessian is symmetric
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved", dtype=torch.float64).eval()
    assert torch.allclose(again(**batch).logits, model(inputs))


def test_folders_in_hugging_face_layout_are_trained_from_the_command_line(
    tokeniser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDFLAT_DATA", str(tmp_path / "data"))
    Path("reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in REVIEWS), encoding="utf-8")
    bert(num_labels=5).save_pretrained("bert")
    tokeniser.save_pretrained("bert")
    tokeniser.backend_tokenizer.save("words.json")
    gpt2().config.save_pretrained("gpt2")
    (tmp_path / "gpt2" / "config.json").write_text(
        json.dumps(json.loads((tmp_path / "gpt2" / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]})
    )
    flags = ["--clients", "4", "--clients-per-round", "2", "--partition", "iid", "--workers", "1"]
    flags += ["--local-steps", "1", "--rounds", "1"]
    for dataset, model, metric in (
        ("text(path=reviews.jsonl,target=label,tokeniser=bert,length=16)", "hf(bert)", "f1"),
        ("text(path=reviews.jsonl,target=label,tokeniser=bert,length=12)", "hf(path=gpt2,head=classes)", "f1"),
        ("text(path=reviews.jsonl,tokeniser=words.json,length=12)", "hf(gpt2)", "perplexity"),
    ):
        command = ["run", "fedavg", "--dataset", dataset, "--model", model, "--task", metric, *flags]
        result = CliRunner().invoke(app, [*command, "--out", metric + model[:9]])
        assert result.exit_code == 0, result.output
        evaluated = fedflat.load(metric + model[:9]).history[-1]["test"]["server"]
        assert metric in evaluated
    monkeypatch.chdir("bert")  # a run can be evaluated from any folder
    kept = fedflat.load("../f1hf(bert)")
    assert kept.evaluate(on="test")["test"]["loss"] == kept.history[-1]["test"]["server"]["loss"]
    assert kept.state_dict()["classifier.weight"].shape[0] == 2  # a new head, on the folder's weights


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("hf", "hf needs a folder"),
        ("hf(absent)", "absent has no config.json; expected a folder written by save_pretrained"),
        ("hf(broken)", "cannot build the model .*broken"),
        ("hf(headless)", "has the architecture BertModel, which does not tell what to predict; choose head=classes"),
    ],
)
def test_unusable_folders_are_rejected(model: str, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name, config in (("broken", {"model_type": "none"}), ("headless", {"model_type": "bert"})):
        Path(name).mkdir()
        (Path(name) / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    with pytest.raises(fedflat.UserError, match=message):
        fedflat.run("fedavg", dataset=from_texts([row["text"] for row in REVIEWS]), model=model, rounds=1, **SMALL)
