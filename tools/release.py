"""Release a version: check the tree, set version and date, build and check the package, commit and tag.

    .venv/bin/python tools/release.py 0.1.0          show what would happen
    .venv/bin/python tools/release.py 0.1.0 --apply  do it

Pushing the tag publishes the version (.github/workflows/publish.yml).
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import check_package

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
"""MAJOR.MINOR.PATCH of semantic versioning."""


def main() -> None:
    """Prepare the release; without ``--apply``, leave every file and the repository unchanged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="MAJOR.MINOR.PATCH, e.g. 0.1.0")
    parser.add_argument("--apply", action="store_true", help="write the files, commit and tag")
    arguments = parser.parse_args()
    version, date = arguments.version, datetime.date.today().isoformat()
    require_releasable(version)
    changed = changed_files(version, date)
    for name in changed:
        print(f"update {name}")
    print(f"changelog of {version}:\n\n{notes(changed['CHANGELOG.md'], version)}\n")
    if not arguments.apply:
        check_package.main()
        print(f"nothing was changed; release {version} with --apply")
        return
    for name, text in changed.items():
        (ROOT / name).write_text(text, encoding="utf-8")
    check_package.main()  # if it fails, git restore undoes the changes
    git("commit", "--quiet", "--all", "--message", f"Release {version}")
    git("tag", "--annotate", f"v{version}", "--message", f"fedflat {version}")
    print(f"committed and tagged v{version}; publish it with: git push --atomic origin main v{version}")


def require_releasable(version: str) -> None:
    """Exit with a message unless this is a new, later version on a clean main branch."""
    if not VERSION.fullmatch(version):
        sys.exit(f"{version} is not a version; expected MAJOR.MINOR.PATCH, e.g. 0.1.0")
    if git("branch", "--show-current") != "main":
        sys.exit("releases are made from main; check it out first")
    if git("status", "--porcelain"):
        sys.exit("the working tree has changes; commit or stash them first")
    released = [tag.removeprefix("v") for tag in git("tag", "--list", "v*").split()]
    latest = max((numbers(tag) for tag in released if VERSION.fullmatch(tag)), default=(-1,))
    if numbers(version) <= latest:
        sys.exit(f"{version} is not later than {'.'.join(map(str, latest))}, which has been released")


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparisons.

    >>> numbers("0.10.0") > numbers("0.9.3")
    True
    """
    return tuple(map(int, version.split(".")))


def changed_files(version: str, date: str) -> dict[str, str]:
    """The new text of every file that states the version, by path; ``date`` is YYYY-MM-DD."""
    return {
        name: replaced(name, pattern, text)
        for name, pattern, text in (
            ("src/fedflat/__init__.py", r'^__version__ = ".*"$', f'__version__ = "{version}"'),
            ("CITATION.cff", r"^version: .*$", f"version: {version}"),
            ("CHANGELOG.md", r"^## .* \(unreleased\)$", f"## {version} ({date})"),
        )
    }


def replaced(name: str, pattern: str, text: str) -> str:
    """The text of a file with its only line that matches ``pattern`` replaced; exits if there is no such line."""
    changed, count = re.subn(pattern, text, (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    if count != 1:
        sys.exit(f"{name} has {count} lines that match {pattern}; expected one")
    return changed


def notes(changelog: str, version: str) -> str:
    """The changelog's section on a version; exits if it is empty.

    >>> notes("# Changelog\\n\\n## 0.2.0 (2026-01-31)\\n\\n- New.\\n\\n## 0.1.0\\n", "0.2.0")
    '- New.'
    """
    section = changelog.split(f"## {version}", 1)[1].partition("\n")[2].partition("\n## ")[0].strip()
    return section or sys.exit(f"CHANGELOG.md says nothing about {version}; list its changes first")


def git(*arguments: str) -> str:
    """Run git and return its output without surrounding spaces; exit with its message if it fails."""
    finished = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if finished.returncode:
        sys.exit(f"git {arguments[0]} failed: {finished.stderr.strip()}")
    return finished.stdout.strip()


if __name__ == "__main__":
    main()
