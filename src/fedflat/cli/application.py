"""The ``fedflat`` application with all commands."""

from __future__ import annotations

import shlex
from typing import Any

import typer
from typer.core import TyperOption

from fedflat import __version__
from fedflat.cli.experiments.bench import bench
from fedflat.cli.experiments.branch import branch
from fedflat.cli.experiments.clean import clean
from fedflat.cli.experiments.compare import compare
from fedflat.cli.experiments.deploy import deploy
from fedflat.cli.experiments.evaluate import evaluate
from fedflat.cli.experiments.export import export
from fedflat.cli.experiments.new import new
from fedflat.cli.experiments.report import report
from fedflat.cli.experiments.reproduce import reproduce
from fedflat.cli.experiments.run import resume, run
from fedflat.cli.experiments.show import show
from fedflat.cli.experiments.sweep import sweep
from fedflat.cli.experiments.tune import tune
from fedflat.cli.experiments.watch import watch
from fedflat.cli.flatness.group import flatness
from fedflat.cli.lookup.algorithms import algorithms
from fedflat.cli.lookup.data import data
from fedflat.cli.lookup.doctor import doctor
from fedflat.cli.lookup.models import models
from fedflat.cli.lookup.papers import papers
from fedflat.cli.lookup.settings import settings
from fedflat.cli.shared.error_reporting import errors_as_messages
from fedflat.cli.shared.flags import keep_argument_help
from fedflat.cli.shared.group import CommandGroup, NoSuchOption, UsageError
from fedflat.errors import UserError
from fedflat.plugins import VARIABLE, MissingPlugin, listed_plugins, load_plugins
from fedflat.setting_names import suggest_setting


class Application(CommandGroup):
    """A command group that reports errors as messages, and gives every command the option ``--plugin``."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        _add_plugin_option(self)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options of ``fedflat`` itself; keep the command line for error messages."""
        self._command_line = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Invoke a command and report its errors as messages, two of them with a remedy.

        If a plugin of a run is missing, the message contains the command with ``--plugin``. For another framework's
        option, such as ``--epochs``, it suggests ours.
        """
        with errors_as_messages():
            try:
                return super().invoke(ctx)
            except MissingPlugin as error:
                command = f"fedflat {shlex.join(self._command_line)} --plugin NEW_FOLDER/{error.path.name}"
                raise UserError(f"{error.problem}; restore the file, or pass its new path: {command}") from None
            except NoSuchOption as error:
                setting = suggest_setting(error.option_name)
                if setting is None or error.ctx is None:
                    raise
                flag = f"--{setting.replace('_', '-')}"
                if not any(flag in option.opts for option in error.ctx.command.params):  # not a flag of this command
                    raise
                raise UsageError(f"No such option '{error.option_name}'; did you mean '{flag}'?", error.ctx) from None


def _add_plugin_option(command: Any) -> None:
    """Add ``--plugin`` to a command, or to all commands of a group; the plugins are loaded before the command runs."""
    if hasattr(command, "commands"):
        for subcommand in command.commands.values():
            _add_plugin_option(subcommand)
        return
    call = command.callback
    if call is None:
        return

    def call_with_plugins(*, plugin: tuple[str, ...], **arguments: Any) -> Any:
        """Load the plugins of the environment variable and of ``--plugin``, then run the command."""
        load_plugins([*listed_plugins(), *plugin])
        return call(**arguments)

    help = f"Python file that registers your own components; repeatable (also: ${VARIABLE})"
    command.params.append(TyperOption(param_decls=["--plugin"], multiple=True, metavar="FILE.py", help=help))
    command.callback = call_with_plugins


keep_argument_help()
app = typer.Typer(
    cls=Application,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(is_requested: bool) -> None:
    """Handle ``--version``: print it and exit."""
    if is_requested:
        print(f"fedflat {__version__}")
        raise typer.Exit


@app.callback()
def fedflat(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="print the version and stop"
    ),
) -> None:
    """Federated learning that finds flat minima under heterogeneous data and measures how flat they are.

    Example: fedflat compare fedavg fedsam fedmoswa --rounds 50
    """


EXPERIMENTS, LOOKUP = "Experiments", "Looking things up"
"""Help panels."""
EXPERIMENT_COMMANDS = (run, compare, sweep, tune, branch, reproduce, resume, show, watch, report, evaluate, export)
for _command in (*EXPERIMENT_COMMANDS, new, clean, bench):
    app.command(rich_help_panel=EXPERIMENTS)(_command)
app.add_typer(flatness, name="flatness", rich_help_panel=EXPERIMENTS)
app.add_typer(deploy, name="deploy", rich_help_panel=EXPERIMENTS)
for _command in (algorithms, models, papers, settings, doctor):
    app.command(rich_help_panel=LOOKUP)(_command)
app.add_typer(data, name="data", rich_help_panel=LOOKUP)
