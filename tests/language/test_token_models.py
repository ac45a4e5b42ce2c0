"""Models that take keyword arguments and return objects, in runs, engines and measurements."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedflat
from fedflat.data import Dataset, Examples
from fedflat.engines.cpu.engine import _close_pool
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.problem.token_model import adapt
from fedflat.experiment.make_config import prepare
from fedflat.experiment.run import Run
from fedflat.flatness import Operator
from tests.language.tiny import LENGTH, SMALL, VOCABULARY, WIDTH, Tiny, labelled, language, texts


def test_padding_is_neither_attended_to_nor_counted() -> None:
    model = Tiny(classes=3).eval()
    tokens = texts(5)[:, :-1]
    by_keyword = [model(input_ids=row[row >= 0][None]).logits[0] for row in tokens]
    names = list(model.state_dict())
    for _ in range(2):  # a model that comes from a run is adapted again in the next
        adapt(model)
    assert torch.allclose(model(tokens), torch.stack(by_keyword))
    assert torch.equal(model(input_ids=tokens.clamp(0)).logits, model(tokens.clamp(0)))
    assert list(model.state_dict()) == names


ON_A_GPU = pytest.param("gpu", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"))


@pytest.mark.parametrize("engine", ["processes", "lanes", ON_A_GPU])
def test_engines_agree_on_models_that_take_keywords(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of compiled steps on text is in tests/engines/test_task.py."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # where worker processes find the model
    _close_pool()  # workers that other tests have started do not know the path
    data, model = (labelled(), Tiny(classes=3, dropout=0)) if engine == "processes" else (language(), Tiny(dropout=0))
    weights = []
    for own in (False, True):
        settings = {**SMALL, "rounds": 2, "workers": 2 if own and engine == "processes" else 1}
        settings |= {"engine__precision": "float64", "device": "cuda" if own and engine == "gpu" else "cpu"}
        config, user_objects = prepare("scaffold+sam+wima", None, data, model, None, settings)
        run = Run(config, **user_objects)
        if own and engine == "lanes":
            run.engine = LaneEngine(run.problem)
        assert not run.problem.buffer_layout.names  # constants are neither averaged nor sent
        run.execute()
        weights.append(run.server.model.weights.cpu())
    assert (weights[0] - weights[1]).abs().max() < 1e-12


def test_a_language_model_is_trained_resumed_and_saved(tmp_path: Path) -> None:
    """Dropout, tied weights and buffers are as in any other module."""
    settings = {**SMALL, "rounds": 4, "workers": 1, "task": "perplexity", "local_steps": 8, "lr": 0.5}
    settings["device"] = "cpu"  # on a GPU, a resumed run draws other dropout masks
    user_objects = {"dataset": language(), "model": Tiny()}
    whole = fedflat.run("fedsam+wima", **user_objects, **settings)
    started = fedflat.rounds("fedsam+wima", **user_objects, **settings, out=tmp_path / "run")
    next(started)
    started.close()
    resumed = fedflat.resume(tmp_path / "run", **user_objects)
    assert whole.history[-1]["test"] == resumed.history[-1]["test"] and resumed.lower_is_better
    first, last = (result["test"]["server"] for result in (resumed.history[0], resumed.history[-1]))
    assert last["perplexity"] < 0.7 * first["perplexity"]
    model = resumed.model()
    assert isinstance(model, Tiny) and model.head.weight is model.embedding.weight
    rows, original = texts(9, seed=1), Tiny()
    original.load_state_dict(resumed.state_dict())
    logits = original.eval()(input_ids=rows[:, :-1].clamp(0), attention_mask=(rows[:, :-1] >= 0).long()).logits
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()  # which ignores -100, too
    assert last["loss"] == pytest.approx(loss, rel=1e-5)


def test_flatness_weights_tokens_equally() -> None:
    result = fedflat.run("fedavg", dataset=language(), model=Tiny(), rounds=1, workers=1, device="cpu", **SMALL)
    model = result.flatness(precision="float64")
    whole, parts = model.objective(batch_size=24), model.objective(batch_size=5)
    assert float(whole.loss()) == pytest.approx(float(parts.loss()), rel=1e-12)
    vector = torch.randn(whole.size, dtype=torch.float64)
    for matrix in ("hessian", "gauss-newton", "empirical-fisher"):
        products = [Operator.of_objective(each, matrix)(vector[None]) for each in (whole, parts)]
        torch.testing.assert_close(*products, msg=matrix)
    assert model.spectrum(1).lambda_max > 0


def test_classes_of_texts_that_are_scored_by_exact_match() -> None:
    settings = {**SMALL, "rounds": 1, "workers": 1, "device": "cpu", "task": "exact_match"}
    result = fedflat.run("fedavg", dataset=language(), model=Tiny(), **settings)
    found = result.evaluate()["classes"]["each"]
    assert all(scores["exact_match"] == scores["accuracy"] for scores in found.values()), "of single tokens"


class Headless(Tiny):
    """Returns hidden states only."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        return {"last_hidden_state": self.embedding(input_ids)}


