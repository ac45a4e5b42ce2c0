"""The state that a node keeps of its client between rounds, as files in a folder of the node.

With each task the server sends the stamp of the client's last accepted update, and the client continues from the state
with that stamp. An update that was lost or refused is thus forgotten on both sides. Two states are kept, so that a
killed node, or a server that returns to its last checkpoint, finds the one it needs.
"""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryFile

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from fedflat.errors import UserError
from fedflat.experiment.store.files import create_folder, write_atomically

FRESH = 0
"""Stamp of a client that has had no update accepted."""


def require_writable(folder: Path) -> None:
    """Raise ``UserError`` if a folder cannot be written to, before the client trains for nothing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"this node cannot write its client's state to {folder} ({(error.strerror or str(error)).lower()}); "
            "start its SuperNode with another folder: --node-config 'partition-id=N state=\"/path\"'"
        ) from None


class ClientMemory:
    """The saved state of one client in one experiment.

    Args:
        folder: the node's folder for state.
        experiment: the server's name of the experiment.
        client: number of the client.
    """

    def __init__(self, folder: Path, experiment: str, client: int) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", experiment):
            raise UserError(
                f"experiment name {experiment!r} of the server is not a valid folder name; expected letters and digits"
            )
        self.folder = folder / experiment / f"client-{client}"

    def read(self, stamp: int) -> dict[str, Tensor]:
        """Return the state with a stamp, by flat name; empty for ``FRESH``."""
        if stamp == FRESH:
            return {}
        path = self._file(stamp)
        try:
            return load_file(path)
        except FileNotFoundError:
            raise UserError(
                f"this node has no state after round {stamp} in {self.folder}; restore it or restart the experiment"
            ) from None
        except (OSError, SafetensorError):
            raise UserError(f"{path} is damaged; restore it from a copy or restart the experiment") from None

    def write(self, state: dict[str, Tensor], stamp: int, previous: int) -> None:
        """Save a state under a new stamp; of the older ones, keep only the one with the ``previous`` stamp."""
        create_folder(self.folder)
        tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
        write_atomically(self._file(stamp), save(tensors))
        for path in self.folder.glob("*.safetensors"):
            if path not in (self._file(stamp), self._file(previous)):
                path.unlink(missing_ok=True)

    def _file(self, stamp: int) -> Path:
        return self.folder / f"{stamp}.safetensors"
