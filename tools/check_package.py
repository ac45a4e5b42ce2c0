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
OUTSIDE = ("tests/", "docs/", "results/", "studies/", "notebooks/", "tools/")
"""What belongs to the project and not into a wheel."""


def main() -> None:
    """Build, look inside, install, try."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, wheel = build(folder)
        version = check_contents(source, wheel)
        python = install(wheel, folder / "env")
        try_out(python, version, folder)
    print(f"fedflat {version}: sdist and wheel are whole, and the wheel works")


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist of this tree, and the wheel of what that sdist holds."""
    call = f"from setuptools import build_meta; print(build_meta.build_sdist({str(folder)!r}))"
    said = run([sys.executable, "-c", call], ROOT)
    source = folder / said.split()[-1]
    run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, source],
        folder,
    )
    return source, next(folder.glob("*.whl"))


def check_contents(source: Path, wheel: Path) -> str:
    """Check that both archives are complete and the wheel holds only the package; returns the version."""
    wanted = {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as inside:
        there = set(inside.namelist())
    with tarfile.open(source) as archive:
        packed = {name.partition("/src/")[2] for name in archive.getnames()}
    for what, names in (("wheel", there), ("sdist", packed)):
        missing = sorted(wanted - names)
        assert not missing, f"the {what} lacks {', '.join(missing[:5])}"
    strays = sorted(name for name in there if name.startswith(OUTSIDE))
    assert not strays, f"the wheel holds {strays[0]}"
    assert "fedflat/py.typed" in there
    version = wheel.name.split("-")[1]
    cited = (ROOT / "CITATION.cff").read_text()
    assert f"version: {version}\n" in cited, f"CITATION.cff names another version than {version}"
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(), f"CHANGELOG.md says nothing of {version}"
    return version


def install(wheel: Path, env: Path) -> Path:
    """The python of a new environment with the wheel, which sees the dependencies that are installed here."""
    run([sys.executable, "-m", "venv", "--without-pip", env], ROOT)
    python = env / "bin" / "python"
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], ROOT).strip())
    run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel], ROOT)
    # Paths in a .pth file are searched, but their own .pth files are not read: an editable fedflat stays out of sight.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def try_out(python: Path, version: str, folder: Path) -> None:
    """The commands that a new user types first, and those that read files of the package."""
    fedflat = python.with_name("fedflat")
    where = run([python, "-c", "import fedflat; print(fedflat.__file__)"], folder)
    assert Path(where.strip()).is_relative_to(python.parents[1]), f"another fedflat is imported: {where}"
    assert run([fedflat, "--version"], folder) == f"fedflat {version}\n"
    run([fedflat, "run", "--rounds", "1", "--workers", "1", "--quiet", "--out", "run"], folder)
    run([fedflat, "report", "run", "--out", "page"], folder)
    assert "fedswa" in run([fedflat, "papers"], folder)


def run(command: list[str | Path], folder: Path) -> str:
    """What a command prints; what it says besides is shown where it fails."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
