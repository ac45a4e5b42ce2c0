"""The ``fedflat`` application: all commands, and their errors and warnings as one-line messages with exit codes."""

from __future__ import annotations

import errno
import importlib
import json
import math
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import typer

from fedflat import __version__
from fedflat.cli import RUNS_FAILED, USER_ERROR, Interrupted, discard_output, interrupted_code
from fedflat.cli.shared.command_group import NAMES_FILE, CommandGroup, NoSuchOption, UsageError, keep_argument_help
from fedflat.errors import SomeFailed, UserError, system_reason
from fedflat.registry import PLUGINS_VARIABLE, MissingPlugin, listed_plugins, load_plugins
from fedflat.setting_names import MAX_COUNT, MAX_SEED, forbidden_character, suggest_setting

PACKAGE = Path(__file__).parents[1]
COMMANDS = {
    "Experiments": {
        "run": "experiments.run",
        "compare": "experiments.compare",
        "sweep": "experiments.sweep",
        "tune": "experiments.tune",
        "discover": "experiments.discover",
        "branch": "experiments.branch",
        "reproduce": "experiments.reproduce",
        "resume": "experiments.run",
        "show": "experiments.show",
        "watch": "experiments.watch",
        "report": "experiments.report",
        "evaluate": "experiments.evaluate",
        "export": "experiments.export",
        "new": "experiments.new",
        "clean": "experiments.clean",
        "bench": "experiments.bench",
        "flatness": "flatness.group",
        "deploy": "experiments.deploy",
    },
    "Looking things up": {
        "algorithms": "lookup.algorithms",
        "models": "lookup.models",
        "papers": "lookup.papers",
        "settings": "lookup.settings",
        "doctor": "lookup.doctor",
        "data": "lookup.data",
    },
}
"""For each panel of the help, its commands and their modules."""
OTHER_NAMES = {"--model": "average"}
"""Options that mean something else in other commands, with the parameter that was probably meant."""


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """Turn expected errors into one line on stderr and an exit code; print warnings of fedflat as one line each.

    Expected errors are user errors (``UserError``), Ctrl-C, and files or disks that cannot be used.
    """
    try:
        with _one_line_warnings():
            yield
    except UserError as error:
        raise _print_error(str(error), RUNS_FAILED if isinstance(error, SomeFailed) else USER_ERROR) from None
    except Interrupted as interruption:
        raise _print_error(f"interrupted; {interruption}", interrupted_code()) from None
    except KeyboardInterrupt:
        raise _print_error("interrupted", interrupted_code()) from None
    except BrokenPipeError:  # an OSError that main() handles
        raise
    except OSError as error:
        reason = system_reason(error)
        if error.filename is not None:
            raise _print_error(f"cannot use {error.filename}: {reason}", USER_ERROR) from None
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            discard_output()
            raise _print_error(f"cannot write output: {reason}", USER_ERROR) from None
        raise


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Print warnings of fedflat without source lines; leave others unchanged."""
    original = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], filename: str, *details: Any) -> None:
        """Replace ``warnings.showwarning``; ``details`` are line number, output file and source line."""
        if issubclass(category, UserWarning) and Path(filename).is_relative_to(PACKAGE):
            print(f"fedflat: {message}", file=sys.stderr)
        else:
            original(message, category, filename, *details)

    warnings.showwarning = show  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning = original


def _print_error(message: str, code: int) -> typer.Exit:
    """Print a message to stderr on one line; return the exception to raise, which exits with ``code``."""
    print(f"fedflat: {' '.join(message.split())}", file=sys.stderr)
    return typer.Exit(code)


class Application(CommandGroup):
    """A command group that reports errors as messages, and gives every command the option ``--plugin``."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        _add_plugin_option(self)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options of ``fedflat`` itself; keep the command line for error messages."""
        self._command_line = list(args)
        for forbidden in filter(None, map(forbidden_character, args)):
            raise UsageError(f"an argument contains {forbidden}; rename the file, or correct the command", ctx)
        with errors_as_messages():  # --version and --help print
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Invoke a command and report its errors as messages; three kinds of errors suggest a fix.

        If a plugin of a run is missing, the message contains the command with ``--plugin``. For another framework's
        option, such as ``--epochs``, it suggests ours. For the argument ``lr=0.1``, it suggests ``--set lr=0.1``.
        """
        with errors_as_messages():
            try:
                return super().invoke(ctx)
            except MissingPlugin as error:
                command = f"fedflat {shlex.join(self._command_line)} --plugin NEW_FOLDER/{error.path.name}"
                remedy = "restore the file, or pass its new path, with the same file name"
                raise UserError(f"{error.problem}; {remedy}: {command}") from None
            except NoSuchOption as error:
                setting = OTHER_NAMES.get(error.option_name) or suggest_setting(error.option_name)
                if setting is None or error.ctx is None:
                    raise
                flag = f"--{setting.replace('_', '-')}"
                if not any(flag in option.opts for option in error.ctx.command.params):  # not a flag of this command
                    raise
                raise UsageError(f"No such option '{error.option_name}'; did you mean '{flag}'?", error.ctx) from None
            except UsageError as error:
                assignment = re.search(r"unexpected extra argument.*?\((\S+=\S+)", error.message)
                options = error.ctx.command.params if error.ctx else ()
                if assignment and any("--set" in option.opts for option in options):
                    error.message = f"to change a setting, use --set {assignment[1].rstrip(')')}"
                raise


def _add_plugin_option(command: Any) -> None:
    """Add ``--plugin`` to a command, or to all commands of a group; the plugins are loaded before the command runs."""
    if hasattr(command, "commands"):
        for subcommand in command.commands.values():
            _add_plugin_option(subcommand)
        return
    call = command.callback
    if call is None:
        return

    def call_with_plugins(*, plugin: Sequence[str] | None, **arguments: Any) -> Any:
        """Load the plugins of the environment variable and of ``--plugin``, then run the command."""
        _check_numbers(command.params, arguments)
        load_plugins([*listed_plugins(), *(plugin or ())])
        return call(**arguments)

    for option in command.params:
        if getattr(option, "multiple", False) and str(option.metavar).endswith(",..."):
            _accept_commas(option)
    command.params.append(_plugin_option())
    command.callback = call_with_plugins


def _accept_commas(option: Any) -> None:
    """Let a repeatable option accept several values at once, as in ``--rho 0.05,0.1``."""
    process = option.process_value

    def split_and_process(ctx: Any, values: Any) -> Any:
        """Split texts at commas; a value that was not typed by the user is not a sequence of texts."""
        if isinstance(values, list | tuple) and all(isinstance(value, str) for value in values):
            values = tuple(part for value in values for part in value.rstrip(", ").split(","))
        return process(ctx, values)

    option.process_value = split_and_process


def _plugin_option() -> Any:
    """The option ``--plugin``, built by a dummy command because Typer's option classes differ between versions."""
    help = f"Python file that registers your own components; repeatable (also: ${PLUGINS_VARIABLE})"
    option_only = typer.Typer(add_completion=False)

    @option_only.command()
    def command(
        plugin: list[str] = typer.Option([], "--plugin", metavar="FILE.py", help=help, show_default=False),
    ) -> None:
        """Do nothing; only the option is used."""

    return typer.main.get_command(option_only).params[0]


