"""fedflat flatness spectrum and sharpness: tables, JSON, figures and user errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy

from fedflat import run as run_in_python
from fedflat.cli.flatness.models import print_caveats
from fedflat.data import load
from fedflat.experiment.analysis.run_model import open_model
from fedflat.flatness import checks, spectrum
from tests.cli.conftest import assert_error

FEW = ("--eigenvalues", "6", "--device", "cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run with saved models."""
    from .conftest import SMALL, call

    folder = tmp_path_factory.mktemp("kept") / "run"
    flags = ("--model", "mlp(hidden=4)", "--save-every", "2", "--clients", "10", "--clients-per-round", "3")
    assert call("run", "fedavg+wima", *SMALL, *flags, "--quiet", "--out", folder).exit_code == 0
    return folder


def test_spectrum_prints_a_table_and_writes_json_and_figure(fedflat, run):
    result = fedflat("flatness", "spectrum", run, f"{run}:server@2", *FEW, "--trace-draws", "4")
    assert result.exit_code == 0 and result.stderr == ""
    accuracy = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["test"]["wima"]["accuracy"]
    heads = ("test accuracy %", "gradient norm", "lambda_max / lambda_5", "lambda_min")
    notes = ("lanczos", "all converged (tolerance 0.001)")
    for word in (*heads, *notes, "wima", "server", f"{100 * accuracy:.2f}", "±"):
        assert word in result.stdout
    document = json.loads((run / "flatness/spectrum/spectrum.json").read_text())
    wima, server = document["models"].values()
    assert (wima["model"], server["model"]) == (f"{run}:wima", f"{run}:server@2")
    assert wima["test"] == {"accuracy": pytest.approx(accuracy)}
    assert wima["described"] == "wima model, seed 0, round 3" and "round 2" in server["described"]
    (found,) = wima["subsets"]
    assert f"  {found['gradient_norm']:.4g}  " in result.stdout
    values = [f"{model['subsets'][0]['eigenvalues'][-1]:.4g}" for model in (wima, server)]
    assert re.search(rf"^ *6 +{values[0]} +{values[1]}$", result.stdout, re.MULTILINE), result.stdout
    assert len(found["eigenvalues"]) == 6 and found["eigenvalues"][0] == found["lambda_max"] and found["converged"]
    assert found["trace"]["low"] < found["trace"]["value"] < found["trace"]["high"]
    assert (run / "flatness/spectrum/spectrum.png").read_bytes().startswith(b"\x89PNG")


def test_subsets_have_error_bars_and_the_same_seed_the_same_numbers(fedflat, run):
    flags = (run, *FEW, "--examples", "60", "--subsets", "2", "--trace-draws", "0", "--json")
    (first,), (again,) = (
        json.loads(fedflat("flatness", "spectrum", *flags, "--out", out).stdout)["models"].values()
        for out in ("a", "b")
    )
    one, other = first["subsets"]
    assert one["examples"] == other["examples"] == 60 and one["lambda_max"] != other["lambda_max"]
    assert [s["eigenvalues"] for s in again["subsets"]] == [one["eigenvalues"], other["eigenvalues"]]
    shown = fedflat("flatness", "spectrum", *flags[:-1], "--out", "c").stdout
    assert re.search(r"2 subsets of 60 of [\d,]+ examples, float32, lanczos", shown)
    assert "± standard deviation over subsets" in shown


def test_clients_and_the_test_set(fedflat, run):
    def losses(*flags: str) -> float:
        result = fedflat(
            "flatness", "spectrum", run, "--eigenvalues", "1", "--trace-draws", "0", "--json", "--out", "o", *flags
        )
        (found,) = json.loads(result.stdout)["models"].values()
        return found["subsets"][0]["loss"]

    assert len({losses(), losses("--on", "test"), losses("--client", "0"), losses("--client", "1")}) == 4


