"""Reference pages of the Python API, from signatures and docstrings."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from making.markdown import about, arguments, block, default_text, joined, summary, type_text

ATTRIBUTES = re.compile(r"\n*^Attributes:\n+(?:(?: {4}|- ).*\n?)+", re.MULTILINE)
"""The Attributes section of a docstring as Markdown."""


class Page(NamedTuple):
    """A reference page: title, introduction, and names, each ``module:name`` or a module for all of its ``__all__``."""

    title: str
    intro: str
    names: tuple[str, ...]


PAGES = {
    "python": Page(
        "fedflat",
        "This page lists the names that `import fedflat` provides. [Settings](settings.md) have full names "
        "(`training__lr_decay=0.998`), and the common ones also short names (`rounds=50`).",
        ("fedflat",),
    ),
    "results": Page(
        "Results",
        "This page describes the objects that `run`, `compare`, `sweep`, `resume` and `load` return.",
        (
            "fedflat.reporting.result:Result",
            "fedflat.reporting.comparison:Comparison",
            "fedflat.reporting.row:Row",
            "fedflat.reporting.tables.summary:Summary",
            "fedflat.experiment.store.run_folder:Record",
            "fedflat.experiment.analysis.evaluation:Evaluation",
            "fedflat.experiment.analysis.run_model:RunModel",
            "fedflat.experiment.analysis.post_hoc:PostHoc",
        ),
    ),
    "algorithms": Page(
        "Algorithms and slots",
        "This page describes the classes that an algorithm consists of, and the methods that a slot may define "
        "([how to write your own](../own-algorithm.md)).",
        (
            "fedflat.algorithms.slot:Drift",
            "fedflat.algorithms.slot:Perturbation",
            "fedflat.algorithms.local_optimiser.base:LocalOptimiser",
            "fedflat.algorithms.descent:Descent",
            "fedflat.algorithms.lr_schedule:LrSchedule",
            "fedflat.algorithms.lr_schedule:Schedule",
            "fedflat.algorithms.server:Sgd",
            "fedflat.algorithms.start:Start",
            "fedflat.algorithms.weights.base:Weights",
            "fedflat.algorithms.slot:Slot",
            "fedflat.algorithms.slot:LocalContext",
            "fedflat.algorithms.slot:CohortMeans",
            "fedflat.algorithms.state:Field",
            "fedflat.algorithms.state:vector",
            "fedflat.algorithms.state:scalar",
            "fedflat.algorithms.slot:unit",
            "fedflat.text:param",
        ),
    ),
    "averaging": Page(
        "Averages",
        "Averages of the server model over rounds are evaluated, but never fed back into training.",
        ("fedflat.averaging",),
    ),
    "data": Page(
        "Data and partitions",
        "This page describes datasets, your own arrays, partitions and augmentations.",
        ("fedflat.data",),
    ),
    "models": Page(
        "Models", "Networks by name, and partial training.", ("fedflat.models", "fedflat.models.layout:Layout")
    ),
    "tasks": Page(
        "Tasks and callbacks",
        "A task defines loss and metrics ([how to write your own](../how-to/bring-your-own.md)); callbacks observe a run.",
        (
            "fedflat.engines.problem.task:Task",
            "fedflat.engines.problem.task:PooledTask",
            "fedflat.engines.problem.task:Classification",
            "fedflat.engines.problem.regression:Regression",
            "fedflat.engines.problem.regression:Huber",
            "fedflat.engines.problem.multilabel:MultiLabel",
            "fedflat.engines.problem.text:TokenPrediction",
            "fedflat.engines.problem.text:F1Classification",
            "fedflat.engines.problem.segmentation:Segmentation",
            "fedflat.experiment.callback:Callback",
        ),
    ),
    "flatness": Page(
        "Flatness",
        "These functions measure curvature, sharpness and loss landscapes of any `torch.nn.Module`, loss and data.",
        ("fedflat.flatness",),
    ),
    "landscapes": Page(
        "Landscapes of runs",
        "These functions compute and draw loss landscapes of the models of runs: around a model, on a plane, and on a path.",
        (
            "fedflat.experiment.analysis.run_model:open_model",
            "fedflat.experiment.analysis.landscapes:landscapes",
            "fedflat.experiment.analysis.landscapes:plane",
            "fedflat.experiment.analysis.landscapes:path",
            "fedflat.experiment.analysis.landscapes:save_landscapes",
            "fedflat.experiment.analysis.landscapes:load_landscapes",
            "fedflat.reporting.figures.landscapes:Panel",
            "fedflat.reporting.figures.landscapes:contours",
            "fedflat.reporting.figures.landscapes:surfaces",
            "fedflat.reporting.figures.landscapes:lines",
            "fedflat.reporting.figures.landscapes:plane_picture",
            "fedflat.reporting.figures.landscapes:path_picture",
        ),
    ),
    "papers": Page(
        "Papers",
        "These classes hold the protocols, tables and figures of four papers, cell by cell ([overview](../papers.md)).",
        ("fedflat.papers",),
    ),
    "deploy": Page(
        "Deployment",
        "`client_app` and `server_app` make up a Flower project ([real sites](../deploy.md)); `Strategy`, `client` and `LocalSteps` "
        "belong in an [existing Flower app](../flower-app.md). The package requires the extra `flower`.",
        ("fedflat.deploy",),
    ),
    "testing": Page(
        "Testing",
        "Some of these functions check user-defined algorithms, models, datasets and partitions. The others create "
        "example inputs, so that a test can call a single method of a [part](../algorithms/parts.md) of an algorithm.",
        ("fedflat.testing",),
    ),
}


def pages() -> dict[str, str]:
    """The reference pages by path."""
    return {f"reference/{name}.md": reference_page(page) for name, page in PAGES.items()}


def reference_page(page: Page) -> str:
    """A page with an entry for each of its names."""
    lines = [f"# {page.title}", "", page.intro, ""]
    for module, name in names_of(page):
        lines += _entry(module, name)
    return joined(lines)


def names_of(page: Page) -> Iterator[tuple[str, str]]:
    """Every (module, name) of a page; of whole modules functions first, then classes, then constants."""
    for text in page.names:
        module, _, name = text.partition(":")
        if name:
            yield module, name
            continue
        found = importlib.import_module(module)
        public = [each for each in found.__all__ if not each.startswith("__")]
        yield from ((module, each) for each in sorted(public, key=lambda each: _rank(getattr(found, each))))


def _rank(value: Any) -> int:
    return 0 if inspect.isroutine(value) or hasattr(value, "__wrapped__") else 1 if inspect.isclass(value) else 2


def _entry(module: str, name: str) -> list[str]:
    found = importlib.import_module(module)
    if not hasattr(found, name):
        raise ValueError(f"docs/making/python_api.py lists {module}:{name}, which does not exist; update PAGES")
    value = inspect.unwrap(getattr(found, name))  # a cached function is shown like the function
    lines = [f"## {name}", ""]
    if inspect.isclass(value):
        return lines + _class(name, value, module)
    if inspect.isfunction(value):
        return [*lines, *block(signature(name, value).splitlines(), "py"), about(value), "", *_import(module, name)]
    kind, meaning = constants(module).get(name, (type(value).__name__, ""))
    text = [meaning.replace("``", "`"), ""] if meaning else []
    return [*lines, *block([f"{name}: {kind}"], "py"), *text, *_import(module, name)]


def _import(module: str, name: str) -> list[str]:
    where = f"fedflat.{name}" if module == "fedflat" else f"from {module} import {name}"
    return [f"<small>`{where}`</small>", ""]


def _class(name: str, value: type, module: str) -> list[str]:
    shown = signature(name, value.__init__) if _has_own_init(value) else name
    text = ATTRIBUTES.sub("\n", about(value)).rstrip()  # described at each field instead
    lines = [*block(f"class {shown}".splitlines(), "py"), text, "", *_import(module, name)]
    for field, (kind, meaning) in fields(value).items():
        lines.append(f"- **`{field}`** : `{kind}`" + (f". {meaning}" if meaning else ""))
    for attribute, member in members(value):
        if isinstance(member, property):
            kind = inspect.signature(member.fget).return_annotation if member.fget else ""  # type: ignore[arg-type]
            lines.append(f"- **`{attribute}`** : `{type_text(kind)}`. {summary(member)}")
        else:
            function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            shown = signature(attribute, function, bound=not isinstance(member, staticmethod), one_line=True)
            lines.append(f"- **`{shown}`**. {summary(function)}")
            if described := arguments(function):
                lines += ["", *(f"    {line}".rstrip() for line in described)]
    return [*lines, ""]


def _has_own_init(value: type) -> bool:
    return (
        inspect.isfunction(value.__dict__.get("__init__"))
        and not dataclasses.is_dataclass(value)
        and not getattr(value, "_is_protocol", False)
    )


def members(value: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class itself defines; a field whose default is a function is neither."""
    annotations = vars(value).get("__annotations__", {})
    for name, member in vars(value).items():
        if name in annotations:
            continue
        documented = isinstance(member, (property, classmethod, staticmethod)) or inspect.isfunction(member)
        if documented and not name.startswith("_"):
            yield name, member


