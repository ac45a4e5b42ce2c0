"""``Registry``, which maps names to components, and plugins: Python files of the user that register more components."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, TypeVar

from fedflat.errors import MAX_SHOWN, UserError, one_of
from fedflat.text import absolute_path, folded

T = TypeVar("T")
PLUGINS_VARIABLE = "FEDFLAT_PLUGINS"
"""Environment variable with the paths of plugins, separated as in ``PATH``."""
UNUSED = "unused"
"""Key of the plugins that a run does not use, see ``plugins_to_record``."""
_NAME = "[A-Za-z][A-Za-z0-9_-]*"


class LoadedPlugin(NamedTuple):
    """A plugin that this process has loaded; names are folded."""

    sha256: str
    names: set[str]
    """The names that it registered with ``fedflat.register``."""
    words: set[str]
    """All words in its source, among them the names of other plugins that it refers to."""


_loaded: dict[str, LoadedPlugin] = {}  # by absolute path
_registered: list[str] = []  # all names that ``fedflat.register`` has registered


class Registry(Mapping[str, T]):
    """The components of one kind (models, datasets, drifts, ...), by name and in order of registration.

    Lookups ignore case, hyphens and underscores; the registered spelling is canonical.

    Args:
        kind: what the components are called in messages, e.g. ``"model"``.
        see: the command that lists them, named in the error for an unknown name.
        load: registers the components of installed packages; called once, when a name is first not found.
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
        if not isinstance(name, str) or not re.fullmatch(_NAME, name):
            raise UserError(
                f"{name!r} is not a valid {self.kind} name; use letters, digits and hyphens, "
                f"e.g. my-{self.kind.replace(' ', '-')}"
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
        if len(name) > MAX_SHOWN:  # it may be too long for a file name
            return error
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


class MissingPlugin(UserError):
    """A plugin that a run needs no longer exists.

    Attributes:
        problem: the message without the remedy.
        path: where the plugin was.
    """

    def __init__(self, run: Path, path: Path) -> None:
        self.problem, self.path = f"the run in {run} needs the plugin {path}, which does not exist", path
        super().__init__(f"{self.problem}; restore the file, or first import a file of the same name")


def listed_plugins() -> list[str]:
    """The paths in the environment variable ``FEDFLAT_PLUGINS``."""
    return [path for path in os.environ.get(PLUGINS_VARIABLE, "").split(os.pathsep) if path]


def loaded_plugins() -> dict[str, str]:
    """The plugins that this process has loaded: sha256 by absolute path; it covers imports from the plugin's folder."""
    return {path: plugin.sha256 for path, plugin in _loaded.items()}


def note_registered(name: str) -> None:
    """Note that ``fedflat.register`` has registered a name, on behalf of the plugin that is being loaded."""
    _registered.append(name)


def plugins_to_record(config: str) -> dict[str, Any]:
    """The loaded plugins: sha256 by absolute path; those that a run does not use are listed under ``UNUSED``.

    A run uses the plugins that register a name in its config, and those whose names these plugins mention. A plugin
    that registers nothing counts as used, because its side effects may concern every run.

    Args:
        config: the run's config as YAML.
    """
    used: set[str] = set()
    words = _folded_words(config)
    while added := {path for path in _loaded.keys() - used if not _loaded[path].names or _loaded[path].names & words}:
        used |= added
        words = words.union(*(_loaded[path].words for path in added))
    plugins = loaded_plugins()
    unused = {path: plugins.pop(path) for path in _loaded if path not in used}
    return {**plugins, UNUSED: unused} if unused else plugins


def _folded_words(text: str) -> set[str]:
    return set(map(folded, re.findall(_NAME, text)))


def load_plugins(paths: Iterable[str | Path]) -> None:
    """Import Python files, each once; a plugin can import modules from its own folder.

    Raises:
        UserError: a file does not exist, has the name of another module, or raises an error.
    """
    for path in paths:
        _load(absolute_path(path))


def load_recorded(run: Path, plugins: Mapping[str, str]) -> None:
    """Load the plugins of a run; one that is imported already, perhaps from another folder, is not loaded again.

    Warns if the content of a plugin has changed since the run began.

    Args:
        run: folder of the run.
        plugins: sha256 of each plugin when the run began, by absolute path.

    Raises:
        MissingPlugin: a file no longer exists.
    """
    for path, digest in plugins.items():
        if digest in loaded_plugins().values():
            continue
        # A module of this name may have been imported by the user's script; the hash shows whether it is the plugin.
        if Path(path).stem not in sys.modules:
            if not Path(path).is_file():
                raise MissingPlugin(run, Path(path))
            load_plugins([path])
        for name in changed_plugins({path: digest}):
            warnings.warn(f"{name} has changed since the run in {run} began", stacklevel=2)


def load_unchanged(plugins: Iterable[tuple[str, str]]) -> list[str]:
    """Load plugins of runs, except those whose content differs from that at the beginning of the runs.

    Args:
        plugins: absolute path and recorded sha256 of each plugin; a path may occur with several contents.

    Returns:
        Why plugins were not loaded, e.g. ``"mine.py has changed"``.
    """
    recorded: dict[str, set[str]] = {}
    for path, digest in plugins:
        recorded.setdefault(path, set()).add(digest)
    reasons = []
    for path, digests in recorded.items():
        if digests & set(loaded_plugins().values()):  # loaded, perhaps from another folder
            continue
        if not Path(path).is_file():
            reasons.append(f"{path} does not exist")
        elif _sha256(Path(path)) not in digests:
            reasons.append(f"{path} has changed")
        else:
            load_plugins([path])
    return reasons


def changed_plugins(plugins: Mapping[str, str]) -> list[str]:
    """The file names of a run's plugins whose content of that time is not loaded in this process.

    Args:
        plugins: sha256 of each plugin when the run began, by absolute path.
    """
    changed = []
    for path, digest in plugins.items():
        # The user's script may have imported it like any other module.
        file = getattr(sys.modules.get(Path(path).stem), "__file__", None)
        if digest not in loaded_plugins().values() and (file is None or _sha256(Path(file)) != digest):
            changed.append(Path(path).name)
    return changed


def _load(path: Path) -> None:
    """Import one plugin under the name of its file, by which child processes find its classes."""
    name = path.stem
    if str(path) in _loaded:
        return
    if not path.is_file():
        hint = f"did you mean {path}.py?" if Path(f"{path}.py").is_file() else "expected the path of a Python file"
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"the plugin {path} {problem}; {hint}")
    if path.suffix != ".py" or "." in name:
        raise UserError(f"the plugin {path} is not a Python module; expected a file such as mine.py")
    if name in sys.modules or name in sys.stdlib_module_names:
        other = getattr(sys.modules.get(name), "__file__", None) or "Python's own"
        raise UserError(f"the plugin {path} has the same name as another module ({other}); rename the file")
    known = len(_registered)
    import_file(path, name, "plugin")
    source = b"\n".join(_imported_files(path).values()).decode(errors="replace")
    _loaded[str(path)] = LoadedPlugin(_sha256(path), set(map(folded, _registered[known:])), _folded_words(source))


