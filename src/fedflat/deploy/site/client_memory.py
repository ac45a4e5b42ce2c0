"""What a node remembers of a client between rounds: vectors in a folder of the node, two generations, so that a killed node or a server
that goes back to its last checkpoint finds what it needs.

The server says with each task after which accepted round the client last stood still. An update that never arrived, or was refused, is
then forgotten by both sides: the client goes on from the state that the server knows of.
"""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryFile

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from fedflat.errors import UserError
from fedflat.experiment.store.atomic_files import create_folder, write_whole

FRESH = 0
"""The stamp of a client that has never had an update accepted."""


def require_writable(folder: Path) -> None:
    """Refuse a folder in which nothing can be kept, before a client trains in vain."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"this node cannot write to {folder}, where its client remembers ({(error.strerror or str(error)).lower()}); "
            "start its SuperNode with another folder: --node-config 'partition-id=N state=\"/path\"'"
        ) from None


class Memory:
    """The vectors of one client in one experiment."""

    def __init__(self, folder: Path, experiment: str, client: int) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", experiment):
            raise UserError(
                f"the server calls its experiment {experiment!r}, which is no name for a folder; expected letters and digits"
            )
        self.folder = folder / experiment / f"client-{client}"

    def read(self, stamp: int) -> dict[str, Tensor]:
        """The vectors after the round that a stamp counts; none before the first."""
        if stamp == FRESH:
            return {}
        path = self._file(stamp)
        try:
            return load_file(path)
        except FileNotFoundError:
            raise UserError(
                f"this node has no state after round {stamp} in {self.folder}; put the folder back, or start the experiment anew"
            ) from None
        except (OSError, SafetensorError):
            raise UserError(f"{path} is damaged; put it back from a copy, or start the experiment anew") from None

    def write(self, vectors: dict[str, Tensor], stamp: int, before: int) -> None:
        """Keep vectors under a new stamp beside those under the stamp before; everything else is forgotten."""
        create_folder(self.folder)
        write_whole(
            self._file(stamp), save({name: value.detach().cpu().contiguous() for name, value in vectors.items()})
        )
        for path in self.folder.glob("*.safetensors"):
            if path not in (self._file(stamp), self._file(before)):
                path.unlink(missing_ok=True)

    def _file(self, stamp: int) -> Path:
        return self.folder / f"{stamp}.safetensors"
