"""Exporting models to other tools, and starting runs from plain state_dicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import fedflat
from fedflat.cli.application import app
from fedflat.data import from_arrays, load
from fedflat.errors import UserError
from fedflat.experiment.store.export import write_onnx
from fedflat.models import build

SETTINGS = {
    "model": "mlp(hidden=8)",
    "rounds": 3,
    "clients": 12,
    "clients_per_round": 4,
    "local_steps": 3,
    "workers": 1,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    fedflat.run("fedmoswa+wima(window=2)", out=folder, save_every=1, **SETTINGS)
    return folder


def call(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.stdout if done.exit_code == 0 else done.stderr


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_torch_and_safetensors_hold_the_models_of_the_run(run: Path, tmp_path: Path) -> None:
    result = fedflat.load(run)
    exported = call("export", run, "--average", "wima(window=2)", "--out", tmp_path / "wima.pt")
    assert exported.startswith(str(tmp_path / "wima.pt")) and ").model('wima(window=2)')" in exported
    assert same(torch.load(tmp_path / "wima.pt", weights_only=True), result.state_dict("wima(window=2)"))
    assert same(result.state_dict("wima"), result.state_dict("wima(window=2)")), (
        "a name without parameters suffices if only one average has it"
    )
    call("export", run, "--format", "safetensors", "--out", tmp_path / "weights")
    assert same(load_file(tmp_path / "weights"), result.state_dict())
    with safe_open(tmp_path / "weights", "pt") as file:
        header = json.loads(file.metadata()["fedflat"])
    digits = load("digits")
    assert (header["input_shape"], header["mean"], header["std"]) == ([1, 8, 8], [*digits.mean], [*digits.std])
    assert header["classes"] == [*"0123456789"]
    assert json.loads((tmp_path / "wima.pt.json").read_text()) == header | {"name": "wima(window=2)"}
    plain = build("mlp(hidden=8)", (1, 8, 8), 10)
    plain.load_state_dict(torch.load(result.export(tmp_path / "server.pt"), weights_only=True))
    inputs = torch.rand(5, 1, 8, 8)
    assert torch.equal(plain.eval()(inputs), result.model()(inputs))


def test_only_metadata_of_exported_models_is_overwritten(run: Path, tmp_path: Path) -> None:
    result, other = fedflat.load(run), tmp_path / "model.pt.json"
    file = result.export(tmp_path / "weights.json", format="torch")
    assert same(torch.load(result.export(file, format="torch"), weights_only=True), result.state_dict())
    other.write_text('{"model": "mine"}')
    with pytest.raises(UserError, match=r"model\.pt\.json exists and does not describe an exported model"):
        result.export(tmp_path / "model.pt")
    assert other.read_text() == '{"model": "mine"}' and not (tmp_path / "model.pt").exists()


def test_diverged_models_are_not_exported(tmp_path: Path) -> None:
    result = fedflat.run("fedavg", rounds=2, lr=1e30, local_steps=2, workers=1)
    with pytest.raises(UserError, match="contains infinite or NaN values"):
        result.export(tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()


def test_other_files_are_not_overwritten(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "sw.yaml"
    file.write_text("base: {}")
    for format in ("torch", "safetensors", "onnx"):
        with pytest.raises(UserError, match=r"sw\.yaml exists and is not an exported model"):
            fedflat.load(run).export(file, format=format)
    assert file.read_text() == "base: {}" and [*tmp_path.iterdir()] == [file]
    for format in ("torch", "safetensors", "onnx") * 2:
        fedflat.load(run).export(tmp_path / format, format=format)


def test_statistics_are_those_at_the_time_of_training(tmp_path: Path) -> None:
    def write(scale: float) -> None:
        rows = "".join(f"{scale * number},{number % 2}\n" for number in range(60))
        (tmp_path / "mine.csv").write_text(f"width,target\n{rows}")

    write(1.0)
    dataset = f"arrays(path={tmp_path / 'mine.csv'},standardise=true)"
    fedflat.run("fedavg", out=tmp_path / "run", dataset=dataset, **SETTINGS)
    before = load(dataset).mean
    write(100.0)
    result = fedflat.load(tmp_path / "run")
    for remove in (False, True):
        if remove:
            (tmp_path / "mine.csv").unlink()
        result.export(tmp_path / "model.pt")
        description = json.loads((tmp_path / "model.pt.json").read_text())
        assert description["mean"] == [*before] and description["columns"] == ["width"]
    partition = tmp_path / "run" / "partition.json"
    partition.write_text(json.dumps({**json.loads(partition.read_text()), "data": None}))
    with pytest.warns(UserWarning, match="no record of its data's statistics"):
        result.export(tmp_path / "model.pt")
    assert "mean" not in json.loads((tmp_path / "model.pt.json").read_text())


def test_a_model_saved_during_training_is_exported(run: Path, tmp_path: Path) -> None:
    found = json.loads(call("export", run, "--round", 1, "--json"))
    assert (
        found["file"] == str(run / "exported" / "round-000001.pt")
        and found["bytes"] == Path(found["file"]).stat().st_size
    )
    saved, last = torch.load(found["file"], weights_only=True), fedflat.load(run).state_dict()
    assert same(saved, fedflat.load(run).state_dict(rounds=1)) and not same(saved, last)


def test_the_header_of_a_paused_runs_model_has_its_round(tmp_path: Path) -> None:
    loop = fedflat.rounds("fedavg+wima(window=2)", out=tmp_path / "run", eval_every=2, **SETTINGS)
    first = next(iter(loop))
    assert same(first.state_dict("wima"), first.state_dict("wima(window=2)")), (
        "a name without parameters suffices if only one average has it"
    )
    loop.close()
    with safe_open(fedflat.load(tmp_path / "run").export(tmp_path / "server.safetensors"), "pt") as file:
        assert json.loads(file.metadata()["fedflat"])["rounds"] == 1, (
            "the header has the round of the model, not of the last evaluation"
        )


def test_a_run_without_a_folder_has_its_models_too(run: Path) -> None:
    result = fedflat.run("fedmoswa+wima(window=2)", **SETTINGS)
    assert all(
        same(result.state_dict(name), fedflat.load(run).state_dict(name)) for name in ("server", "wima(window=2)")
    )


def test_a_user_supplied_module_receives_the_saved_weights(tmp_path: Path) -> None:
    own = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    result = fedflat.run("fedavg", out=tmp_path / "run", **(SETTINGS | {"model": own}))
    again = fedflat.load(tmp_path / "run")
    assert same(result.model().state_dict(), again.model(network=own).state_dict())
    assert not same(result.model().state_dict(), own.state_dict()), "the user's module is unchanged"
    with pytest.raises(UserError, match="custom:Sequential"):
        again.model()


class Shared(nn.Module):
    """A weight in two layers, a normalisation used twice, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.BatchNorm1d(64)
        self.other.weight, self.again = self.one.weight, self.norm
        self.register_buffer("scale", torch.full((64,), 0.5), persistent=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(self.other(self.norm(self.one(x.flatten(1) * self.scale)))))