def _check_numbers(options: Sequence[Any], arguments: dict[str, Any]) -> None:
    """Reject numbers that are NaN, infinite or too large in the options of a command."""
    flags = {option.name: option.opts[0] for option in options}
    for name, value in arguments.items():
        for number in value if isinstance(value, list | tuple) else [value]:
            flag = flags[name]
            if isinstance(number, float) and not math.isfinite(number):
                raise UserError(f"{flag} {number} is invalid; expected a finite number")
            largest = MAX_SEED if name.endswith("seed") else MAX_COUNT
            if isinstance(number, int) and number > largest:
                raise UserError(f"{flag} {number} is too large; expected at most {largest}")


def _print_version(is_requested: bool) -> None:
    """Handle ``--version``: print it and exit."""
    if is_requested:
        print(f"fedflat {__version__}")
        raise typer.Exit


def fedflat(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="print the version and stop"
    ),
) -> None:
    """Federated learning that finds flat minima under heterogeneous data and measures how flat they are.

    Example: fedflat compare fedavg fedsam fedmoswa --rounds 50
    """


def build(words: Sequence[str] | None = None) -> typer.Typer:
    """Build the application.

    Args:
        words: the command line, whose command is imported. Other commands are listed in the help but not imported,
            which saves about a sixth of the time of importing torch. Default: all commands can be called.
    """
    app = typer.Typer(
        cls=Application,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(fedflat)
    summaries = {} if words is None else json.loads(NAMES_FILE.read_text(encoding="utf-8"))["command"]
    for panel, modules in COMMANDS.items():
        for name, module in modules.items():
            if words is not None and name not in words:
                app.command(name, help=summaries[name], rich_help_panel=panel)(_not_imported)
                continue
            command = getattr(importlib.import_module(f"fedflat.cli.{module}"), name)
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name, rich_help_panel=panel)
            else:
                app.command(rich_help_panel=panel)(command)
    return app


def _not_imported() -> None:
    """Placeholder for a command that is listed but not imported."""


@cache
def __getattr__(name: str) -> Any:
    """Build ``app``, the application with all commands, when it is first used."""
    if name == "app":
        return build()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


keep_argument_help()