def test_power_iteration_and_density(fedflat, run):
    flags = (
        "--method",
        "power",
        "--iterations",
        "5",
        "--density",
        "--density-draws",
        "2",
        "--density-steps",
        "6",
        "--trace-draws",
        "2",
    )
    result = fedflat("flatness", "spectrum", run, *FEW, *flags, "--out", "here")
    assert result.exit_code == 0 and "power" in result.stdout
    shown = " ".join(result.stdout.split())
    assert re.search(r"fedavg\+wima: not converged; lambda_5 = \S+ has a residual of \S+ \(relative: ", shown), shown
    assert "raise --iterations or use --method lanczos" in shown and "all converged" not in shown
    (found,) = json.loads(Path("here/spectrum.json").read_text())["models"].values()
    assert len(found["subsets"][0]["density"]["nodes"]) == 2 and found["subsets"][0]["products"] <= 6 * 5 + 2 + 12


def test_the_fisher_matrix_and_single_layers(fedflat, run):
    flags = ("--eigenvalues", "2", "--examples", "30", "--subsets", "2", "--trace-draws", "4", "--out", "here")
    flags = (*flags, "--no-lambda-min")
    result = fedflat(
        "flatness", "spectrum", run, *flags, "--matrix", "gauss-newton", "--per-layer", "--trace-estimator", "hutch++"
    )
    assert result.exit_code == 0, result.stderr
    for word in ("Curvature (gauss-newton) on train", "Parameters of fedavg+wima", "weights", "±"):
        assert word in result.stdout
    assert not any(column in result.stdout for column in ("lambda_5", "lambda_min"))  # not computed
    (model,) = json.loads(Path("here/spectrum.json").read_text())["models"].values()
    assert [subset["matrix"] for subset in model["subsets"]] == ["gauss-newton", "gauss-newton"]
    assert len(model["subsets"][0]["layers"]) == 4 and model["subsets"][0]["lambda_min"] is None


def test_models_with_different_numbers_of_layers_and_eigenvalues(capsys):
    from fedflat.cli.flatness.spectrum import _print_spectra

    data = (torch.eye(2), torch.arange(2))
    networks = {"small": nn.Linear(2, 2), "large": nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))}
    spectra = {
        name: [spectrum(network, cross_entropy, data, per_layer=True, trace_draws=2)]
        for name, network in networks.items()
    }
    document = {"on": "train", "models": {name: {"test": {"accuracy": 0.5}} for name in spectra}}
    for order in (("small", "large"), ("large", "small")):
        _print_spectra({name: spectra[name] for name in order}, document, "2 examples", 1e-3)
        shown = capsys.readouterr().out
        assert re.search(r"\n\s+12 ", shown) and "Parameters of small" in shown  # the large one has 12 eigenvalues
        assert all(name in shown for name in ("0.weight", "0.bias", "2.weight", "2.bias"))


def test_models_with_different_training_losses_are_not_compared(run, capsys):
    models = dict.fromkeys(("a", "b", "diverged"), open_model(run))
    print_caveats(models, {"a": [0.10, 0.12], "b": [0.12], "diverged": [float("nan")]})
    assert capsys.readouterr().out.startswith("loss: ")  # and no warning
    unequal = {"a": [0.10], "b": [0.12], "diverged": [float("nan")]}
    print_caveats(models, unequal)
    shown = " ".join(capsys.readouterr().out.split())
    assert "range from 0.1 (a) to 0.12 (b), a factor of 1.2" in shown and "flatness gap RUN" in shown
    print_caveats(models, unequal, "test")
    assert "factor" not in capsys.readouterr().out


def test_norms(fedflat, run):
    flags = ("--examples", "30", "--subsets", "2", "--draws", "2", "--directions", "1")
    result = fedflat("flatness", "norms", run, f"{run}:server", *flags)
    assert result.exit_code == 0, result.stderr
    for word in (
        "2 subsets of 30 of",
        "relative flatness",
        "Fisher-Rao norm",
        "magnitude-aware sigma",
        "wima",
    ):
        assert word in result.stdout
    wima, _ = json.loads((run / "flatness/norms/norms.json").read_text())["models"].values()
    assert len(wima["subsets"]) == 2 and wima["subsets"][0]["sigma"] > 0
    assert_error(fedflat("flatness", "norms", run, "--layer", "none"), "layer 'none'")


def test_a_local_model_of_a_client(fedflat, run):
    result = fedflat(
        "flatness", "spectrum", f"{run}:server", f"{run}:client0", *FEW, "--trace-draws", "0", "--out", "o"
    )
    assert result.exit_code == 0 and "client0" in result.stdout


