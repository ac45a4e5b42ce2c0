"""The shell completes commands, flags and the names of algorithms."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fedflat.algorithms.named import NAMED
from fedflat.cli.shared.flags import algorithm_names


def completed(words: str) -> list[str]:
    environment = {
        **os.environ,
        "_FEDFLAT_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    call = "from fedflat.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", call], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()


def test_all_names_are_offered():
    assert algorithm_names("") == list(NAMED)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("fedflat do", ["doctor"]),
        ("fedflat compare fedavg fedlesam-", ["fedlesam-s", "fedlesam-d"]),
        ("fedflat run --init-h", ["--init-head"]),
    ],
)
def test_completions_in_a_shell(words, expected):
    assert completed(words) == expected
