"""Run a case in a forked process with limits on time and memory, and say what is wrong with its outcome."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import pkgutil
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import typer

import fedflat
from fedflat.cli.application import app
from fedflat.cli.shared.one_run import draw_curve
from fedflat.errors import UserError
from fedflat.experiment.config import parse_config
from fedflat.papers.cost import speeds
from fedflat.papers.library import papers
from fedflat.reporting.result import Result
from tests.fuzz.cases import VALID, Case, command_line
from tests.fuzz.workspace import WRONG_CONTENT, damage
from tests.time_limits import scaled

SECONDS = 20
BYTES = 2 << 30
COMMAND = typer.main.get_command(app)
_FAILED = 99
"""Exit code of the child process if the command raised an exception."""


def preload(workspace: Path) -> None:
    """Import all of fedflat that is installed and what calls of every command import; forked processes then need not.

    Also fill caches of parsed algorithms, of the papers' settings and of text sizes in figures.
    """
    for module in pkgutil.walk_packages(fedflat.__path__, "fedflat."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError, UserError):
                importlib.import_module(module.name)
    wrong_call = Case(("run", "--rounds=many"))
    for case in (*(Case(command_line(name)) for name in VALID), wrong_call):
        with tempfile.NamedTemporaryFile("r") as modules:
            problem_of(case, workspace, modules.name)
            for module_name in modules.read().split():
                with contextlib.suppress(Exception):
                    importlib.import_module(module_name)
    for text in ("fedavg", "fedsam"):
        parse_config({"algorithm": text})
    speeds()
    for table in papers()["fedswa"].tables.values():
        all(cell.configs for cell in table.cells.values())
    draw_curve(Result.load(workspace / "run"))
    gc.freeze()  # collections in forked processes then copy fewer pages


def problem_of(case: Case, workspace: Path, modules: str | None = None) -> str | None:
    """What is wrong with the outcome of a case in a copy of ``workspace``; None if nothing is.

    The names of all modules imported by the case are written to the file ``modules``, if it is given.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "parent", "work")  # the hostile value ../.. stays in ``scratch``
        shutil.copytree(workspace, folder)
        if case.damage is not None:
            damage(folder / case.damage[0], case.damage[1], str(case))
        if case.wrong_content is not None:
            WRONG_CONTENT[case.wrong_content][0](folder)
        output = Path(scratch, "output")
        output.touch()
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            _run_in_child(case, folder, output, modules)
        return _judge(case, child, output)


def _run_in_child(case: Case, folder: Path, output: Path, modules: str | None) -> None:
    """Run the command and exit: with its exit code, or with ``_FAILED`` and a traceback in ``output``."""
    code = _FAILED
    try:
        os.setsid()
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + BYTES, in_use + BYTES))
        stream = output.open("w", errors="replace", buffering=1)
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        sys.stdin = io.StringIO("")
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            try:
                COMMAND(list(case.arguments), prog_name="fedflat")
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                traceback.print_exc()
        if modules is not None:
            Path(modules).write_text("\n".join(sys.modules))
    finally:
        os._exit(code)


def _judge(case: Case, child: int, output: Path) -> str | None:
    """Wait for the child process and check its exit code, time, memory and output."""
    deadline = time.monotonic() + scaled(SECONDS)
    while True:
        ended, status, used = os.wait4(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.wait4(child, 0)
            return f"ran for more than {SECONDS} seconds"
        time.sleep(0.002)
    text = output.read_text(errors="replace")
    last_line = text.strip().rpartition("\n")[2][:300]
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGXCPU:
        return f"computed for more than {SECONDS} seconds"
    if code < 0:
        return f"was ended by signal {-code}: {last_line}"
    if code == _FAILED or "Traceback (most recent call last)" in text:
        return f"raised {last_line or 'an exception'}"
    if used.ru_maxrss * 1024 > BYTES:
        return f"used {used.ru_maxrss >> 10} MB of memory"
    if case.is_nonsense and code == 0:
        return f"was accepted: {last_line}"
    if case.wrong_content is not None:
        expected = WRONG_CONTENT[case.wrong_content][1]
        if expected not in "".join(text.split()):
            return f"does not mention {expected}: {last_line}"
    return None
