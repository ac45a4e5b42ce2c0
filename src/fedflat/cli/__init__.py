"""The command line: one file per group of commands."""

from fedflat.cli.application import app, main

__all__ = ["app", "main"]
