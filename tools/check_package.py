"""Build sdist and wheel, install the wheel into a fresh environment as a user would, and test it.

    make package

A user's pip installs the newest versions of the dependencies, while the other tests use those of constraints.txt. The
fresh environment therefore has the newest versions, except for torch. It reuses installed packages that are up to date.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "fedflat"
NOT_PACKAGED = ("tests/", "docs/", "results/", "studies/", "notebooks/", "tools/")
"""Folders of the project that must not be in a wheel."""


def main() -> None:
    """Build both archives, check their contents, install the wheel and run it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, wheel = build(folder)
        version = check_contents(source, wheel)
        python = install(wheel, folder / "env")
        print("newest dependencies that differ from the tested ones:", ", ".join(upgrade(python)) or "none")
        run_first_commands(python, version, folder)
    print(f"fedflat {version}: sdist and wheel are complete, and the wheel works")


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist of this tree, and the wheel from that sdist; return both paths."""
    call = f"from setuptools import build_meta; print(build_meta.build_sdist({str(folder)!r}))"
    output = run([sys.executable, "-c", call], ROOT)
    source = folder / output.split()[-1]  # setuptools prints its log first and then the file name
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run([*pip_wheel, "-w", folder, source], folder)
    return source, next(folder.glob("*.whl"))


def check_contents(source: Path, wheel: Path) -> str:
    """Check that both archives are complete and the wheel holds only the package; returns the version."""
    expected = {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    with tarfile.open(source) as archive:
        in_sdist = {name.partition("/src/")[2] for name in archive.getnames()}
    for kind, names in (("wheel", in_wheel), ("sdist", in_sdist)):
        missing = sorted(expected - names)
        assert not missing, f"the {kind} lacks {', '.join(missing[:5])}"
    strays = sorted(name for name in in_wheel if name.startswith(NOT_PACKAGED))
    assert not strays, f"the wheel contains {strays[0]}"
    assert "fedflat/py.typed" in in_wheel
    version = wheel.name.split("-")[1]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {version}\n" in citation, f"CITATION.cff has a version other than {version}"
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(), f"CHANGELOG.md has no section on {version}"
    return version


def install(wheel: Path, env: Path) -> Path:
    """Install the wheel into a new environment that also sees the dependencies installed here; return its Python."""
    run([sys.executable, "-m", "venv", "--without-pip", env], ROOT)
    python = env / "bin" / "python"
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], ROOT).strip())
    run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel], ROOT)
    # Python searches the paths in a .pth file but does not read .pth files there, so an editable fedflat is not found.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def upgrade(python: Path) -> list[str]:
    """Install newer versions of fedflat's dependencies into an environment, as far as they exist; return them.

    Torch keeps its version, because its other builds need gigabytes of CUDA packages.
    """
    torch = f"torch=={metadata.version('torch')}"
    required = [line for line in metadata.requires("fedflat") or [] if "extra ==" not in line]
    packages = [torch if line.startswith("torch") else line for line in required]
    # Python compiles modules when they are first imported; pip would compile all of them.
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
    run([*pip, "--upgrade", *packages], ROOT)
    installed = run([sys.executable, "-m", "pip", "--python", python, "freeze", "--local"], ROOT)
    return [line for line in installed.splitlines() if not line.startswith("fedflat")]


def run_first_commands(python: Path, version: str, folder: Path) -> None:
    """Check that the installed fedflat is the one in use, and run the commands that a new user types first."""
    fedflat = python.with_name("fedflat")
    imported = run([python, "-c", "import fedflat; print(fedflat.__file__)"], folder)
    assert Path(imported.strip()).is_relative_to(python.parents[1]), f"another fedflat is imported: {imported}"
    assert run([fedflat, "--version"], folder) == f"fedflat {version}\n"
    run([python, ROOT / "tools" / "first_commands.py"], folder)


def run(command: list[str | Path], folder: Path) -> str:
    """Run a command and return its output; exit with all of its output if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{finished.stdout}{finished.stderr}")
    return finished.stdout


if __name__ == "__main__":
    main()