def test_sharpness_of_every_kind(fedflat, run):
    result = fedflat("flatness", "sharpness", run, f"{run}:server", "--ascent-steps", "3", "--directions", "3")
    assert result.exit_code == 0 and result.stderr == ""
    for word in (
        "gradient norm",
        "sam, rho 0.05",
        "asam, rho 0.5",
        "average, rho 0.05",
        "3 ascent steps",
        "wima",
        "server",
    ):
        assert word in result.stdout
    shown = fedflat("flatness", "sharpness", run, "--kind", "sam", "--out", "o").stdout
    assert "sam: lower bound from the first-order direction; raise --ascent-steps" in shown and "±" not in shown
    shown = fedflat("flatness", "sharpness", run, "--kind", "average", "--directions", "2", "--out", "o").stdout
    assert "lower bound" not in shown and "± 95 %" in shown
    few = ("--kind", "asam,sam", "--examples", "9", "--subsets", "1", "--out", "o")
    shown = fedflat("flatness", "sharpness", run, *few, "--scope", "all", "--eta", "0.2").stdout
    assert "9 examples, float32" in shown and "  asam (scope all, eta 0.2), rho 0.5  sam, rho 0.05" in shown
    flags = ("--kind", "sam", "--rho", "0.05,0.5", "--examples", "50", "--subsets", "2", "--json")
    document = json.loads(fedflat("flatness", "sharpness", run, *flags).stdout)
    (model,) = document["models"].values()
    small, large = model["sharpness"]
    objectives = open_model(run).objectives("train", examples=50, subsets=2, seed=0)
    assert model["gradient_norm"] == [pytest.approx(float(one.gradient().norm())) for one in objectives]
    assert len(small) == 2 and 0 < small[0]["value"] < large[0]["value"] and small[0]["rho"] == 0.05
    # Results with other settings are kept; the same command overwrites its own.
    first, second = (run / f"flatness/{name}/sharpness.json" for name in ("sharpness", "sharpness-2"))
    assert list(json.loads(first.read_text())["models"]) == ["wima", "server"]
    assert json.loads(second.read_text())["models"] == document["models"]
    assert fedflat("flatness", "sharpness", run, *flags).exit_code == 0
    assert len(list((run / "flatness").glob("sharpness*"))) == 2


def test_m_sharpness_over_several_radii_is_drawn(fedflat, run):
    flags = (
        "--examples",
        "40",
        "--subsets",
        "1",
        "--m",
        "10",
        "--rho",
        "0.05",
        "--rho",
        "0.1",
        "--kind",
        "sam,average",
        "--json",
    )
    found = json.loads(fedflat("flatness", "sharpness", run, *flags, "--directions", "2", "--out", "curves").stdout)
    (model,) = found["models"].values()
    assert "model, seed 0, round " in model["described"]
    sams, averages = model["sharpness"][:2], model["sharpness"][2:]
    assert [result["m"] for (result,) in sams] == [10, 10] and sams[0][0]["value"] < sams[1][0]["value"]
    assert all(result["interval"]["draws"] == 4 for (result,) in sams) and averages[0][0]["m"] is None
    assert Path("curves/sharpness.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("model", "flags", "sentence"),
    [
        ("", ("--subsets", "2"), "--subsets needs --examples"),
        ("", ("--eigenvalues", "100000"), "100000 eigenvalues of a model with"),
        ("", ("--method", "qr"), "'qr'"),
        ("", ("--on", "tset"), "'tset'; did you mean test"),
        ("", ("--client", "10"), "client 10 ... 10 clients"),
        ("", ("--client", "0", "--on", "test"), "on=test"),
        ("", ("--examples", "100000"), "100000 examples"),
        ("", ("--precision", "bf16"), "'bf16'"),
        (":wina", (), "'wina'; did you mean wima"),
        ("@7", (), "wima ... round 7 ... rounds: 2"),
        ("/nothing", (), "there is no run in"),
    ],
)
def test_user_errors_are_one_line(fedflat, run, model, flags, sentence):
    assert_error(fedflat("flatness", "spectrum", f"{run}{model}", *flags), sentence)


