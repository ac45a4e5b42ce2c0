"""Build sdist and wheel, install the wheel into a fresh environment, and test it.

    make package

The fresh environment reuses the installed dependencies, so nothing is downloaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
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


def run_first_commands(python: Path, version: str, folder: Path) -> None:
    """Run the commands that a new user types first, and those that read files of the package."""
    fedflat = python.with_name("fedflat")
    imported = run([python, "-c", "import fedflat; print(fedflat.__file__)"], folder)
    assert Path(imported.strip()).is_relative_to(python.parents[1]), f"another fedflat is imported: {imported}"
    assert run([fedflat, "--version"], folder) == f"fedflat {version}\n"
    run([fedflat, "run", "--rounds", "1", "--workers", "1", "--quiet", "--out", "run"], folder)
    run([fedflat, "report", "run", "--out", "page"], folder)
    assert "fedswa" in run([fedflat, "papers"], folder)


def run(command: list[str | Path], folder: Path) -> str:
    """Run a command and return its output; exit with all of its output if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{finished.stdout}{finished.stderr}")
    return finished.stdout


if __name__ == "__main__":
    main()
