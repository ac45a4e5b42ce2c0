"""Plugins: Python files of the user that register algorithms, datasets and models before a command runs."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

from fedflat.errors import UserError

VARIABLE = "FEDFLAT_PLUGINS"
"""Environment variable with the paths of plugins, separated as in ``PATH``."""
_hashes: dict[str, str] = {}  # sha256 of every loaded plugin by absolute path


class MissingPlugin(UserError):
    """A plugin that a run needs no longer exists.

    Attributes:
        problem: the message without the remedy.
        path: where the plugin was.
    """

    def __init__(self, run: Path, path: Path) -> None:
        self.problem, self.path = f"the run in {run} needs the plugin {path}, which does not exist", path
        super().__init__(f"{self.problem}; restore the file, or import it from its new folder first")


def listed_plugins() -> list[str]:
    """The paths in the environment variable ``FEDFLAT_PLUGINS``."""
    return [path for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]


def loaded_plugins() -> dict[str, str]:
    """The plugins that this process has loaded: sha256 by absolute path."""
    return dict(_hashes)


def load_plugins(paths: Iterable[str | Path]) -> None:
    """Import Python files, each once; modules next to a plugin can be imported from it.

    Raises:
        UserError: a file does not exist, has the name of another module, or raises an error.
    """
    for path in paths:
        _load(Path(path).expanduser().absolute())


def load_recorded(run: Path, plugins: Mapping[str, str]) -> None:
    """Load the plugins of a run, except those that are imported already, possibly from another folder.

    Args:
        run: folder of the run.
        plugins: sha256 by absolute path, when the run began.

    Raises:
        MissingPlugin: a file no longer exists.
    """
    for path, digest in plugins.items():
        if digest in _hashes.values():
            continue
        # A module of this name may have been imported by the user's script; the hash shows whether it is the plugin.
        if Path(path).stem not in sys.modules:
            if not Path(path).is_file():
                raise MissingPlugin(run, Path(path))
            load_plugins([path])
        file = getattr(sys.modules[Path(path).stem], "__file__", None)
        if file is None or _sha256(Path(file)) != digest:
            warnings.warn(f"{Path(path).name} has changed since the run in {run} began", stacklevel=2)


def _load(path: Path) -> None:
    """Import one plugin under the name of its file, by which child processes find its classes."""
    name = path.stem
    if str(path) in _hashes:
        return
    if not path.is_file():
        raise UserError(f"the plugin {path} does not exist; expected the path of a Python file, such as mine.py")
    if path.suffix != ".py" or "." in name:
        raise UserError(f"the plugin {path} is not a Python module; expected a file such as mine.py")
    if name in sys.modules or name in sys.stdlib_module_names:
        other = getattr(sys.modules.get(name), "__file__", None) or "Python's own"
        raise UserError(f"the plugin {path} has the same name as another module ({other}); rename the file")
    import_file(path, name, "plugin")
    _hashes[str(path)] = _sha256(path)


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
    except Exception as error:  # any error of the user's code
        del sys.modules[name]
        raise UserError(f"cannot load the {role} {path}{_line(error, path)}: {_message(error)}") from error
    return module


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _line(error: Exception, path: Path) -> str:
    """The line of the file at ``path`` that raised an error, as ", line N"; empty if it is unknown."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    return f", line {lines[-1]}" if lines else ""


def _message(error: Exception) -> str:
    """An error in one phrase; a ``UserError`` explains itself, others need the name of their class."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
