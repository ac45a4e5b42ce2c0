"""A federation in one process: real messages and the real ClientApp, without a network, and hooks to disturb it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedflat.deploy import client_app

SMALL: dict[str, Any] = {
    "model": "mlp(hidden=8)",
    "data.clients": 4,
    "federation.clients_per_round": 3,
    "training.rounds": 3,
    "training.local_steps": 3,
    "training.lr": 0.05,
    "training.batch_size": 10,
    "training.clip": 10.0,
    "evaluation.every": 3,
    "engine.device": "cpu",
    "deploy.wait": 0.0,
    "deploy.score": False,
}
SITES = 4
SECURE: dict[str, Any] = {
    **SMALL,
    "algorithm": "fedavg",
    "data.clients": SITES,
    "federation.clients_per_round": SITES,
    "training.rounds": 1,
    "evaluation.every": 1,
    "deploy.secure_aggregation": True,
    "deploy.minimum": 2,
    "deploy.timeout": 0.1,
}
"""A short run with secure aggregation, in which all sites take part."""


class DirectGrid(Grid):
    """Delivers messages directly to one node per context; ``tamper`` may change or drop answers."""

    def __init__(self, contexts: list[Context], app: ClientApp | None = None) -> None:
        self.contexts = {100 + number: context for number, context in enumerate(contexts)}
        self.app = app or client_app()
        self.tamper: Callable[[Message], Message | None] = lambda message: message
        self.sent: list[Message] = []
        self.came: list[Message] = []
        self._waiting: dict[str, Message] = {}
        # Flower sets these in a ServerApp's process.
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1

    def set_run(self, run: Any) -> None:
        raise AssertionError("fedflat should not call this method of a Flower grid")

    @property
    def run(self) -> Any:
        raise AssertionError("fedflat should not call this method of a Flower grid")

    def create_message(self, *args: Any, **more: Any) -> Message:
        raise AssertionError("fedflat should not call this method of a Flower grid")

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            number = f"m{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = number
            message.metadata.__dict__["_run_id"] = 1
            self.sent.append(message)
            context = self.contexts[message.metadata.dst_node_id]
            reply = self.tamper(self.app(message, context))
            if reply is not None:
                self.came.append(copy.deepcopy(reply))  # the server empties the records that it has read
                self._waiting[number] = reply
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._waiting.pop(number) for number in message_ids if number in self._waiting]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise AssertionError("fedflat should not call this method of a Flower grid")


class AppGrid(DirectGrid):
    """Delivers messages to an app of a third party, as Flower's strategies do."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def federation_of(folder: Path, settings: dict[str, Any], nodes: int = 4) -> DirectGrid:
    """A grid of nodes, each with its own folder."""
    return DirectGrid([node(folder, settings, number) for number in range(nodes)])


def node(folder: Path, settings: dict[str, Any], number: int, key: Path | None = None) -> Context:
    """The context of a node: its client, its state folder and its site's key."""
    where: dict[str, Any] = {"partition-id": number, "state": str(folder / f"node-{number}")}
    if key is not None:
        where["key"] = str(key)
    return Context(1, 100 + number, where, RecordDict(), dict(settings))
