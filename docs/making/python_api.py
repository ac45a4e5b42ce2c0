"""Reference of the Python API, from signatures and docstrings."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from making.markdown import about, block, joined


class Page(NamedTuple):
    """A page of the reference: its title, what it is about, and the names on it, as ``module:name`` or a whole module's ``__all__``."""

    title: str
    intro: str
    names: tuple[str, ...]


PAGES = {
    "python": Page(
        "fedflat",
        "What `import fedflat` gives. Settings have short names (`rounds=50`) or full ones (`training__lr_decay=0.998`); [all of them](settings.md).",
        ("fedflat",),
    ),
    "results": Page(
        "Results",
        "What `run`, `compare`, `sweep`, `resume` and `load` give back.",
        (
            "fedflat.reporting.result:Result",
            "fedflat.reporting.result:Comparison",
            "fedflat.reporting.result:Row",
            "fedflat.reporting.tables.summary:Summary",
            "fedflat.experiment.store.record:Record",
            "fedflat.experiment.analysis.evaluation:Evaluation",
            "fedflat.experiment.analysis.measured:Measured",
            "fedflat.experiment.analysis.post_hoc:Afterwards",
        ),
    ),
    "algorithms": Page(
        "Algorithms and slots",
        "What an algorithm is made of, and what one of your own may define ([how](../own-algorithm.md)).",
        (
            "fedflat.algorithms.drift.base:Drift",
            "fedflat.algorithms.perturbation.base:Perturbation",
            "fedflat.algorithms.lr_schedule:LrSchedule",
            "fedflat.algorithms.lr_schedule:Schedule",
            "fedflat.algorithms.server:Sgd",
            "fedflat.algorithms.slot:Slot",
            "fedflat.algorithms.slot:At",
            "fedflat.algorithms.slot:Returned",
            "fedflat.algorithms.slot:Field",
            "fedflat.algorithms.slot:vector",
            "fedflat.algorithms.slot:scalar",
            "fedflat.algorithms.slot:unit",
            "fedflat.text:param",
        ),
    ),
    "averaging": Page(
        "Averages", "Averages of the server's models over rounds: evaluated, never fed back.", ("fedflat.averaging",)
    ),
    "data": Page(
        "Data and partitions",
        "Datasets by name, your own arrays, their division among clients, augmentation.",
        ("fedflat.data",),
    ),
    "models": Page(
        "Models", "Networks by name, and training a part of one.", ("fedflat.models", "fedflat.models.layout:Layout")
    ),
    "tasks": Page(
        "Tasks and callbacks",
        "Loss and metrics of your own ([how](../how-to/bring-your-own.md)), and whoever wants to see a run while it goes.",
        (
            "fedflat.engines.problem.task:Task",
            "fedflat.engines.problem.task:PooledTask",
            "fedflat.engines.problem.task:Classification",
            "fedflat.engines.problem.task:NextCharacter",
            "fedflat.engines.problem.segmentation:Segmentation",
            "fedflat.experiment.callback:Callback",
        ),
    ),
    "flatness": Page(
        "Flatness",
        "Curvature, sharpness and landscapes of any torch module, any loss, any data.",
        ("fedflat.flatness",),
    ),
    "landscapes": Page(
        "Landscapes of runs",
        "Around models of runs, on planes, along paths; and their pictures.",
        (
            "fedflat.experiment.analysis.measured:measured",
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
        "Four works as data: protocols, tables and figures, cell by cell ([what is there](../papers.md)).",
        ("fedflat.papers",),
    ),
    "deploy": Page(
        "Deployment",
        "All that a Flower project needs, and what a site may bring ([real sites](../deploy.md)). With the extra `flower`.",
        ("fedflat.deploy",),
    ),
    "testing": Page(
        "Testing",
        "Checks for what you bring yourself: one call each, and a message that names what does not hold.",
        ("fedflat.testing",),
    ),
}


def pages() -> dict[str, str]:
    """The pages of the reference."""
    return {f"reference/{name}.md": one(page) for name, page in PAGES.items()}


def one(page: Page) -> str:
    """A page of the reference."""
    lines = [f"# {page.title}", "", page.intro, ""]
    for module, name in names_of(page):
        lines += _entry(module, name)
    return joined(lines)


def names_of(page: Page) -> Iterator[tuple[str, str]]:
    """Every (module, name) of a page."""
    for text in page.names:
        module, _, name = text.partition(":")
        if name:
            yield module, name
        else:
            found = importlib.import_module(module)
            public = [each for each in found.__all__ if not each.startswith("__")]
            yield from ((module, each) for each in sorted(public, key=lambda each: _rank(getattr(found, each))))


def _rank(value: Any) -> int:
    """Functions first, then classes, then constants, each in the order in which they are listed."""
    return 0 if inspect.isroutine(value) or hasattr(value, "__wrapped__") else 1 if inspect.isclass(value) else 2


def _entry(module: str, name: str) -> list[str]:
    value = getattr(importlib.import_module(module), name)
    lines = [f"## {name}", ""]
    if inspect.isclass(value):
        return lines + _class(name, value, module)
    if inspect.isfunction(value):
        return [*lines, *block(signature(name, value).splitlines(), "py"), about(value), "", *_from(module, name)]
    kind, meaning = constants(module).get(name, (type(value).__name__, ""))
    return [
        *lines,
        *block([f"{name}: {kind}"], "py"),
        *([meaning.replace("``", "`"), ""] if meaning else []),
        *_from(module, name),
    ]


def _from(module: str, name: str) -> list[str]:
    where = f"fedflat.{name}" if module == "fedflat" else f"from {module} import {name}"
    return [f"<small>`{where}`</small>", ""]


def _class(name: str, value: type, module: str) -> list[str]:
    shown = signature(name, value.__init__) if _own_init(value) else name
    lines = [
        *block([f"class {line}" if not number else line for number, line in enumerate(shown.splitlines())], "py"),
        about(value),
        "",
        *_from(module, name),
    ]
    for field, (kind, meaning) in fields(value).items():
        lines += [f"- **`{field}`** : `{kind}`" + (f". {meaning}" if meaning else "")]
    for attribute, member in members(value):
        if isinstance(member, property):
            kind = inspect.signature(member.fget).return_annotation if member.fget else ""  # type: ignore[arg-type]
            lines += [f"- **`{attribute}`** : `{_type(kind)}`. {_first(member)}"]
        else:
            function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            lines += [
                f"- **`{signature(attribute, function, bound=not isinstance(member, staticmethod), one_line=True)}`**. {_first(function)}"
            ]
    return [*lines, ""]


def _own_init(value: type) -> bool:
    return (
        inspect.isfunction(value.__dict__.get("__init__"))
        and not dataclasses.is_dataclass(value)
        and not getattr(value, "_is_protocol", False)
    )


def members(value: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class itself defines."""
    for name, member in vars(value).items():
        if not name.startswith("_") and (
            isinstance(member, (property, classmethod, staticmethod)) or inspect.isfunction(member)
        ):
            yield name, member


def fields(value: type) -> dict[str, tuple[str, str]]:
    """The fields of a dataclass, a named tuple or a class with annotations: their types, and what is said below them."""
    try:
        (tree,) = ast.parse(inspect.cleandoc(inspect.getsource(value))).body
    except (OSError, TypeError, SyntaxError):
        return {}
    return (
        {name: said for name, said in annotated(tree.body) if not name.startswith("_")}
        if isinstance(tree, ast.ClassDef)
        else {}
    )


def annotated(body: list[ast.stmt]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Names with a type, and the text below each."""
    for statement, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, (ast.AnnAssign, ast.Assign)):
            continue
        target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
        if not isinstance(target, ast.Name):
            continue
        kind = ast.unparse(statement.annotation) if isinstance(statement, ast.AnnAssign) else ""
        said = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            said = " ".join(after.value.value.replace("``", "`").split())
        elif (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.value, ast.Call)
            and getattr(statement.value.func, "id", "") == "param"
        ):
            texts = [
                part.value
                for part in statement.value.args
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
            said = texts[-1][:1].upper() + texts[-1][1:] + "." if texts else ""
        yield target.id, (kind, said)


@cache
def constants(module: str) -> dict[str, tuple[str, str]]:
    """The constants of a module and of those it takes its names from: type, and the text below."""
    found: dict[str, tuple[str, str]] = {}
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and statement.module and statement.module.startswith("fedflat"):
            names = {alias.name for alias in statement.names if alias.name.isupper()}
            if names:
                found |= {name: said for name, said in constants(statement.module).items() if name in names}
    return found | {name: (kind or _value_type(module, name), said) for name, (kind, said) in annotated(tree.body)}


def _value_type(module: str, name: str) -> str:
    return type(getattr(importlib.import_module(module), name, None)).__name__


def signature(name: str, function: Any, *, bound: bool = True, one_line: bool = False) -> str:
    """A signature as it would be written, over several lines where it is long."""
    found = inspect.signature(function)
    given = [p for p in found.parameters.values() if not (bound and p.name in ("self", "cls"))]
    shown = [_parameter(p) for p in given]
    for position, p in enumerate(given):
        if p.kind is p.KEYWORD_ONLY and not any(o.kind is o.VAR_POSITIONAL for o in given):
            shown.insert(position, "*")
            break
    back = (
        ""
        if found.return_annotation in (found.empty, None, "None") or name == "__init__"
        else f" -> {_type(found.return_annotation)}"
    )
    line = f"{name}({', '.join(shown)}){back}"
    if one_line or len(line) <= 96:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in shown), f"){back}"])


def _parameter(p: inspect.Parameter) -> str:
    stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
    kind = "" if p.annotation is p.empty else f": {_type(p.annotation)}"
    default = "" if p.default is p.empty else f"{' = ' if kind else '='}{_default(p.default)}"
    return f"{stars}{p.name}{kind}{default}"


def _default(value: Any) -> str:
    shown = repr(value)
    return getattr(value, "__name__", "...") if "0x" in shown or len(shown) > 60 else shown


def _type(annotation: Any) -> str:
    shown = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:fedflat|torch|collections|pathlib|typing|numpy)\.(?:[a-z_]+\.)*(?=[A-Z])", "", shown)


def _first(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").split("\n\n>>>")[0].replace("``", "`").split())
