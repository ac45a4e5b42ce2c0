"""Adapters of ``peft``; skipped if it is not installed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import fedflat
from fedflat.cli.application import app
from fedflat.data import Dataset
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.experiment.make_config import prepare
from fedflat.experiment.run import Run
from tests.language.tiny import SMALL, VOCABULARY, labelled, language, texts

if find_spec("peft") is None:  # which needs transformers
    pytest.skip("peft is not installed", allow_module_level=True)
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 16, "max_position_embeddings": 16}
LORA = {"task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj", "v_proj"]}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", LORA),
    "dora": ("LoraConfig", LORA | {"use_dora": True}),
    "prompt": ("PromptTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}),
    "classes": ("LoraConfig", {"task_type": "SEQ_CLS", "r": 2}),
}
"""Class and arguments of each adapter."""
SETTINGS: dict[str, Any] = {**SMALL, "rounds": 2, "workers": 1, "device": "cpu"}


def base(name: str = "lora", layers: int = 2) -> Any:
    import transformers  # here, because it takes a second in every process that collects tests

    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": layers}
    if name == "classes":
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, **dropout, num_labels=3))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def adapter_config(name: str = "lora") -> Any:
    import peft  # here, because it takes seconds in every process that collects tests

    kind, arguments = CONFIGS[name]
    return getattr(peft, kind)(**arguments)


def adapted(name: str = "lora", model: Any = None) -> Any:
    from peft import get_peft_model

    return get_peft_model(model or base(name), adapter_config(name))


def loaded_adapter(model: Any, folder: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder)


def data_for(name: str) -> Dataset:
    return labelled() if name == "classes" else language()


def logits(model: Any, tokens: Tensor) -> Tensor:
    """The output of a model called as ``transformers`` does."""
    mask = (tokens >= 0).long()
    output: Tensor = model.eval()(input_ids=tokens.clamp(0), attention_mask=mask).logits
    return output


@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_are_trained_resumed_measured_and_exported(name: str, tmp_path: Path) -> None:
    user_objects = {"dataset": data_for(name), "model": adapted(name)}
    settings = SETTINGS | {"engine__precision": "float64", "local_steps": 4}
    started = fedflat.rounds("scaffold+sam+wima", **user_objects, **settings, out=tmp_path / "run")
    next(started)
    started.close()
    resumed = fedflat.resume(tmp_path / "run", **user_objects)
    config, objects = prepare("scaffold+sam+wima", None, *user_objects.values(), None, settings)
    lanes = Run(config, **objects)
    lanes.engine = LaneEngine(lanes.problem)
    lanes.execute()
    last = (result.history[-1]["test"]["wima"] for result in (resumed, lanes))
    assert next(last) == pytest.approx(next(last), rel=1e-9)
    trained = {key for key, parameter in adapted(name).named_parameters() if parameter.requires_grad}
    assert set(lanes.problem.layout.names) == trained and not lanes.problem.buffer_layout.names
    assert resumed.flatness().spectrum(1).lambda_max > 0

    resumed.export(tmp_path / "adapter", "wima", format="peft")
    assert len(list((tmp_path / "adapter").iterdir())) == 2  # the config and the weights
    loaded = loaded_adapter(base(name).double(), tmp_path / "adapter")
    tokens = texts(9, seed=1)[:, :-1]
    expected = logits(resumed.model("wima"), tokens)
    tolerance = 1e-7 if name == "prompt" else 0.0  # peft loads prompts in float32
    assert torch.allclose(logits(loaded, tokens), expected, rtol=0, atol=tolerance)
    assert not torch.allclose(logits(adapted(name).double(), tokens), expected)
    if name != "prompt":  # a prompt cannot be merged
        merged = resumed.model("wima", merge=True)
        assert type(merged) is type(base(name)) and torch.allclose(logits(merged, tokens), expected)


def test_worker_processes_train_adapters() -> None:
    one, two = (
        fedflat.run("fedavg", dataset=language(), model=adapted(), **SETTINGS | {"workers": workers, "rounds": 1})
        for workers in (1, 2)
    )
    assert one.history[-1]["test"] == two.history[-1]["test"]


def test_adapters_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in the format of peft is trained, exported, and trained further from the exported weights."""
    import transformers

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDFLAT_DATA", str(tmp_path / "data"))
    Path("words.txt").write_text("".join(f"{'to be or not '[n % 9 :]}\n" for n in range(40)))
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"vocab_size": 257}))
    llama.save_pretrained("base")
    adapter_config().save_pretrained("start")
    flags = ["--dataset", "text(path=words.txt,length=8)", "--model", "hf(base)", "--partition", "iid"]
    flags += [
        "--clients",
        "4",
        "--clients-per-round",
        "2",
        "--workers",
        "1",
        "--local-steps",
        "2",
        "--rounds",
        "1",
        "--lr",
        "0.5",
    ]

    def invoke(*arguments: str) -> str:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == 0, result.output
        return result.output

    invoke("run", "fedavg", *flags, "--train", "peft(path=start,only_b=true)", "--out", "first")
    assert fedflat.load("first").history[-1]["bytes_up"] == 2 * 4 * (4 * 16 * 2)  # four matrices B of two clients
    invoke("export", "first", "--format", "peft")
    adapter = tmp_path / "first" / "exported" / "model-adapter"
    invoke("run", "fedavg", *flags, "--train", f"peft({adapter})", "--out", "second")
    first, second = fedflat.load("first"), fedflat.load("second")
    assert second.history[0]["test"] == first.history[-1]["test"] != first.history[0]["test"]
    again = loaded_adapter(transformers.LlamaForCausalLM.from_pretrained("base"), adapter)
    tokens = texts(4)[:, :-1]
    assert torch.equal(logits(again, tokens), logits(first.model(), tokens))


