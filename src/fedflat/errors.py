"""Errors that a user can fix, reported as a message without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

MAX_SHOWN = 60
"""Number of characters of an unknown name that a message shows."""


class UserError(Exception):
    """An invalid request; the message says what is wrong, what was expected and what to do."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message without its full stop, or the name of its class.

    >>> first_line(ValueError("no.\\nDetails")), first_line(ValueError())
    ('no', 'ValueError')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def require_instance(value: object, name: str) -> None:
    """Raise a ``UserError`` if a value is a class where an instance is expected; ``name`` says what it is.

    >>> require_instance(dict, "loss")
    Traceback (most recent call last):
    fedflat.errors.UserError: loss is the class dict itself; expected an instance, such as dict()
    """
    if isinstance(value, type):
        class_name = value.__name__
        raise UserError(f"{name} is the class {class_name} itself; expected an instance, such as {class_name}()")


def one_of(what: str, name: object, known: Iterable[str], see: str = "", owner: str = "", place: str = "") -> UserError:
    """The error for an unknown name, with the nearest valid names.

    Args:
        what: kind of the name, e.g. ``"algorithm"``.
        name: the unknown name.
        known: the valid names.
        see: command that lists all valid names.
        owner: the component that lacks the name, e.g. the algorithm that has no such parameter.
        place: where the name occurs, e.g. a file.

    >>> str(one_of("algorithm", "fedsma", ["fedavg", "fedsam", "fedswa"], see="fedflat algorithms"))
    "unknown algorithm 'fedsma'; did you mean fedswa, fedsam or fedavg? (list all: fedflat algorithms)"
    >>> str(one_of("dataset", "CIFAR-100x", ["arrays", "cifar100"]))
    "unknown dataset 'CIFAR-100x'; did you mean cifar100?"
    >>> str(one_of("parameter", "nu", ["mu"], owner="fedprox"))
    "fedprox has no parameter 'nu'; did you mean mu?"
    >>> str(one_of("key", "gird", ["base", "grid"], place="mine.yaml"))
    "unknown key 'gird' in mine.yaml; did you mean grid?"
    """
    names = sorted(known)
    shown = str(name) if len(str(name)) <= MAX_SHOWN else f"{str(name)[:MAX_SHOWN]}…"
    close: list[str] = []
    for spelling in (str(name), str(name).lower()):
        close = close or difflib.get_close_matches(spelling, names, n=3, cutoff=0.6)
    if not close and len(names) == 1:
        close = names
    if close:
        *others, last = close
        hint = f"did you mean {', '.join(others)} or {last}?" if others else f"did you mean {last}?"
    elif len(names) <= 12:
        hint = f"expected one of {', '.join(names)}" if names else f"no {what} is available"
    else:
        hint = f"for example {', '.join(names[:5])}"
    problem = f"{owner} has no {what} '{shown}'" if owner else f"unknown {what} '{shown}'"
    problem += f" in {place}" if place else ""
    return UserError(f"{problem}; {hint}" + (f" (list all: {see})" if see else ""))


def similar_file(path: Path) -> str:
    """A hint for a missing file, such as `` (did you mean wine.npz?)``; empty if its folder has no similar name."""
    files = path.parent.iterdir() if path.parent.is_dir() else ()
    # Suffixes would make any two YAML files similar; they only decide between files of the same stem.
    name_of = {file.stem: file.name for file in sorted(files, key=lambda file: file.suffix == path.suffix)}
    close = difflib.get_close_matches(path.stem, name_of, n=1)
    return f" (did you mean {name_of[close[0]]}?)" if close else ""


def system_reason(error: OSError) -> str:
    """The reason that the operating system gives, in lower case.

    >>> system_reason(OSError(28, "No space left on device", "model.npz"))
    'no space left on device'
    """
    return (error.strerror or str(error)).lower()


def no_folder(path: Path, expected: str) -> UserError:
    """The error for a path that is missing, or a file, where a folder is needed; ``expected`` describes the folder.

    >>> str(no_folder(Path("nowhere"), "a folder of runs"))
    'there is no folder nowhere; expected a folder of runs'
    """
    problem = f"{path} is a file" if path.exists() else f"there is no folder {path}"
    return UserError(f"{problem}; expected {expected}")


class MachineFailed(UserError):
    """The machine failed, not the experiment: a full disk, a killed worker process, a missing file.

    Repeating the command may help.
    """


def missing_file(path: Path, expected: str) -> MachineFailed:
    """The error for an input file or folder that does not exist; ``expected`` describes it.

    >>> str(missing_file(Path("nowhere"), "a CSV file"))
    'nowhere does not exist; expected a CSV file'
    """
    return MachineFailed(f"{path} does not exist{similar_file(path)}; expected {expected}")


class WorkerLost(MachineFailed):
    """Worker processes were killed or had too little memory: by chance, or always with these settings."""


class GpuFailed(UserError):
    """The GPU reported an error. This process can no longer use it, but a new one can."""


class SomeFailed(UserError):
    """Runs of a comparison or sweep failed; the others have been completed."""


def error_of_runs(failures: Sequence[tuple[object, UserError]], runs: int) -> UserError:
    """The error to raise after runs have failed: their own if all runs failed alike, otherwise ``SomeFailed``.

    Args:
        failures: name and error of each failed run.
        runs: number of all runs.
    """
    name, first = failures[0]
    if len(failures) == runs and len({str(error) for _, error in failures}) == 1 and not isinstance(first, SomeFailed):
        return first
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    return SomeFailed(f"{name} failed: {first}{more}")
