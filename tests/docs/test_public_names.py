"""Every public name has a docstring and type annotations."""

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
    """fedflat and every package below it that defines ``__all__``."""
    yield fedflat
    for info in pkgutil.walk_packages(fedflat.__path__, "fedflat."):
        if info.ispkg and (not info.name.startswith("fedflat.deploy") or find_spec("flwr")):
            module = importlib.import_module(info.name)
            if hasattr(module, "__all__"):
                yield module


NAMES = [
    pytest.param(module, name, id=f"{module.__name__}.{name}")
    for module in modules()
    for name in module.__all__
    if name != "__version__"
]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_has_docstring_and_types(module: ModuleType, name: str) -> None:
    value = inspect.unwrap(getattr(module, name))
    if inspect.isclass(value):
        assert docstring(value), f"{name} has no docstring"
        for method, function in public_methods(value):
            assert docstring(getattr(value, method)), f"{name}.{method} has no docstring"
            check_types(f"{name}.{method}", function)
    elif inspect.isfunction(value):
        assert docstring(value), f"{name} has no docstring"
        check_types(name, value)
    else:
        assert name in documented_constants(module), f"constant {name} has no type or no docstring below it"


def docstring(thing: Any) -> str:
    """The docstring, possibly inherited; empty for those of object and for generated signatures."""
    text = inspect.getdoc(thing) or ""
    return "" if text == inspect.getdoc(object) or text.startswith(f"{getattr(thing, '__name__', '')}(") else text


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
    assert not untyped, f"{name}: no type for {', '.join(untyped)}"
    assert signature.return_annotation is not signature.empty, f"{name}: no return type"


def documented_constants(module: ModuleType) -> set[str]:
    """Constants with a type and a docstring below them, in the module or in one that it imports them from."""
    names: set[str] = set()
    tree = ast.parse(inspect.getsource(module))
    for statement, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if (
            isinstance(statement, ast.ImportFrom)
            and statement.module
            and any(alias.name.isupper() for alias in statement.names)
        ):
            names |= documented_constants(importlib.import_module(statement.module))
        has_docstring = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and has_docstring:
            names.add(statement.target.id)
    return names


def test_missing_docstrings_and_types_are_noticed() -> None:
    def bare(x, y: int = 0):
        return x + y

    assert not docstring(bare)
    with pytest.raises(AssertionError, match="x"):
        check_types("bare", bare)
