"""Run all cases, or those whose command line contains a text: ``python -m tests.fuzz [TEXT]``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from tests.fuzz.cases import all_cases
from tests.fuzz.harness import preload, problem_of
from tests.fuzz.workspace import build

if __name__ == "__main__":
    torch.set_num_threads(1)
    cases = [case for case in all_cases() if all(text in str(case) for text in sys.argv[1:])]
    preload()
    failed = 0
    with tempfile.TemporaryDirectory() as workspace:
        build(Path(workspace))
        for number, case in enumerate(cases):
            if number % 500 == 0:
                print(f"{number} of {len(cases)} cases", flush=True)
            problem = problem_of(case, Path(workspace))
            if problem is not None:
                failed += 1
                print(f"fedflat {case}\n    {problem}", flush=True)
    print(f"{len(cases)} cases tried, {failed} failed")
    sys.exit(failed > 0)
