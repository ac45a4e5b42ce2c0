"""Every public name says what it is: a docstring, and types."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

import fedflat


def modules() -> Iterator[ModuleType]:
    """fedflat, and every package below it that says what is public."""
    yield fedflat
    for found in pkgutil.walk_packages(fedflat.__path__, "fedflat."):
        if found.ispkg and (found.name != "fedflat.deploy" or find_spec("flwr")):
            module = importlib.import_module(found.name)
            if hasattr(module, "__all__"):
                yield module


NAMES = [
    pytest.param(module, name, id=f"{module.__name__}.{name}")
    for module in modules()
    for name in module.__all__
    if name != "__version__"
]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_has_a_docstring_and_types(module: ModuleType, name: str) -> None:
    value = inspect.unwrap(getattr(module, name))
    if inspect.isclass(value):
        assert said(value), f"{name} has no docstring"
        for method, function in public_methods(value):
            assert said(getattr(value, method)), f"{name}.{method} has no docstring"
            check_types(f"{name}.{method}", function)
    elif inspect.isfunction(value):
        assert said(value), f"{name} has no docstring"
        check_types(name, value)
    else:
        assert name in annotated(module), f"{name} is a constant without a type, or without a text below it"


def said(thing: Any) -> str:
    """A docstring of one's own, or that of the method which is overridden."""
    found = inspect.getdoc(thing) or ""
    return "" if found == inspect.getdoc(object) or found.startswith(f"{getattr(thing, '__name__', '')}(") else found


def public_methods(value: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(value).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, function


def check_types(name: str, function: Any) -> None:
    signature = inspect.signature(function)
    untyped = [
        p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name not in ("self", "cls")
    ]
    assert not untyped, f"{name}: {', '.join(untyped)} without a type"
    assert signature.return_annotation is not signature.empty, f"{name} does not say what it returns"


def annotated(module: ModuleType) -> set[str]:
    """Constants with a type and a text below them, here or in the module that they come from."""
    found: set[str] = set()
    tree = ast.parse(inspect.getsource(module))
    for statement, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if (
            isinstance(statement, ast.ImportFrom)
            and statement.module
            and any(alias.name.isupper() for alias in statement.names)
        ):
            found |= annotated(importlib.import_module(statement.module))
        told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and told:
            found.add(statement.target.id)
    return found


def test_something_without_a_docstring_is_noticed() -> None:
    def bare(x, y: int = 0):
        return x + y

    assert not said(bare)
    with pytest.raises(AssertionError, match="x without a type"):
        check_types("bare", bare)
