"""Models of a run kept on the way, every so many rounds, each in a file of its own."""

from __future__ import annotations

import re
from pathlib import Path

from fedflat.experiment.store.atomic_files import explain_os_error
from fedflat.experiment.store.record import model_file

FOLDER = "models"


def snapshot_file(name: str, rounds: int) -> str:
    """The file of a model after so many rounds, by the name under which it is evaluated.

    >>> snapshot_file("server", 50), snapshot_file("wima(window=20)", 50)
    ('models/round-000050.safetensors', 'models/round-000050.wima-window-20.safetensors')
    """
    return f"{FOLDER}/{model_file(name).replace('model', f'round-{rounds:06d}', 1)}"


def kept_rounds(run: Path, name: str = "server") -> list[int]:
    """The rounds after which a run has kept a model, in order."""
    ending = model_file(name).removeprefix("model")
    found = (re.fullmatch(rf"round-(\d+){re.escape(ending)}", path.name) for path in (run / FOLDER).glob("round-*"))
    return sorted(int(match[1]) for match in found if match)


def cut_snapshots(run: Path, rounds: int) -> None:
    """Remove what was kept after a checkpoint, to which a run goes back."""
    for path in (run / FOLDER).glob("round-*"):
        match = re.match(r"round-(\d+)\.", path.name)
        if match and int(match[1]) > rounds:
            with explain_os_error(path, "remove"):
                path.unlink()