@pytest.mark.parametrize("kept", [True, False])
def test_a_state_dict_fits_a_module_with_tied_weights_and_unsaved_buffers_exactly(kept: bool, tmp_path: Path) -> None:
    result = fedflat.run("fedavg", **{**SETTINGS, "model": Shared()}, out=tmp_path / "run" if kept else None)
    plain = Shared()
    plain.load_state_dict(torch.load(result.export(tmp_path / "server.pt"), weights_only=True))
    inputs = torch.rand(5, 1, 8, 8)
    assert torch.equal(plain.eval()(inputs), result.model()(inputs)) and plain.other.weight is plain.one.weight


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--format", "torchscript"], "expected torch (a state_dict), safetensors"),
        (["--out", "weights.txt"], ".pt, .pth"),
        (["--out", "."], ". is a folder; expected a file such as model.pt"),
        (["--average", "ema"], "expected one of server, wima(window=2)"),
        (["--round", "7"], "rounds: 0, 1, 2, 3"),
    ],
)
def test_mistakes_raise_a_clear_error(run: Path, arguments: list[str], sentence: str) -> None:
    assert sentence in " ".join(call("export", run, *arguments).split())


def test_an_onnx_model_has_the_outputs_of_the_torch_model(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime, onnx = pytest.importorskip("onnxruntime"), pytest.importorskip("onnx")
    assert "onnx" in call(
        "export", run, "--format", "onnx", "--average", "wima(window=2)", "--out", tmp_path / "model.onnx"
    )
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    model = fedflat.load(run).model("wima(window=2)")
    for count in (1, 7):
        inputs = torch.randn(count, 1, 8, 8)
        (found,) = session.run(["outputs"], {"inputs": inputs.numpy()})
        assert torch.allclose(torch.from_numpy(found), model(inputs), atol=1e-5)
    (description,) = (
        json.loads(entry.value) for entry in onnx.load(tmp_path / "model.onnx").metadata_props if entry.key == "fedflat"
    )
    assert (
        description["name"] == "wima(window=2)"
        and description["rounds"] == 3
        and description["mean"] == list(load("digits").mean)
    )


@pytest.mark.skipif(torch.__version__ < "2.7", reason="the exporter of torch 2.6 fixes the batch size of ViTs")
def test_vision_transformers_are_exported_to_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    shape = (3, 32, 32)
    torch.manual_seed(0)
    network = build("vit-s16(width=32,depth=1,heads=2)", shape, 4)
    pictures, targets = torch.randint(0, 256, (8, *shape), dtype=torch.uint8), torch.arange(8) % 4
    write_onnx(tmp_path / "model.onnx", network, from_arrays(pictures, targets, pictures, targets, name="noise"), {})
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for count in (1, 3):
        inputs = torch.randn(count, *shape)
        (found,) = session.run(["outputs"], {"inputs": inputs.numpy()})
        assert torch.allclose(torch.from_numpy(found), network.eval()(inputs), atol=1e-5)


class Fixed(nn.Linear):
    """A model that reads the batch size in Python, so that its graph is fixed to one size."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.reshape(len(inputs), 64))


def test_a_model_with_a_fixed_batch_size_is_not_exported(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    with pytest.raises(UserError, match=r"batch size|cannot be exported to ONNX"):
        write_onnx(tmp_path / "model.onnx", Fixed(64, 10), load("digits"), {})
    assert not (tmp_path / "model.onnx").exists()


def test_a_missing_extra_is_named(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'fedflat[onnx]'" in call("export", run, "--out", tmp_path / "model.onnx")


def test_a_run_starts_from_a_state_dict(run: Path, tmp_path: Path) -> None:
    """Its evaluation before the first round is the last one of the run that the weights are of."""
    tensors, end = fedflat.load(run).state_dict(), fedflat.load(run).history[-1]["test"]["server"]
    torch.save(tensors, tmp_path / "plain.pt")
    torch.save(
        {"epoch": 3, "state_dict": {f"module.{key}": value for key, value in tensors.items()}},
        tmp_path / "checkpoint.pth",
    )
    torch.save(
        {"net": {f"module._orig_mod.{key}": value for key, value in tensors.items()}}, tmp_path / "compiled.pth.tar"
    )
    save_file(tensors, tmp_path / "plain.safetensors")
    save_file({f"_orig_mod.{key}": value for key, value in tensors.items()}, tmp_path / "compiled.safetensors")
    for name in ("plain.pt", "checkpoint.pth", "compiled.pth.tar", "plain.safetensors", "compiled.safetensors"):
        started = fedflat.run("fedavg", init=tmp_path / name, **(SETTINGS | {"rounds": 1}))
        assert started.history[0]["test"]["server"] == end


class Harmful:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("harmed"),))  # type: ignore[return-value]


def test_code_in_a_weights_file_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weights": Harmful()}, tmp_path / "harmful.pt")
    with pytest.raises(UserError, match=r"Python object \(.*getattr\).* weights_only=False"):
        fedflat.run("fedavg", init=tmp_path / "harmful.pt", **SETTINGS)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("content", [[torch.zeros(2)], {"epoch": 3}, {"a": {"b": torch.zeros(2)}}, {}], ids=str)
def test_a_file_without_a_state_dict_is_rejected(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(UserError, match="expected a state_dict"):
        fedflat.run("fedavg", init=tmp_path / "other.pt", **SETTINGS)


def test_weights_of_another_model_are_refused(run: Path, tmp_path: Path) -> None:
    torch.save(fedflat.load(run).state_dict(), tmp_path / "small.pt")
    with pytest.raises(UserError, match="another architecture"):
        fedflat.run("fedavg", init=tmp_path / "small.pt", **(SETTINGS | {"model": "mlp(hidden=9)"}))
