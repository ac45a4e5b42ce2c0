"""The client's state that a node keeps between rounds, as files in a folder of the node.

The version of a state is the number of rounds that the run had completed when the client's update was accepted. With
each task the server sends the version after the client's last accepted update, and the client trains from that state.
An update that was lost or refused thus has no effect on either side. Two versions are kept, so that a killed node, or a
server that returns to its last checkpoint, finds the one it needs.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from pathlib import Path
from tempfile import TemporaryFile

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from fedflat.errors import UserError, system_reason
from fedflat.experiment.store.files import create_folder, explain_os_error, write_atomically

INITIAL_STATE_VERSION = 0
"""Version of the state of a client that has had no update accepted; it is not saved."""

ANSWERS = "answers.txt"
"""File with the number of training requests that a client with local privacy has answered."""


def require_writable(folder: Path) -> None:
    """Raise ``UserError`` if a folder cannot be written to, before the client trains for nothing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"this node cannot write its client's state to {folder} ({system_reason(error)}); "
            "start its SuperNode with another folder: --node-config 'partition-id=N state=\"/path\"'"
        ) from None


class ClientMemory:
    """The saved states of one client in one experiment, one file per version.

    A version is the number of rounds that the run had completed with the client's update.

    Args:
        folder: the node's folder for state.
        experiment: the server's name of the experiment.
        client: number of the client.
    """

    def __init__(self, folder: Path, experiment: str, client: int) -> None:
        # The name comes from the server and must not lead out of the folder.
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", experiment):
            raise UserError(
                f"experiment name {experiment!r} of the server is not a valid folder name; expected letters and digits"
            )
        self.folder = folder / experiment / f"client-{client}"

    def read(self, state_version: int) -> dict[str, Tensor]:
        """Return a version of the state as tensors by flat name (``slot.field``); empty before the first update."""
        if state_version == INITIAL_STATE_VERSION:
            return {}
        path = self._file(state_version)
        try:
            return load_file(path)
        except FileNotFoundError:
            raise UserError(
                f"this node has no state after round {state_version} in {self.folder}; "
                "restore it, or start its SuperNode with fresh-state=true in --node-config to begin as a new client"
            ) from None
        except (OSError, SafetensorError):
            raise UserError(f"{path} is damaged; restore it from a copy or restart the experiment") from None

    def has(self, state_version: int) -> bool:
        """Whether a version of the state is saved."""
        return self._file(state_version).exists()

    def digest(self, state_version: int) -> str:
        """Return the SHA-256 of a saved version of the state; empty if it is not saved."""
        path = self._file(state_version)
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""

    def write(self, state: dict[str, Tensor], state_version: int, previous: int) -> None:
        """Save a new version of the state, and delete all others except ``previous``, from which the client trained.

        The server asks for the previous version again if it does not accept the update.
        """
        create_folder(self.folder)
        tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
        write_atomically(self._file(state_version), save(tensors))
        for path in self.folder.glob("*.safetensors"):
            if path not in (self._file(state_version), self._file(previous)):
                path.unlink(missing_ok=True)

    def count_answer(self) -> int:
        """Count an answer to a training request on disk, and return the number of answers so far, with this one."""
        create_folder(self.folder)
        answers = self.answers() + 1
        write_atomically(self.folder / ANSWERS, f"{answers}\n", exclusive=True)
        return answers

    def answers(self) -> int:
        """Return the number of training requests that the client has answered; counted with local privacy only."""
        path = self.folder / ANSWERS
        try:
            return int(path.read_text()) if path.exists() else 0
        except ValueError:
            raise UserError(f"{path} is damaged; restore it from a copy or restart the experiment") from None

    def commit(self, subject: str, round: int, text: str) -> str:
        """Record ``text`` for a round unless the round already has a record; returns the record.

        Raises ``UserError`` if a later round has a record; those of earlier rounds are deleted.
        """
        recorded = self.write_once(f"{round}.{subject}", text)
        last = self.last_round(subject)  # read now: another process may have replaced the record of this round
        for path in self.folder.glob(f"*.{subject}"):
            if int(path.stem) < last:
                path.unlink(missing_ok=True)
        if last > round:
            raise UserError(
                f"round {last} of this run has already begun, so this node refuses the earlier round {round}; "
                "start a new run"
            )
        return recorded

    def last_round(self, subject: str) -> int:
        """Return the last round that has a record; -1 if there is none."""
        return max((int(path.stem) for path in self.folder.glob(f"*.{subject}")), default=-1)

    def next_token(self, token: str | None) -> str:
        """Consume a token and return a new one; if it is None, all earlier ones become invalid.

        Raises ``UserError`` if the token has been used, even by a concurrent process.
        """
        create_folder(self.folder)
        for path in self.folder.glob("*.token") if token is None else [self.folder / f"{token}.token"]:
            try:
                path.unlink(missing_ok=token is None)
            except FileNotFoundError:
                raise UserError("this node has already answered this message, or begun another sum") from None
        new = self.folder / f"{secrets.token_hex(8)}.token"
        new.touch()
        return new.stem

    def write_once(self, name: str, text: str) -> str:
        """Write a text to a new file, and return the text of that file, which is an earlier one if it exists.

        The file appears atomically, also for a concurrent process that writes it.
        """
        create_folder(self.folder)
        path, own = self.folder / name, self.folder / f"{name}.{os.getpid()}"
        write_atomically(own, text)
        with explain_os_error(path):
            try:
                os.link(own, path)
            except FileExistsError:
                pass
            finally:
                own.unlink()
        return path.read_text()

    def _file(self, state_version: int) -> Path:
        return self.folder / f"{state_version}.safetensors"
