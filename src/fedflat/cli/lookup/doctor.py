"""fedflat doctor: report the environment and run a self-test."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import typer

from fedflat.cli.shared.flags import JSON
from fedflat.cli.shared.screen import print_json, shown_bytes, shown_seconds
from fedflat.errors import UserError

EXTRAS = {
    "ray": ("ray",),
    "flower": ("flwr",),
    "track": ("tensorboard", "mlflow", "wandb"),
    "sweep": ("optuna",),
    "hub": ("flwr-datasets", "pyarrow"),
    "onnx": ("onnx", "onnxscript"),
}
"""Packages of each extra."""
SMALL: dict[str, Any] = {
    **{"model": "mlp(hidden=16)", "clients": 10, "clients_per_round": 4, "local_steps": 3, "rounds": 4},
    **{"eval_every": 2, "device": "cpu", "workers": 1},
}


def doctor(
    folder: Path | None = typer.Option(None, "--data-dir", help="where datasets lie", show_default=False),
    self_test: bool = typer.Option(
        True, "--self-test/--no-self-test", help="run a short self-test (train, resume, compare engines)"
    ),
    as_json: bool = JSON,
) -> None:
    """Report the environment and run a self-test; paste the output into an issue.

    Example: fedflat doctor
    """
    found: dict[str, Any] = {"environment": _environment(), "data": _data(folder), "extras": _extras()}
    found["self-test"] = list(_self_test()) if self_test else []
    if as_json:
        print_json(found)
    else:
        print(in_markdown(found))
    broken = [one["what"] for one in found["self-test"] if one["problem"]]
    if broken:
        raise UserError(f"the self-test failed ({', '.join(broken)}); please paste this report into an issue")


def in_markdown(found: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = ["### fedflat doctor", ""]
    lines += [f"- {name}: {value}" for name, value in found["environment"].items()]
    lines += ["", f"Datasets in {found['data']['folder']}:", ""]
    lines += [f"- {name}: {state}" for name, state in found["data"]["sets"].items()]
    lines += ["", "Extras:", ""]
    for name, packages in found["extras"].items():
        absent = [package for package, version in packages.items() if version is None]
        there = ", ".join(f"{package} {version}" for package, version in packages.items() if version is not None)
        lines.append(f"- {name}: {there or 'not installed'}" + (f" (pip install 'fedflat[{name}]')" if absent else ""))
    if found["self-test"]:
        lines += ["", "Self-test:", ""]
        lines += [
            f"- {one['what']}: {one['problem'] or 'works'} ({shown_seconds(one['seconds'])})"
            for one in found["self-test"]
        ]
    return "\n".join(lines)


def _environment() -> dict[str, str]:
    import torch

    from fedflat.bench.machine import hardware, versions

    machine, software = hardware(), versions()
    free = shutil.disk_usage(Path.cwd()).free
    devices = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(number)
        devices.append(f"{properties.name} with {shown_bytes(properties.total_memory)}")
    return {
        **software,
        "system": machine["system"],
        "processor": f"{machine['processor']}, {machine['cores']} cores to use",
        "memory": shown_bytes(machine["memory"]),
        "GPUs": ", ".join(devices) or "none that torch sees",
        "free disk here": shown_bytes(free),
    }


def _data(folder: Path | None) -> dict[str, Any]:
    from fedflat.data import DATASETS, data_dir

    where, sets = data_dir(folder), {}
    for name, source in DATASETS.items():
        missing = len(source.missing(where))
        if source.example:
            continue
        if not source.files:
            sets[name] = "needs no download"
        elif missing < len(source.files):
            sets[name] = (
                "complete"
                if not missing
                else f"{missing} of {len(source.files)} files missing (fedflat data get {name})"
            )
    absent = [name for name, source in DATASETS.items() if name not in sets]
    return {
        "folder": str(where),
        "sets": {**sets, **({"not there": f"{', '.join(absent)} (fedflat data get NAME)"} if absent else {})},
    }


def _extras() -> dict[str, dict[str, str | None]]:
    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    return {name: {package: version(package) for package in packages} for name, packages in EXTRAS.items()}


def _self_test() -> Iterator[dict[str, Any]]:
    import torch

    with tempfile.TemporaryDirectory() as name:
        for what, check in CHECKS.items():
            if check is _on_the_gpu and not torch.cuda.is_available():
                continue
            begun = time.monotonic()
            try:
                problem = check(Path(name))
            except Exception as error:  # the report states any error
                problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            yield {"what": what, "problem": problem, "seconds": time.monotonic() - begun}


def _engines_agree(folder: Path) -> str:
    import torch

    import fedflat

    loop, lanes = (
        fedflat.run("fedmoswa", engine__name=name, **SMALL).record.models["server"].weights
        for name in ("loop", "lanes")
    )
    return "" if torch.allclose(loop, lanes, rtol=1e-4, atol=1e-6) else "the loop and the lane engine differ"


def _goes_on(folder: Path) -> str:
    import torch

    import fedflat

    undisturbed = fedflat.run("scaffold", **SMALL).record.models["server"].weights
    fedflat.run("scaffold", out=folder / "run", stop__seconds=1e-9, **SMALL)
    resumed = fedflat.resume(folder / "run")
    while resumed.status == "paused":
        resumed = fedflat.resume(folder / "run")
    return (
        "" if torch.equal(resumed.record.models["server"].weights, undisturbed) else "a resumed run ended differently"
    )


def _curves(folder: Path) -> str:
    import fedflat

    fedflat.run("fedavg", **SMALL).plot().savefig(folder / "curve.png")
    return "" if (folder / "curve.png").stat().st_size else "an empty picture was drawn"


def _on_the_gpu(folder: Path) -> str:
    import torch

    import fedflat

    here, there = (
        fedflat.run("fedsam", **{**SMALL, "device": device}).record.models["server"].weights.cpu()
        for device in ("cpu", "cuda")
    )
    return "" if torch.allclose(here, there, rtol=1e-2, atol=1e-3) else "the GPU and the CPU differ"


CHECKS: dict[str, Callable[[Path], str]] = {
    "loop and lane engines agree": _engines_agree,
    "a resumed run equals an uninterrupted one": _goes_on,
    "pictures are drawn": _curves,
    "the GPU agrees with the CPU": _on_the_gpu,
}
