"""Virtual environments for other simulators, whose dependencies may conflict with fedflat's and with each other."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from fedflat.bench.peers import Simulator
from fedflat.errors import UserError
from fedflat.experiment.store.files import create_folder, write_atomically

SHARED_REQUIREMENTS = (
    f"torch=={torch.__version__.partition('+')[0]}",  # every contender trains with the same version
    "numpy",
    "scipy",
    "pydantic>=2.6,<3",
    "safetensors",
    "filelock",
    "pyyaml",
)
"""Packages that drivers need to build the model and the data, in every environment."""
VERSIONS_FILE = "fedflat-peer.json"
PRINT_VERSIONS = """
import json, platform, sys
from importlib.metadata import version
print(json.dumps({"python": platform.python_version()} | {name: version(name) for name in sys.argv[1:]}))
"""


def install(simulator: type[Simulator], folder: Path, show_progress: Callable[[str], None]) -> None:
    """Create the environment of a simulator in ``folder`` unless it exists.

    Raises:
        UserError: no suitable Python was found, or the installation failed.
    """
    requirements, versions_file = [*simulator.requirements, *SHARED_REQUIREMENTS], folder / VERSIONS_FILE
    with suppress(OSError, ValueError, KeyError):  # not installed, or interrupted
        is_complete = json.loads(versions_file.read_text())["requirements"] == requirements
        if is_complete and (folder / "bin" / "python").exists():  # a link to a Python that may have been removed
            return
    interpreter = find_python(simulator)
    show_progress(f"{simulator.name}: installing {', '.join(simulator.requirements)} into {folder}")
    create_folder(folder.parent)
    _run([interpreter, "-m", "venv", "--clear", str(folder)])
    python = str(folder / "bin" / "python")
    _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements])
    versions = json.loads(_run([python, "-c", PRINT_VERSIONS, *simulator.packages, "torch"]))
    write_atomically(versions_file, json.dumps({"requirements": requirements, "versions": versions}))


def installed_versions(folder: Path) -> dict[str, str]:
    """Return the versions of Python, the simulator and torch in the environment ``folder``."""
    return dict(json.loads((folder / VERSIONS_FILE).read_text())["versions"])


def find_python(simulator: type[Simulator]) -> str:
    """Return the running interpreter if the simulator supports it, otherwise the newest suitable one on the PATH."""
    first, last = simulator.pythons
    if first <= sys.version_info.minor <= last:
        return sys.executable
    for minor in range(last, first - 1, -1):
        command = shutil.which(f"python3.{minor}")
        # A command may exist and fail, such as pyenv's for a version that is not selected.
        if command and subprocess.run([command, "-c", ""], capture_output=True, check=False).returncode == 0:
            return command
    raise UserError(f"needs Python 3.{first} to 3.{last}; put one on the PATH, e.g. as python3.{first}")


def _run(command: Sequence[str]) -> str:
    """Run a command and return its output; raises a ``UserError`` with the last line of its errors if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or [f"exit code {result.returncode}"]
        raise UserError(f"could not be installed: {errors[-1].strip()}")
    return result.stdout