MODULE = """
from torch import nn
from neighbour import HIDDEN

def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 10))

def make_list():
    return [make_model()]

def fails():
    raise ValueError

class Net(nn.Module):
    def __init__(self, size):
        super().__init__()

class Plain(nn.Sequential):
    def __init__(self):
        super().__init__(*make_model())
"""
MEASURED = ("--module", "net.py:make_model", "--dataset", "digits", "--device", "cpu")


@pytest.fixture
def weights(fedflat) -> dict[str, nn.Module]:
    """Write two weights files into the current folder; return them with their modules."""
    Path("net.py").write_text(MODULE)
    Path("neighbour.py").write_text("HIDDEN = 3")
    modules = {
        file: nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Tanh(), nn.Linear(3, 10))
        for file in ("own.pt", "other.safetensors")
    }
    torch.save(modules["own.pt"].state_dict(), "own.pt")
    save_file(modules["other.safetensors"].state_dict(), "other.safetensors")
    return modules


def test_weights_files(fedflat, weights):
    few = ("--examples", "50", "--subsets", "1")
    data = load("digits")
    inputs = (data.test.inputs / 255 - data.mean[0]) / data.std[0]
    flags = ("--on", "test", "--eigenvalues", "2", "--trace-draws", "0", "--json")
    document = json.loads(fedflat("flatness", "spectrum", *weights, *MEASURED, *flags).stdout)
    for (name, found), module in zip(document["models"].items(), weights.values(), strict=True):
        truth = spectrum(module, cross_entropy, (inputs, data.test.targets), 2, trace_draws=0)
        assert found["subsets"][0]["eigenvalues"] == pytest.approx(truth.eigenvalues, rel=1e-3)
        assert Path(found["model"]).stem == name
    assert Path("flatness/spectrum/spectrum.png").exists()
    losses = {name: fmean(subset["loss"] for subset in model["subsets"]) for name, model in document["models"].items()}
    shown = " ".join(fedflat("flatness", "spectrum", *weights, *MEASURED, *flags[:-1]).stdout.split())
    assert f"normalised with mean {data.mean[0]:.4g}, std {data.std[0]:.4g}; check that the test loss " in shown
    assert f"own {losses['own']:.4g}, other {losses['other']:.4g}" in shown and "comparable" not in shown
    plain = ("--module", "net.py:Plain", *MEASURED[2:])  # a class without arguments
    sharpness = json.loads(fedflat("flatness", "sharpness", "own.pt", *plain, *few, "--json").stdout)
    assert sharpness["models"]["own"]["sharpness"][0][0]["value"] > 0
    grid = ("--points", "3", "--examples", "40")
    drawn = fedflat("flatness", "landscape", *weights, *MEASURED, *grid)
    assert drawn.exit_code == 0 and "own" in drawn.stdout and "digits, 40 train examples" in drawn.stdout
    assert Path("flatness/landscape/contours.pdf").exists()
    command = ("flatness", "path", *weights, *MEASURED, *grid, "--out", "p")
    assert re.search(r"check\s+that\s+the\s+train\s+loss", fedflat(*command).stdout)
    path = json.loads(fedflat(*command, "--json").stdout)
    own, other = (torch.nn.utils.parameters_to_vector(module.parameters()) for module in weights.values())
    assert path["distance"] == pytest.approx(float((own - other).norm().detach()), rel=1e-5)


def test_a_run_and_a_weights_file_of_another_architecture(fedflat, weights, run):
    result = fedflat("flatness", "norms", run, "own.pt", *MEASURED, "--examples", "30", "--subsets", "1", "--out", "o")
    shown = " ".join(result.stdout.split())
    assert "own has 235 parameters, fedavg+wima has 310. The flatness of different architectures is not" in shown
    models = json.loads(Path("o/norms.json").read_text())["models"]
    assert [model["parameters"] for model in models.values()] == [310, 235]
    data = load("digits")
    np.savez("half.npz", inputs=data.train.inputs[::2], targets=data.train.targets[::2])
    command = ("flatness", "norms", run, "own.pt", *MEASURED[:2], "--dataset", "half.npz")
    assert "trained on digits, own on arrays(" in " ".join(fedflat(*command).stderr.split())


