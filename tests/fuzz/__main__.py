"""Run all cases in random order, or those whose command line contains all given texts.

python -m tests.fuzz [--log FILE] [TEXT ...]

Cases without a problem in the log are not repeated, so the command can be interrupted and continued.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

import torch

from tests.fuzz.cases import all_cases
from tests.fuzz.harness import preload, problem_of
from tests.fuzz.workspace import build


def main() -> int:
    """Try the cases and print the problems; returns the number of cases that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, default=Path("/dev/null"), help="file for the results, one per line")
    parser.add_argument("texts", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [case for case in all_cases() if all(text in str(case) for text in options.texts)]
    random.Random(0).shuffle(cases)
    logged = [json.loads(line) for line in options.log.read_text().splitlines()] if options.log.exists() else []
    passed = {entry["case"] for entry in logged if entry["problem"] is None}
    failed = 0
    with tempfile.TemporaryDirectory() as workspace, options.log.open("a") as log:
        build(Path(workspace))
        preload(Path(workspace))
        for number, case in enumerate(cases):
            if number % 500 == 0:
                print(f"{number} of {len(cases)} cases", flush=True)
            if str(case) in passed:
                continue
            problem = problem_of(case, Path(workspace))
            print(json.dumps({"case": str(case), "problem": problem}), file=log, flush=True)
            if problem is not None:
                failed += 1
                print(f"fedflat {case}\n    {problem}", flush=True)
    print(f"{len(cases)} cases tried, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main() > 0)