def import_file(path: Path, name: str, role: str) -> ModuleType:
    """Import a Python file as the module ``name``; it can import the modules next to it.

    Args:
        path: absolute path of an existing file.
        name: name of the module in ``sys.modules``.
        role: what the file is, for messages.

    Raises:
        UserError: the file raises an error.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # any error of the user's code
        del sys.modules[name]
        raise UserError(f"cannot load the {role} {path}{_line(error, path)}: {_message(error)}") from error
    return module


def _sha256(path: Path) -> str:
    """The sha256 of a plugin and of the modules that it imports from its folder; without any, that of the file."""
    digests = {file: hashlib.sha256(content).hexdigest() for file, content in _imported_files(path).items()}
    if len(digests) == 1:
        return digests[path]
    lines = [f"{file.relative_to(path.parent)} {digests[file]}" for file in sorted(digests)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _imported_files(path: Path) -> dict[Path, bytes]:
    """The content of a plugin and, recursively, of all modules and packages that it imports from its folder."""
    files: dict[Path, bytes] = {}
    pending = [path]
    while pending:
        file = pending.pop()
        if file in files or not file.is_file():
            continue
        files[file] = file.read_bytes()
        for name in _imported_names(files[file]):
            is_package = (path.parent / name / "__init__.py").is_file()
            pending += (path.parent / name).rglob("*.py") if is_package else [path.parent / f"{name}.py"]
    return files


def _imported_names(source: bytes) -> set[str]:
    """The top-level modules that Python code imports; ``sys.modules`` would also list those that a script imported."""
    names: set[str] = set()
    with suppress(SyntaxError, ValueError):  # a module that is never imported may be broken
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module)
    return {name.partition(".")[0] for name in names}


def _line(error: BaseException, path: Path) -> str:
    """The line of the file at ``path`` that raised an error, as ", line N"; empty if it is unknown."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    return f", line {lines[-1]}" if lines else ""


def _message(error: BaseException) -> str:
    """The message of an error, after the name of its class unless it is a ``UserError``, which explains itself."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def require_package(name: str, purpose: str, extra: str) -> Any:
    """Import an optional package, or raise a ``UserError`` that says how to install it.

    Args:
        name: name of the package.
        purpose: what requires it, for the message.
        extra: the extra of fedflat that installs it.
    """
    if importlib.util.find_spec(name) is None:
        raise UserError(f"{purpose} requires {name.replace('_', '-')}; install it with: pip install 'fedflat[{extra}]'")
    return importlib.import_module(name)
