"""fedflat doctor: report the environment and run a self-test."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.shared.flags import DATA_DIR, JSON
from fedflat.cli.shared.screen import print_json, shown_bytes, shown_seconds
from fedflat.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

EXTRAS = {
    "ray": ("ray",),
    "flower": ("flwr",),
    "track": ("tensorboard", "mlflow", "wandb"),
    "sweep": ("optuna",),
    "hub": ("flwr-datasets", "pyarrow"),
    "text": ("transformers", "datasets", "peft"),
    "onnx": ("onnx", "onnxscript"),
}
"""Packages of each extra."""
SMALL: dict[str, Any] = {
    "model": "mlp(hidden=16)",
    "clients": 10,
    "clients_per_round": 4,
    "local_steps": 3,
    "rounds": 4,
    "eval_every": 2,
    "device": "cpu",
    "workers": 1,
}
"""Settings of the self-test's runs."""


def doctor(
    data_dir: Path | None = DATA_DIR,
    self_test: bool = typer.Option(
        True, "--self-test/--no-self-test", help="run a short self-test (train, resume, compare engines)"
    ),
    as_json: bool = JSON,
) -> None:
    """Report the environment and run a self-test; paste the output into an issue.

    Example: fedflat doctor
    """
    report: dict[str, Any] = {"environment": _environment(), "data": _datasets(data_dir), "extras": _extras()}
    report["self-test"] = list(_self_test()) if self_test else []
    if as_json:
        print_json(report)
    else:
        print(in_markdown(report))
    failed = [check["what"] for check in report["self-test"] if check["problem"]]
    if failed:
        raise UserError(f"the self-test failed ({', '.join(failed)}); please paste this report into an issue")


def in_markdown(report: dict[str, Any]) -> str:
    """Return the report of ``fedflat doctor`` as Markdown, for an issue."""
    lines = ["### fedflat doctor", ""]
    lines += [f"- {name}: {value}" for name, value in report["environment"].items()]
    lines += ["", f"Datasets in {report['data']['folder']}:", ""]
    lines += [f"- {name}: {state}" for name, state in report["data"]["sets"].items()]
    lines += ["", "Extras:", ""]
    for name, packages in report["extras"].items():
        installed = [f"{package} {version}" for package, version in packages.items() if version is not None]
        hint = f" (pip install 'fedflat[{name}]')" if len(installed) < len(packages) else ""
        lines.append(f"- {name}: {', '.join(installed) or 'not installed'}{hint}")
    if report["self-test"]:
        lines += ["", "Self-test:", ""]
    for check in report["self-test"]:
        lines.append(f"- {check['what']}: {check['problem'] or 'works'} ({shown_seconds(check['seconds'])})")
    return "\n".join(lines)


def _environment() -> dict[str, str]:
    """Return versions and hardware as texts by label."""
    import torch

    from fedflat.bench.machine import hardware, versions

    machine = hardware()
    gpus = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(number)
        gpus.append(f"{properties.name} with {shown_bytes(properties.total_memory)}")
    return {
        **versions(),
        "system": machine["system"],
        "processor": f"{machine['processor']}, {machine['cores']} usable cores",
        "memory": shown_bytes(machine["memory"]),
        "GPUs": ", ".join(gpus) or "none found by torch",
        "free disk here": shown_bytes(shutil.disk_usage(Path.cwd()).free),
    }


def _datasets(folder: Path | None) -> dict[str, Any]:
    """Return the dataset folder, and the state of every dataset; all that are not downloaded share one entry."""
    from fedflat.data import DATASETS, data_dir

    folder, states, not_downloaded = data_dir(folder), {}, []
    for name, source in DATASETS.items():
        if source.example:  # a format for user data
            continue
        missing = len(source.missing(folder))
        if not source.files:
            states[name] = "needs no download"
        elif not missing:
            states[name] = "complete"
        elif missing < len(source.files):
            states[name] = f"{missing} of {len(source.files)} files missing (fedflat data get {name})"
        else:
            not_downloaded.append(name)
    if not_downloaded:
        states["not downloaded"] = f"{', '.join(not_downloaded)} (fedflat data get NAME)"
    return {"folder": str(folder), "sets": states}


def _extras() -> dict[str, dict[str, str | None]]:
    """Return the installed version of every optional package, by extra; None if it is not installed."""

    def installed_version(package: str) -> str | None:
        """Return the version of a package, or None if it is not installed."""
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    return {name: {package: installed_version(package) for package in packages} for name, packages in EXTRAS.items()}


def _self_test() -> Iterator[dict[str, Any]]:
    """Run every check; yield its name, its problem (empty if it passed) and its duration."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        for name, check in CHECKS.items():
            if check is _check_gpu and not torch.cuda.is_available():
                continue
            start = time.monotonic()
            try:
                problem = check(Path(folder))
            except Exception as error:  # the report states any error
                problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            yield {"what": name, "problem": problem, "seconds": time.monotonic() - start}


def _trained_weights(algorithm: str, **settings: Any) -> Tensor:
    """Train a small run with the given settings; return the final server weights, moved to the CPU."""
    import fedflat

    return fedflat.run(algorithm, **{**SMALL, **settings}).record.models["server"].weights.cpu()


def _check_engines(folder: Path) -> str:
    """Check that the loop and the lane engine train the same weights; return the problem, or an empty text."""
    import torch

    loop, lanes = (_trained_weights("fedmoswa", engine__name=name) for name in ("loop", "lanes"))
    return "" if torch.allclose(loop, lanes, rtol=1e-4, atol=1e-6) else "the loop and the lane engine differ"


def _check_resume(folder: Path) -> str:
    """Check that a paused and resumed run ends with the weights of an uninterrupted one; return the problem, if any."""
    import torch

    import fedflat

    uninterrupted = _trained_weights("scaffold")
    fedflat.run("scaffold", out=folder / "run", stop__seconds=1e-9, **SMALL)  # pauses after the first evaluation
    resumed = fedflat.resume(folder / "run")
    while resumed.status == "paused":  # the time limit pauses it again after each evaluation
        resumed = fedflat.resume(folder / "run")
    is_equal = torch.equal(resumed.record.models["server"].weights, uninterrupted)
    return "" if is_equal else "a resumed run ended differently"


def _check_figures(folder: Path) -> str:
    """Check that a learning curve can be drawn; return the problem, or an empty text."""
    import fedflat

    fedflat.run("fedavg", **SMALL).plot().savefig(folder / "curve.png")
    return "" if (folder / "curve.png").stat().st_size else "the figure is empty"


def _check_gpu(folder: Path) -> str:
    """Check that training on the GPU ends near the weights of the CPU; return the problem, or an empty text."""
    import torch

    on_cpu = _trained_weights("fedsam", device="cpu")
    on_gpu = _trained_weights("fedsam", device="cuda", engine__precision="float32")
    return "" if torch.allclose(on_cpu, on_gpu, rtol=1e-2, atol=1e-3) else "the GPU and the CPU differ"


CHECKS: dict[str, Callable[[Path], str]] = {
    "loop and lane engines agree": _check_engines,
    "a resumed run equals an uninterrupted one": _check_resume,
    "figures are drawn": _check_figures,
    "the GPU agrees with the CPU": _check_gpu,
}
"""Checks of the self-test: functions of an empty folder that return the problem, or an empty text."""
