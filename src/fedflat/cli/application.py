"""The ``fedflat`` application with all commands."""

from __future__ import annotations

from typing import Any

import typer
from click import NoSuchOption, UsageError
from typer.core import TyperGroup

from fedflat import __version__
from fedflat.cli.experiments.bench import bench
from fedflat.cli.experiments.branch import branch
from fedflat.cli.experiments.clean import clean
from fedflat.cli.experiments.compare import compare
from fedflat.cli.experiments.deploy import deploy
from fedflat.cli.experiments.evaluate import evaluate
from fedflat.cli.experiments.export import export
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
from fedflat.experiment.setting_names import suggest_setting


class Application(TyperGroup):
    """A command group that reports errors as messages."""

    def invoke(self, ctx: Any) -> Any:
        """Invoke a command; for another framework's option, such as --epochs, the error suggests ours."""
        with errors_as_messages():
            try:
                return super().invoke(ctx)
            except NoSuchOption as error:
                setting = suggest_setting(error.option_name)
                if setting is None or error.ctx is None:
                    raise
                flag = f"--{setting.replace('_', '-')}"
                if not any(flag in option.opts for option in error.ctx.command.params):
                    raise
                raise UsageError(f"No such option '{error.option_name}'; did you mean '{flag}'?", error.ctx) from None


keep_argument_help()
app = typer.Typer(
    cls=Application,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(is_requested: bool) -> None:
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
for _command in (*EXPERIMENT_COMMANDS, clean, bench):
    app.command(rich_help_panel=EXPERIMENTS)(_command)
app.add_typer(flatness, name="flatness", rich_help_panel=EXPERIMENTS)
app.add_typer(deploy, name="deploy", rich_help_panel=EXPERIMENTS)
for _command in (algorithms, models, papers, settings, doctor):
    app.command(rich_help_panel=LOOKUP)(_command)
app.add_typer(data, name="data", rich_help_panel=LOOKUP)
