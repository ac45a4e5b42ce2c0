"""Initial weights, and models that do not fit: a clear error, and nothing is written."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedflat
from fedflat.experiment.make_config import make_config
from fedflat.experiment.run import Run
from fedflat.experiment.setup.problem import build_problem
from fedflat.experiment.setup.weights import first_mismatch, load_tensors, load_weights

SMALL = {"rounds": 2, "local_steps": 2, "workers": 1, "device": "cpu", "partition": "iid"}


def test_a_run_starts_where_another_ended(tmp_path):
    first = fedflat.run("fedavg", out=tmp_path / "first", **SMALL)
    second = fedflat.run(
        "fedavg", init=tmp_path / "first" / "model.safetensors", out=tmp_path / "second", **(SMALL | {"seed": 7})
    )
    assert fedflat.load(tmp_path / "second").config.init == tmp_path / "first" / "model.safetensors"
    assert second.history[0]["test"]["server"] == first.history[-1]["test"]["server"], (
        "the test set is the same for every seed"
    )


def test_a_state_dict_saved_by_torch(tmp_path):
    """A state dictionary that fedflat did not write, with BatchNorm's statistics and its counter."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))
    model(torch.randn(32, 64))
    save_file(model.state_dict(), tmp_path / "torch.safetensors")
    fresh = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))
    run = Run(
        make_config(None, SMALL | {"init": str(tmp_path / "torch.safetensors"), "model": "custom:Sequential"}),
        model=fresh,
    )
    for name, tensor in run.problem.buffer_layout.views(run.server.model.buffers).items():
        assert torch.equal(tensor, model.state_dict()[name])
    assert run.server.model.integer_buffers["2.num_batches_tracked"] == 1
    assert torch.equal(run.problem.layout.views(run.server.model.weights)["1.weight"], model[1].weight)
    assert not torch.equal(fresh[1].weight, model[1].weight), "the user's own module is not touched"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: tensors | {"1.weight": torch.zeros(3, 64)}, r"1\.weight .*3x64.*64x64"),
        (lambda tensors: {k: v for k, v in tensors.items() if k != "3.bias"}, r"lacks tensor 3\.bias"),
        (lambda tensors: tensors | {"9.weight": torch.zeros(1)}, r"unexpected tensor 9\.weight"),
        (
            lambda tensors: tensors | {"3.bias": torch.full((10,), torch.nan)},
            r"NaN values in 3\.bias",
        ),
        (lambda tensors: {}, r"lacks tensors 1\.weight, 1\.bias, 3\.weight and 3\.bias;"),
    ],
)
def test_weights_of_another_architecture(tmp_path, change, sentence):
    model = fedflat.models.build("mlp", (1, 8, 8), 10)
    save_file(change(dict(model.state_dict())), tmp_path / "w.safetensors")
    with pytest.raises(fedflat.UserError, match=sentence):
        fedflat.run("fedavg", init=tmp_path / "w.safetensors", out=tmp_path / "run", **SMALL)
    assert not (tmp_path / "run").exists()


def test_the_error_names_the_file_and_both_models(tmp_path):
    fedflat.run("fedavg", out=tmp_path / "first", **SMALL)
    saved = tmp_path / "first" / "model.safetensors"
    with pytest.raises(fedflat.UserError, match=rf"{saved} .* \(mlp\): 1\.weight .*64x64.*3x64.* mlp\(hidden=3\)"):
        fedflat.run("fedavg", init=saved, model="mlp(hidden=3)", **SMALL)


def test_files_without_weights_are_rejected(tmp_path):
    (tmp_path / "broken").write_bytes(b"nonsense")
    for path, sentence in (
        (tmp_path, "is a folder"),
        (tmp_path / "broken", "damaged or not a safetensors file"),
        (tmp_path / "no", "does not exist"),
    ):
        with pytest.raises(fedflat.UserError, match=sentence):
            load_weights(nn.Linear(1, 1), "mine", path)


