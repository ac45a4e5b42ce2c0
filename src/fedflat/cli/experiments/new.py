"""fedflat new: templates for user-defined algorithms, server optimisers, datasets and models."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from shlex import quote
from string import Template

import typer

from fedflat.cli.shared.flags import JSON
from fedflat.cli.shared.screen import print_json
from fedflat.errors import UserError, one_of
from fedflat.experiment.store.files import create_folder, write_atomically

TEMPLATES = Path(__file__).parents[1] / "templates"
RUN_ARGUMENTS = {
    "algorithm": "$name",
    "server": "fedavg+$name",
    "dataset": "fedavg --dataset $name",
    "model": "fedavg --model $name",
}
"""Arguments of ``fedflat run`` that use a component, by kind."""
CLASS_SUFFIXES = {"algorithm": "Drift", "server": "Optimiser", "dataset": "", "model": "Model"}
"""Suffix of the class name in each template; a name such as my-model may already end in it."""


def new(
    kind: str = typer.Argument(
        metavar="KIND",
        help="algorithm, server (optimiser), dataset or model",
        autocompletion=lambda: list(RUN_ARGUMENTS),
    ),
    name: str = typer.Argument(metavar="NAME", help="name to register, e.g. my-algorithm"),
    out: Path = typer.Option(Path(), "--out", metavar="FOLDER", help="folder for the two files"),
    as_json: bool = JSON,
) -> None:
    """Write a template for your own algorithm, server optimiser, dataset or model, with a test.

    Files are never overwritten.

    Example: fedflat new algorithm my-algorithm
    """
    if kind not in RUN_ARGUMENTS:
        raise one_of("kind", kind, RUN_ARGUMENTS)
    _require_free(kind, name)
    module = name.replace("-", "_").lower()
    title = "".join(word.capitalize() for word in re.split("[-_]", name)).removesuffix(CLASS_SUFFIXES[kind])
    files = {out / f"{module}.py": f"{kind}.py.txt", out / f"test_{module}.py": f"test_{kind}.py.txt"}
    for path in files:
        if path.exists():
            raise UserError(f"{path} already exists; choose another name or --out")
    if iskeyword(module) or module in sys.stdlib_module_names or find_spec(module):
        what = "a keyword of Python" if iskeyword(module) else "the name of an installed Python module"
        raise UserError(f"'{name}' is {what}; choose another name")
    create_folder(out)
    for path, template in files.items():
        text = Template((TEMPLATES / template).read_text(encoding="utf-8"))
        try:
            write_atomically(path, text.substitute(name=name, module=module, title=title))
        except UserError:
            for written in files:
                written.unlink(missing_ok=True)  # none of them existed before
            raise
    arguments = Template(RUN_ARGUMENTS[kind]).substitute(name=name)
    next_command = f"fedflat run {arguments} --plugin {quote(str(out / f'{module}.py'))} --rounds 5"
    if as_json:
        print_json({"files": list(files), "next": next_command})
        return
    for path in files:
        print(path)
    print(f"Next: {next_command}")


def _require_free(kind: str, name: str) -> None:
    """Raise a ``UserError`` if a name is malformed, or taken by another component of this kind."""
    from fedflat.algorithms.composition import PART_REGISTRIES
    from fedflat.algorithms.named import NAMED
    from fedflat.data import DATASETS
    from fedflat.models import MODELS

    algorithms_and_parts = (NAMED, *PART_REGISTRIES.values())
    registries = {
        "algorithm": algorithms_and_parts,
        "server": algorithms_and_parts,
        "dataset": (DATASETS,),
        "model": (MODELS,),
    }
    for registry in registries[kind]:
        registry.check_name(name)
        if registry.spelling(name):
            raise UserError(f"'{name}' is already the name of a registered {registry.kind}; choose another name")
