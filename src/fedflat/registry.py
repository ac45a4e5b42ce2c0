"""Named components of one kind: the single place where a name is bound to a component and looked up."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from fedflat.errors import UserError, one_of
from fedflat.text import folded

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """The components of one kind (models, datasets, drifts, ...), by name and in order of registration.

    Lookups ignore case, hyphens and underscores; the registered spelling is canonical.

    Args:
        kind: what the components are called in messages, e.g. ``"model"``.
        see: the command that lists them, named in the error for an unknown name.
        load: called once before a name is reported as unknown; registers what installed packages provide.
        namespace: registries with the same namespace share their names: each name belongs to at most one of them.

    >>> models = Registry("model", see="fedflat models")
    >>> models.register("resnet18", "a network")
    >>> models.find("ResNet-18"), models.name_of("a network")
    ('a network', 'resnet18')
    >>> models.register("resnet18", "another network")
    Traceback (most recent call last):
    ...
    fedflat.errors.UserError: the model 'resnet18' is already registered; choose another name
    """

    _namespaces: ClassVar[dict[str, dict[str, Registry[Any]]]] = {}

    def __init__(
        self, kind: str, *, see: str = "", load: Callable[[], object] | None = None, namespace: str = ""
    ) -> None:
        self.kind = kind
        self.see = see
        self._load = load
        self._components: dict[str, T] = {}
        self._spelling: dict[str, str] = {}  # registered name by folded name
        self._siblings: dict[str, Registry[Any]] = self._namespaces.setdefault(namespace, {}) if namespace else {}
        self._siblings[kind] = self  # a reloaded module replaces its registry

    def register(self, name: str, component: T) -> None:
        """Bind ``name`` to ``component``; binding the same pair again has no effect.

        Raises:
            UserError: the name is malformed or belongs to another component.
        """
        self.check_name(name)
        existing = self.spelling(name)
        if existing is not None and self._components[existing] != component:
            raise UserError(f"the {self.kind} '{existing}' is already registered; choose another name")
        for sibling in self._siblings.values():
            if sibling.kind != self.kind and sibling.spelling(name):
                raise UserError(
                    f"'{name}' cannot name a {self.kind}: it already names a {sibling.kind}; choose another name"
                )
        if existing is None:
            self._components[name] = component
            self._spelling[folded(name)] = name

    def check_name(self, name: object) -> None:
        """Raise a ``UserError`` if a name is malformed."""
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
            raise UserError(
                f"{name!r} is not a valid {self.kind} name; use letters, digits and hyphens, e.g. my-{self.kind}"
            )

    def unregister(self, name: str) -> None:
        """Remove a name, e.g. at the end of a test."""
        key = self._spelling.pop(folded(name))
        del self._components[key]

    def spelling(self, name: str) -> str | None:
        """The registered spelling of ``name``, or None if it is unknown."""
        return self._spelling.get(folded(name))

    def find(self, name: str) -> T:
        """The component called ``name``; an unknown name raises a ``UserError`` with the nearest known names."""
        if self.spelling(name) is None and self._load is not None:
            load, self._load = self._load, None  # loading registers components, and is done only once
            load()
        registered_name = self.spelling(name)
        if registered_name is None:
            raise self.unknown(name)
        return self._components[registered_name]

    def unknown(self, name: str, also: Iterable[str] = ()) -> UserError:
        """The error for an unknown ``name``; ``also`` lists further valid names to suggest."""
        error = one_of(self.kind, name, [*self, *also], self.see)
        plugin = Path(f"{name.replace('-', '_')}.py")
        return UserError(f"{error}; if {plugin} registers it, add --plugin {plugin}") if plugin.is_file() else error

    def name_of(self, component: T) -> str | None:
        """The name of ``component``, or None if it is not registered."""
        return next((name for name, known in self._components.items() if known == component), None)

    def __getitem__(self, name: str) -> T:
        return self._components[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._components)

    def __len__(self) -> int:
        return len(self._components)
