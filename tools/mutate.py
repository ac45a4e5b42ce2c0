"""Mutation testing: change random expressions of the numerical code and check that a test fails.

    .venv/bin/python tools/mutate.py --seed 0 --count 10

A mutation is a wrong operator, sign, comparison or constant. Each is applied to a copy of the tree, and its
folder's tests run until one fails. If a mutation survives, either a test is missing or the mutation is equivalent.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = Path("src/fedflat")
TESTS: dict[str, tuple[str, ...]] = {
    "algorithms": (
        "tests/test_golden.py",
        "tests/algorithms",
        "tests/test_reference.py",
        "tests/testing",
        "src/fedflat/algorithms",
    ),
    "averaging": (
        "tests/test_golden.py",
        "tests/algorithms",
        "tests/reference",
        "tests/experiment/test_run.py",
        "src/fedflat/averaging",
    ),
    "engines/ray": ("tests/cluster", "src/fedflat/engines"),
    "engines": (
        "tests/test_golden.py",
        "tests/engines",
        "tests/experiment/test_run.py",
        "tests/experiment/test_partial_training.py",
        "tests/algorithms",
        "src/fedflat/engines",
    ),
    "flatness": (
        "tests/flatness",
        "src/fedflat/flatness",
        "tests/experiment/test_in_run_flatness.py",
        "tests/experiment/test_afterwards.py",
    ),
}
"""Which tests belong to which files, those that are likely to notice first; the first beginning that fits counts."""
TEXTS = ("cards.py", "__init__.py")
"""Files without arithmetic."""
LIMIT = 1800
"""Seconds after which a change that makes tests run on and on counts as noticed."""
OTHER: dict[type[ast.AST], type[ast.AST]] = {
    **{
        ast.Add: ast.Sub,
        ast.Sub: ast.Add,
        ast.Mult: ast.Div,
        ast.Div: ast.Mult,
        ast.FloorDiv: ast.Mult,
        ast.Mod: ast.Mult,
        ast.Pow: ast.Mult,
    },
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.And: ast.Or, ast.Or: ast.And},
}


@dataclass(frozen=True)
class Change:
    """One place of one file, and what it is changed to."""

    file: Path
    line: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.old}  ->  {self.new}"

    def made_in(self, tree: Path) -> None:
        """Write the changed file into a copy of the tree."""
        path = tree / self.file
        text = path.read_bytes()
        path.write_bytes(text[: self.start] + self.new.encode() + text[self.end :])


def changes(file: Path, text: str) -> Iterator[Change]:
    """Every change of a file that there could be.

    >>> [str(change) for change in changes(Path("a.py"), "y = x - 2 * z")]
    ['a.py:1: x - 2 * z  ->  x + 2 * z', 'a.py:1: 2 * z  ->  2 / z', 'a.py:1: 2  ->  3']
    """
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _numerical(ast.parse(text)):
        new = _changed(node)
        if new is None or node.end_lineno is None or node.end_col_offset is None:
            continue
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        yield Change(file, node.lineno, start, end, text.encode()[start:end].decode(), new)


def _numerical(node: ast.AST) -> Iterator[ast.expr]:
    """All numerical expressions, without annotations, strings, error messages, defaults and GPU-only code."""
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert)) or (
        isinstance(node, (ast.If, ast.IfExp)) and "cuda" in ast.unparse(node.test)
    ):
        return
    if isinstance(node, ast.expr):
        yield node
    skipped = {
        "annotation",
        "returns",
        "decorator_list",
        "slice" if isinstance(node, ast.Subscript) and _is_type(node) else "",
    }
    for name, value in ast.iter_fields(node):
        if name not in skipped:
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, ast.AST):
                    yield from _numerical(inner)


def _is_type(node: ast.Subscript) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in (
        "dict",
        "list",
        "tuple",
        "set",
        "type",
        "Callable",
        "Literal",
        "Sequence",
    )


def _changed(node: ast.expr) -> str | None:
    """The text of an expression with one thing wrong, where there is a thing to get wrong."""
    if isinstance(node, ast.BinOp) and type(node.op) in OTHER and not _is_text(node):
        return ast.unparse(ast.BinOp(node.left, OTHER[type(node.op)](), node.right))  # type: ignore[arg-type]
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OTHER:
        return ast.unparse(ast.Compare(node.left, [OTHER[type(node.ops[0])]()], node.comparators))  # type: ignore[list-item]
    if isinstance(node, ast.BoolOp):
        return ast.unparse(ast.BoolOp(OTHER[type(node.op)](), node.values))  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return ast.unparse(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return repr(node.value + 1)
    return None


def _is_text(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.walk(node))


def chosen(seed: int, count: int) -> list[Change]:
    """So many changes on random lines of all folders, one on each line."""
    by_line: dict[tuple[Path, int], list[Change]] = {}
    for folder in sorted({beginning.partition("/")[0] for beginning in TESTS}):
        for path in sorted((ROOT / SOURCE / folder).rglob("*.py")):
            if path.name not in TEXTS:
                file = path.relative_to(ROOT)
                for change in changes(file, path.read_text(encoding="utf-8")):
                    by_line.setdefault((file, change.line), []).append(change)
    draw = random.Random(seed)
    return [draw.choice(by_line[line]) for line in draw.sample(sorted(by_line), count)]


def noticed_by(change: Change) -> str | None:
    """The first test that fails after a change and not without it; none where it survives."""
    inside = change.file.relative_to(SOURCE).as_posix()
    tests = next(tests for beginning, tests in TESTS.items() if inside.startswith(beginning))
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        _copy(tree)
        before = (tree / change.file).read_bytes()
        change.made_in(tree)
        failed = _first_failure(tree, tests)
        (tree / change.file).write_bytes(before)
        if failed is not None and "::" in failed and _first_failure(tree, (failed,)) is not None:
            sys.exit(f"{failed} fails without any change; mend it first")
    return failed


def _copy(tree: Path) -> None:
    for part in ("src", "tests", "docs", "examples", "studies"):
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, tree / file)


def _first_failure(tree: Path, tests: tuple[str, ...]) -> str | None:
    """The first test that fails in a tree, or why there is no saying which."""
    command = [sys.executable, "-m", "pytest", *tests, "-x", "-q", "-p", "no:cacheprovider", "--no-header"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"nothing ends within {LIMIT} s"
    if done.returncode == 0:
        return None
    failed = re.search(r"^(FAILED|ERROR) (.*?)( - .*)?$", done.stdout, re.MULTILINE)
    return failed[2] if failed else f"pytest ends with {done.returncode}"


def main() -> None:
    """Make the changes and report each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="which lines")
    parser.add_argument("--count", type=int, default=10, help="how many")
    parser.add_argument("--list", action="store_true", help="only say which")
    arguments = parser.parse_args()
    survivors = 0
    for change in chosen(arguments.seed, arguments.count):
        print(change, flush=True)
        if not arguments.list:
            found = noticed_by(change)
            survivors += found is None
            print(f"    {f'noticed by {found}' if found else 'SURVIVED'}", flush=True)
    sys.exit(f"{survivors} of {arguments.count} survived" if survivors else 0)


if __name__ == "__main__":
    main()
