"""Write constraints.txt: the exact versions of a clean installation of the development environment.

    make lock

torch is pinned here, because the newest build brings CUDA packages; everything else is the newest version that
pyproject.toml allows. Review the difference before committing it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINNED = "torch==2.13.0"
EXTRAS = ".[dev]"
HEADER = """\
# The development environment, exactly: set-up (make, CI) installs with -c constraints.txt. Written by `make lock`.
# torch is pinned in tools/lock.py, so that set-up takes one known build instead of the newest with its CUDA packages.
"""


def main() -> None:
    """Install into a fresh environment and write the installed versions to constraints.txt."""
    with tempfile.TemporaryDirectory() as name:
        pins = Path(name) / "pins.txt"
        pins.write_text(f"{PINNED}\n")
        subprocess.run([sys.executable, "-m", "venv", f"{name}/env"], check=True)
        pip = [f"{name}/env/bin/python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "install", "-c", pins, "-e", EXTRAS], check=True, cwd=ROOT)
        frozen = subprocess.run(
            [*pip, "freeze", "--all", "--exclude-editable", "--exclude", "pip"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    (ROOT / "constraints.txt").write_text(HEADER + "".join(f"{line}\n" for line in versions(frozen)))


def versions(frozen: str) -> list[str]:
    """Return the sorted ``name==version`` lines of ``pip freeze``, without build labels, paths and URLs.

    >>> versions("torch==2.13.0+cpu\\nfedflat @ file:///here\\nnumpy==2.4.6\\n")
    ['numpy==2.4.6', 'torch==2.13.0']
    """
    pairs = (line.split("==") for line in frozen.splitlines() if "==" in line and "@" not in line)
    return sorted((f"{name}=={version.partition('+')[0]}" for name, version in pairs), key=str.lower)


if __name__ == "__main__":
    main()