def fields(value: type) -> dict[str, tuple[str, str]]:
    """The annotated fields of a class: type and meaning.

    The meaning is the string below a field, the help of ``param``, or the entry in the docstring's Attributes section.
    """
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    except (OSError, TypeError, SyntaxError):
        return {}
    if not isinstance(tree, ast.ClassDef):
        return {}
    described = _attributes(value)
    return {
        name: (kind, meaning or described.get(name, ""))
        for name, (kind, meaning) in annotated(tree.body)
        if not name.startswith("_")
    }


def _attributes(value: type) -> dict[str, str]:
    """The entries of the Attributes section of a class's docstring, as sentences by name."""
    section = re.search(r"^Attributes:\n((?: {4}.*\n?)+)", inspect.getdoc(value) or "", re.MULTILINE)
    if section is None:
        return {}
    entries = re.findall(r"^(\w+): (.*(?:\n +.*)*)", textwrap.dedent(section[1]), re.MULTILINE)
    texts = {name: " ".join(text.replace("``", "`").split()) for name, text in entries}
    return {name: f"{text[:1].upper()}{text[1:].rstrip('.')}." for name, text in texts.items()}


def annotated(body: list[ast.stmt]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Assigned names with their type and meaning."""
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, (ast.AnnAssign, ast.Assign)):
            continue
        target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
        if isinstance(target, ast.Name):
            kind = ast.unparse(statement.annotation) if isinstance(statement, ast.AnnAssign) else ""
            yield target.id, (kind, _meaning(statement, following))


def _meaning(statement: ast.Assign | ast.AnnAssign, following: ast.stmt | None) -> str:
    text = getattr(following.value, "value", None) if isinstance(following, ast.Expr) else None
    if isinstance(text, str):
        return " ".join(text.replace("``", "`").split())
    call = statement.value
    if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "param":
        texts = [part.value for part in call.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        return texts[-1][:1].upper() + texts[-1][1:] + "." if texts else ""
    return ""


@cache
def constants(module: str) -> dict[str, tuple[str, str]]:
    """The constants that a module defines or imports from fedflat: type and meaning."""
    found: dict[str, tuple[str, str]] = {}
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and statement.module and statement.module.startswith("fedflat"):
            names = {alias.name for alias in statement.names if alias.name.isupper()}
            if names:
                found |= {name: entry for name, entry in constants(statement.module).items() if name in names}
    return found | {name: (kind or _value_type(module, name), text) for name, (kind, text) in annotated(tree.body)}


def _value_type(module: str, name: str) -> str:
    return type(getattr(importlib.import_module(module), name, None)).__name__


def signature(name: str, function: Any, *, bound: bool = True, one_line: bool = False) -> str:
    """A signature as source code, one parameter per line if it is long."""
    found = inspect.signature(function)
    parameters = [p for p in found.parameters.values() if not (bound and p.name in ("self", "cls"))]
    shown = [_parameter(p) for p in parameters]
    for position, p in enumerate(parameters):
        if p.kind is p.KEYWORD_ONLY and not any(o.kind is o.VAR_POSITIONAL for o in parameters):
            shown.insert(position, "*")
            break
    result = found.return_annotation
    arrow = "" if result in (found.empty, None, "None") or name == "__init__" else f" -> {type_text(result)}"
    line = f"{name}({', '.join(shown)}){arrow}"
    if one_line or len(line) <= 96:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in shown), f"){arrow}"])


def _parameter(p: inspect.Parameter) -> str:
    stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
    kind = "" if p.annotation is p.empty else f": {type_text(p.annotation)}"
    default = "" if p.default is p.empty else f"{' = ' if kind else '='}{default_text(p.default)}"
    return f"{stars}{p.name}{kind}{default}"