def test_a_run_with_a_user_supplied_network(fedflat, weights):
    few = {"clients": 4, "clients_per_round": 2, "local_steps": 1}
    result = run_in_python("fedavg", model=weights["own.pt"], rounds=1, out="mine", **few)
    flags = ("--kind", "sam", "--json")
    assert_error(
        fedflat("flatness", "sharpness", "mine", *flags), "user-supplied network ... --module FILE.py:FUNCTION"
    )
    document = json.loads(fedflat("flatness", "sharpness", "mine", "own.pt", *MEASURED, *flags).stdout)
    alone = json.loads(fedflat("flatness", "sharpness", "mine", *MEASURED[:2], *flags).stdout)
    expected = result.flatness().sharpness("sam").value
    for models in (document["models"], alone["models"]):
        assert models["fedavg"]["sharpness"][0][0]["value"] == pytest.approx(expected, rel=1e-4)
    assert Path("mine/flatness/sharpness/sharpness.json").exists()  # so a report of the run shows both
    assert_error(
        fedflat("report", "mine", "own.pt"), "own.pt is a weights file ... fedflat flatness sharpness RUN own.pt"
    )


def test_unequal_losses_of_weights_files(fedflat, weights, monkeypatch):
    monkeypatch.setattr(checks, "MAX_LOSS_RATIO", 1.0)
    few = ("--kind", "sam", "--examples", "50", "--subsets", "1")
    shown = " ".join(fedflat("flatness", "sharpness", *weights, *MEASURED, *few).stdout.split())
    assert "call no model flatter" in shown and "--save-every" not in shown


@pytest.mark.parametrize(
    ("model", "flags", "sentence"),
    [
        ("own.pt", (), "own.pt is a weights file ... --module FILE.py:FUNCTION ... --dataset"),
        ("own.pt", MEASURED[:2], "--dataset NAME"),
        ("RUN", MEASURED[:2], "--module is for weights files"),
        ("RUN", MEASURED[2:], "--dataset is for weights files"),
        ("RUN", ("--data-dir", "data"), "--data-dir is for weights files ... data.dir of its config"),
        ("missing.pt", MEASURED, "missing.pt does not exist"),
        ("own.pt", ("--module", "net.py", *MEASURED[2:]), "'net.py'; expected FILE.py:FUNCTION"),
        ("own.pt", ("--module", "nett.py:make_model", *MEASURED[2:]), "nett.py does not exist"),
        ("own.pt", ("--module", "net.py:make_mode", *MEASURED[2:]), "'make_mode'; did you mean make_model"),
        ("own.pt", ("--module", "net.py:make_list", *MEASURED[2:]), "returned a list; expected a torch.nn.Module"),
        ("own.pt", ("--module", "net.py:fails", *MEASURED[2:]), "net.py failed: ValueError"),
        ("own.pt", ("--module", "net.py:Net", *MEASURED[2:]), "required argument: 'size' ... write a function"),
        ("own.pt", ("--module", "broken.py:make", *MEASURED[2:]), "broken.py, line 1: SyntaxError"),
        ("large.pt", MEASURED, "weights of another architecture ... 1.weight has shape 4x64"),
        ("own.pt", (*MEASURED, "--client", "1"), "--client ... own.pt is a weights file"),
    ],
)
def test_user_errors_with_weights_files(fedflat, weights, run, model, flags, sentence):
    Path("broken.py").write_text("def make(:")
    if model == "large.pt":
        large = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, 10))
        torch.save(large.state_dict(), "large.pt")
    assert_error(fedflat("flatness", "spectrum", model.replace("RUN", str(run)), *flags), sentence)


def test_runs_without_models(fedflat, run, small):
    fedflat("run", *small, "--quiet", "--out", "r")
    assert_error(fedflat("flatness", "spectrum", "r@2"), "--save-every N")
    Path("r/model.safetensors").unlink()
    assert_error(fedflat("flatness", "spectrum", "r"), "model.safetensors is missing")
    Path("r/metrics.jsonl").write_text("")
    assert_error(fedflat("flatness", "spectrum", "r"), "metrics.jsonl has lost lines")
    Path("r/status.json").write_text(Path("r/status.json").read_text().replace("finished", "paused"))
    assert_error(fedflat("flatness", "spectrum", "r"), "r has no ... fedflat resume")
    assert_error(fedflat("flatness", "sharpness", run, "--kind", " , "), "--kind")
    assert_error(fedflat("flatness", "sharpness", run, run), "is listed twice")