def changed(data: Dataset, inputs: int | None = None, targets: int | None = None) -> Dataset:
    """A copy of a dataset whose last training example has another first token or target."""
    examples = data.train.take(torch.arange(len(data.train)))
    for tensor, value in ((examples.inputs, inputs), (examples.targets, targets)):
        if value is not None:
            tensor[-1, 0] = value
    return Dataset(data.name, examples, data.test, data.classes, kind="text")


def without_targets() -> Dataset:
    ignored = Examples(texts(8), torch.full_like(texts(8), -100))
    return Dataset("ignored", ignored, ignored, ("a",), kind="text")


def too_long() -> Dataset:
    examples = Examples(torch.zeros(8, LENGTH + 1, dtype=torch.int64), torch.zeros(8, dtype=torch.int64))
    return Dataset("long", examples, examples, ("a", "b"), kind="text")


def configured(model: Tiny, **config: Any) -> Tiny:
    """The model with other values in its config."""
    vars(model.config).update(config)
    return model


class Roberta(Tiny):
    """As in RoBERTa, the first positions are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.position_embeddings = nn.Embedding(LENGTH, WIDTH, padding_idx=1)


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        (lambda: changed(language(), inputs=VOCABULARY), Tiny(), "language contains the token 12, .* 0 to 11; use the"),
        (lambda: changed(language(), inputs=-1), Tiny(), "language contains the token -1"),
        (lambda: changed(language(), targets=-1), Tiny(), "training set of language has label -1; .*-100 to ignore"),
        (without_targets, Tiny(), "all targets of the training set of ignored are -100"),
        (too_long, Tiny(classes=2), "texts of long have 7 tokens, but custom:Tiny accepts at most 6; truncate"),
        (language, Roberta(), "Roberta accepts at most 4; .*length=4"),
        (language, configured(Tiny(), is_encoder_decoder=True), "Tiny is an encoder-decoder model"),
        (labelled, Tiny(), r"labelled requires 3 numbers, one per class: use a model with a classifier"),
        (labelled, Tiny(classes=2), r"returns an output of shape \(2,\) per example, but labelled requires 3"),
        (language, Headless(), "Headless returns no logits; use a model with a head, such as AutoModelFor"),
        (language, Tiny(classes=3), r"output of shape \(3,\) per example, but language requires 12"),
    ],
)
def test_unsuitable_texts_are_rejected_before_training(data: Any, model: nn.Module, message: str) -> None:
    with warnings.catch_warnings(), pytest.raises(fedflat.UserError, match=message):
        fedflat.run("fedavg", dataset=data(), model=model, rounds=1, workers=1, **SMALL)


def test_padding_by_tokens_is_reported() -> None:
    settings: dict[str, Any] = {**SMALL, "rounds": 1, "workers": 1}
    model = configured(Tiny(classes=3), pad_token_id=0)
    padded = labelled()
    for examples in (padded.train, padded.test):
        examples.inputs.clamp_(min=0)
    with pytest.warns(UserWarning, match="of labelled begin or end with token 0, .*; replace padding with -100"):
        fedflat.run("fedavg", dataset=padded, model=model, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedflat.run("fedavg", dataset=labelled(), model=model, **settings)


@pytest.mark.parametrize(("task", "data"), [("perplexity", labelled), ("exact_match", labelled), ("f1", language)])
def test_tasks_need_suitable_targets(task: str, data: Any) -> None:
    with pytest.raises(fedflat.UserError, match=f"the task {task} needs .*, which {data.__name__} does not have"):
        fedflat.run("fedavg", dataset=data(), task=task, model=Tiny(), rounds=1, **SMALL)