def folder(path: Path, **changes: Any) -> Path:
    """An adapter saved for a model of three layers, with changes of its config."""
    other = adapted(model=base(layers=changes.pop("layers", 3)))
    other.save_pretrained(path)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "was saved for another model: the model lacks .*layers.2.*; use its base model"),
        ({"layers": 1}, "was saved for another model: it lacks .*layers.1"),
        ({"r": 4}, "does not fit the model: .*size mismatch"),
        ({"target_modules": ["absent"]}, "does not fit the model: Target modules .*absent.* not found"),
        ({"peft_type": "NONE"}, "does not fit the model"),
    ],
)
def test_unsuitable_adapters_are_rejected(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    train = f"peft({folder(tmp_path / 'saved', **changes)})"
    with pytest.raises(fedflat.UserError, match=message):
        fedflat.run("fedavg", dataset=language(), model=base(), train=train, **SETTINGS)


def test_other_mistakes_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter_config("prompt").save_pretrained(tmp_path)
    for train, model, message in (
        (f"peft({tmp_path / 'absent'})", base(), "absent has no adapter_config.json; write it with LoraConfig"),
        ("peft", base(), r"needs a folder with adapter_config.json; write peft\(path=DIR\)"),
        (f"peft(path={tmp_path},only_b=true)", base(), "has no matrices A; remove only_b"),
        ("all", adapted().requires_grad_(False), "all parameters of custom:PeftModelForCausalLM are frozen"),
    ):
        with pytest.raises(fedflat.UserError, match=message):
            fedflat.run("fedavg", dataset=language(), model=model, train=train, **SETTINGS)
    model = adapted()
    model.base_model.model.model.norm.requires_grad_(True)
    result = fedflat.run("fedavg", dataset=language(), model=model, **SETTINGS | {"rounds": 1})
    with pytest.raises(fedflat.UserError, match=r"model.norm.weight was trained but is not part of the adapter"):
        result.export(tmp_path / "adapter", format="peft")