def test_fresh_head_includes_auxiliary_heads():
    other, network = (fedflat.models.build("bisenetv2(width=0.1)", (3, 32, 32), classes) for classes in (5, 3))
    with pytest.raises(fedflat.UserError, match="init_head=fresh"):
        load_tensors(network, "bisenetv2", other.state_dict(), "a file", fresh_head=False)
    before = network.auxiliary[3][1].weight.clone()
    load_tensors(network, "bisenetv2", other.state_dict(), "a file", fresh_head=True)
    assert torch.equal(network.auxiliary[3][1].weight, before)
    assert torch.equal(network.auxiliary[3][0][0].weight, other.auxiliary[3][0][0].weight)


def test_a_pooler_of_the_model_is_loaded_with_a_fresh_head():
    def network() -> nn.Module:
        return nn.Sequential(OrderedDict(pooler=nn.Linear(2, 2), head=nn.Linear(2, 3)))

    filled, other = network(), network()
    load_tensors(
        filled, "mine", {**other.state_dict(), "pre_logits.fc.weight": torch.zeros(2)}, "a file", fresh_head=True
    )
    assert torch.equal(filled.pooler.weight, other.pooler.weight) and not torch.equal(
        filled.head.weight, other.head.weight
    )


def test_unnamed_tensors_are_not_a_state_dict(tmp_path):
    torch.save({0: torch.zeros(2)}, tmp_path / "numbers.pt")
    with pytest.raises(fedflat.UserError, match="a dictionary with key 0; expected a state_dict"):
        load_weights(nn.Linear(1, 1), "mine", tmp_path / "numbers.pt")
    (tmp_path / "empty.pt").touch()
    with pytest.raises(fedflat.UserError, match="damaged or not a torch file"):
        load_weights(nn.Linear(1, 1), "mine", tmp_path / "empty.pt")
    torch.jit.trace(nn.Linear(1, 1), torch.zeros(1, 1)).save(tmp_path / "script.pt")
    with pytest.raises(fedflat.UserError, match=r"TorchScript.*state_dict"):
        load_weights(nn.Linear(1, 1), "mine", tmp_path / "script.pt")


def test_frozen_and_tied_parameters_may_be_missing():
    frozen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    frozen[0].requires_grad_(False)
    tensors = {name: torch.ones_like(value) for name, value in frozen[1].named_parameters(prefix="1")}
    assert first_mismatch(frozen, tensors) == ""
    before = frozen[0].weight.clone()
    load_tensors(frozen, "frozen", tensors, "a file")
    assert torch.equal(frozen[0].weight, before) and bool((frozen[1].weight == 1).all())
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    once = dict(tied.named_parameters())
    assert first_mismatch(tied, once) == "" and first_mismatch(tied, {**once, "0.weight": torch.zeros(3)}) != ""


def test_short_memory_does_not_count_as_a_wrong_model():
    class Large(nn.Linear):
        def forward(self, input):
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        build_problem(make_config(None, SMALL | {"model": "custom:Large"}), model=Large(64, 10))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            nn.Sequential(nn.Flatten(), nn.Linear(20, 10)),
            r"Sequential cannot be used on digits, .* shape \(1, 8, 8\)",
        ),
        (nn.Conv2d(3, 10, 3), "Conv2d cannot be used on digits"),
        (nn.Bilinear(64, 64, 10), "Bilinear cannot be used on digits, .*'input2'; models get one tensor of inputs"),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(64, 9)),
            r"shape \(9,\) .* digits requires 10 numbers",
        ),
        (
            nn.Sequential(nn.Flatten(0), nn.Linear(128, 10)),
            "shape .* digits requires 10 numbers",
        ),
    ],
)
def test_a_model_of_the_wrong_size_is_rejected_before_anything_is_written(tmp_path, model, sentence):
    with pytest.raises(fedflat.UserError, match=sentence):
        fedflat.run("fedavg", model=model, out=tmp_path / "run", **SMALL)
    assert not (tmp_path / "run").exists()
