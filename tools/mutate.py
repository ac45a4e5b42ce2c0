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
        "tests/testing",
        "src/fedflat/algorithms",
    ),
    "averaging": (
        "tests/test_golden.py",
        "tests/algorithms",
        "tests/experiment/test_run.py",
        "src/fedflat/averaging",
    ),
    "engines/ray": ("tests/cluster", "src/fedflat/engines"),
    "engines": (
        "tests/test_golden.py",
        "tests/engines",
        "tests/experiment/test_run.py",
        "tests/experiment/test_batch_norm.py",
        "tests/experiment/test_partial_training.py",
        "tests/algorithms",
        "src/fedflat/engines",
    ),
    "flatness": (
        "tests/flatness",
        "src/fedflat/flatness",
        "tests/experiment/test_in_run_flatness.py",
        "tests/experiment/test_post_hoc.py",
    ),
}
"""Tests by folder, those most likely to fail first; the first folder that contains a file counts."""
SKIPPED = ("cards", "__init__.py")
"""Folders and files without arithmetic."""
TIMEOUT = 1800
"""Seconds after which a mutation that makes the tests hang counts as detected."""
WRONG_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
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
class Mutation:
    """A wrong expression in place of a right one; ``start`` and ``end`` are byte offsets in the file."""

    file: Path
    line: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.old}  ->  {self.new}"

    def apply(self, tree: Path) -> None:
        """Write the mutated file into a copy of the tree."""
        path = tree / self.file
        text = path.read_bytes()
        path.write_bytes(text[: self.start] + self.new.encode() + text[self.end :])


def mutations(file: Path, text: str) -> Iterator[Mutation]:
    """Yield every possible mutation of a file.

    >>> [str(mutation) for mutation in mutations(Path("a.py"), "y = x - 2 * z")]
    ['a.py:1: x - 2 * z  ->  x + 2 * z', 'a.py:1: 2 * z  ->  2 / z', 'a.py:1: 2  ->  3']
    """
    line_starts = [0]
    for line in text.encode().splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line))
    for node in _numerical(ast.parse(text)):
        new = _mutate(node)
        if new is None or node.end_lineno is None or node.end_col_offset is None:
            continue
        start = line_starts[node.lineno - 1] + node.col_offset
        end = line_starts[node.end_lineno - 1] + node.end_col_offset
        yield Mutation(file, node.lineno, start, end, text.encode()[start:end].decode(), new)


def _numerical(node: ast.AST) -> Iterator[ast.expr]:
    """Yield all numerical expressions, without annotations, strings, error messages, defaults and GPU-only code."""
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert)):
        return
    if isinstance(node, (ast.If, ast.IfExp)) and "cuda" in ast.unparse(node.test):
        return
    if isinstance(node, ast.expr):
        yield node
    skipped = {"annotation", "returns", "decorator_list"}
    if isinstance(node, ast.Subscript) and _is_type(node):
        skipped.add("slice")
    for name, value in ast.iter_fields(node):
        if name not in skipped:
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, ast.AST):
                    yield from _numerical(inner)


def _is_type(node: ast.Subscript) -> bool:
    """Whether a subscript is a type such as ``dict[str, int]``."""
    types = ("dict", "list", "tuple", "set", "type", "Callable", "Literal", "Sequence")
    return isinstance(node.value, ast.Name) and node.value.id in types


def _mutate(node: ast.expr) -> str | None:
    """Return the text of an expression with a wrong operator, sign or constant; None if it has none of them."""
    if isinstance(node, ast.BinOp) and type(node.op) in WRONG_OPERATORS and not _is_text(node):
        return ast.unparse(ast.BinOp(node.left, WRONG_OPERATORS[type(node.op)](), node.right))  # type: ignore[arg-type]
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in WRONG_OPERATORS:
        return ast.unparse(ast.Compare(node.left, [WRONG_OPERATORS[type(node.ops[0])]()], node.comparators))  # type: ignore[list-item]
    if isinstance(node, ast.BoolOp):
        return ast.unparse(ast.BoolOp(WRONG_OPERATORS[type(node.op)](), node.values))  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return ast.unparse(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return repr(node.value + 1)
    return None


def _is_text(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.walk(node))


def draw_mutations(seed: int, count: int) -> list[Mutation]:
    """Draw ``count`` mutations on random lines of all folders, one per line."""
    by_line: dict[tuple[Path, int], list[Mutation]] = {}
    for folder in sorted({tested.partition("/")[0] for tested in TESTS}):
        for path in sorted((ROOT / SOURCE / folder).rglob("*.py")):
            file = path.relative_to(ROOT)
            if not set(SKIPPED) & set(file.parts):
                for mutation in mutations(file, path.read_text(encoding="utf-8")):
                    by_line.setdefault((file, mutation.line), []).append(mutation)
    generator = random.Random(seed)
    return [generator.choice(by_line[line]) for line in generator.sample(sorted(by_line), count)]


def detecting_test(mutation: Mutation) -> str | None:
    """Return the first test that fails with a mutation and passes without it; None if the mutation survives."""
    path = mutation.file.relative_to(SOURCE).as_posix()
    tests = next(tests for folder, tests in TESTS.items() if path.startswith(folder))
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        _copy(tree)
        original = (tree / mutation.file).read_bytes()
        mutation.apply(tree)
        failed = _first_failure(tree, tests)
        (tree / mutation.file).write_bytes(original)
        if failed is not None and "::" in failed and _first_failure(tree, (failed,)) is not None:
            sys.exit(f"{failed} fails without any mutation; fix it first")
    return failed


def _copy(tree: Path) -> None:
    """Copy the parts of the project that tests need."""
    for part in ("src", "tests", "docs", "examples", "studies"):
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, tree / file)


def _first_failure(tree: Path, tests: tuple[str, ...]) -> str | None:
    """Return the first test that fails in a tree, or a message if it is unknown; None if all pass."""
    command = [sys.executable, "-m", "pytest", *tests, "-x", "-q", "-p", "no:cacheprovider", "--no-header"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        finished = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"timeout after {TIMEOUT} s"
    if finished.returncode == 0:
        return None
    failed = re.search(r"^(FAILED|ERROR) (.*?)( - .*)?$", finished.stdout, re.MULTILINE)
    return failed[2] if failed else f"exit status {finished.returncode} of pytest"


def main() -> None:
    """Test the mutations and report each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random lines")
    parser.add_argument("--count", type=int, default=10, help="number of mutations")
    parser.add_argument("--list", action="store_true", help="only list the mutations")
    arguments = parser.parse_args()
    survivors = 0
    for mutation in draw_mutations(arguments.seed, arguments.count):
        print(mutation, flush=True)
        if not arguments.list:
            test = detecting_test(mutation)
            survivors += test is None
            print(f"    {f'detected by {test}' if test else 'SURVIVED'}", flush=True)
    sys.exit(f"{survivors} of {arguments.count} survived" if survivors else 0)


if __name__ == "__main__":
    main()
