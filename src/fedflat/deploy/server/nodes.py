"""The nodes of a federation: which are connected, which client each of them is, and messages that may get no answer."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedflat.deploy.flower.wire import WORDS, content, refusal_reason
from fedflat.deploy.trust.identity import Identity
from fedflat.errors import UserError

log = logging.getLogger("flwr")
POLL, LONGEST_POLL, SLOWDOWN = 0.2, 2.0, 1.3
"""First and longest interval between polls in seconds, and its growth: polling keeps the SuperLink busy."""
GREETING_TIMEOUT, GREETINGS = 60.0, 2
"""Seconds that a new node has to answer a greeting, and how often it is greeted before it is given up."""
NOT_CONNECTED = "its node is not connected"
Answers = tuple[dict[int, RecordDict], dict[int, str]]
"""Answers by client, and for every other client that was asked, why there is none."""


class Greeting(NamedTuple):
    """What a node said when it joined: Flower's id of the node, and the client's number of examples."""

    node: int
    examples: int


class Nodes:
    """The connected nodes.

    A node that returns is greeted again: after a kill Flower gives it a new id, after a lost connection the old one.

    Args:
        grid: Flower's connection to the nodes.
        identity: the experiment that nodes must match.
        clients: clients in the federation.

    Attributes:
        present: the nodes that take part, by client.
        refused: why other nodes do not, by Flower's id of the node.
    """

    def __init__(self, grid: Grid, identity: Identity, clients: int) -> None:
        self._grid, self._identity, self._clients = grid, identity, clients
        self._known: set[int] = set()
        self._greeted: Counter[int] = Counter()
        self._displaced: set[int] = set()
        self.present: dict[int, Greeting] = {}
        self.refused: dict[int, str] = {}

    def gather(self, enough: Callable[[], bool], wait: float, timeout: float) -> None:
        """Greet new nodes until there are enough or ``wait`` seconds have passed; each has ``timeout`` to answer."""
        deadline = time.monotonic() + wait
        while True:
            self._greet(timeout)
            if enough() or time.monotonic() >= deadline:
                return
            time.sleep(POLL)

    def _greet(self, timeout: float) -> None:
        connected = set(self._grid.get_node_ids())
        remaining = {client: greeting for client, greeting in self.present.items() if greeting.node in connected}
        if len(remaining) < len(self.present):  # a displaced node may take the place of one that left
            self._known -= self._displaced
            self._displaced.clear()
        self.present = remaining
        self._known &= connected
        new = sorted(connected - self._known)
        if not new:
            return
        words = self._identity.values()
        contents = {node: content(words=words) for node in new}
        answers, missing = self._exchange("query.hello", contents, "hello", min(timeout, GREETING_TIMEOUT))
        self._greeted.update(new)
        self._known |= {node for node in missing if self._greeted[node] >= GREETINGS}
        for node in missing:
            log.warning("node %d did not answer the greeting: %s", node, missing[node])
        for node, records in answers.items():
            self._known.add(node)
            self._admit(node, records)

    def _admit(self, node: int, records: RecordDict) -> None:
        reason = refusal_reason(records)
        if reason is not None:
            return self._refuse(node, reason)
        words = records.config_records.get(WORDS) or {}
        client, examples = words.get("client"), words.get("examples")
        differences = self._identity.differences(words, "at the server", "at the node")
        if differences:
            return self._refuse(node, f"client {client!r} cannot take part: {differences}")
        if not isinstance(client, int) or not 0 <= client < self._clients:
            return self._refuse(node, f"it claims to be client {client!r}; expected 0 to {self._clients - 1}")
        if not isinstance(examples, int) or examples < 1:
            return self._refuse(node, f"client {client!r} claims to have {examples!r} examples; expected at least one")
        self.present = {taken: greeting for taken, greeting in self.present.items() if greeting.node != node}
        if client in self.present:
            other = self.present[client].node
            self._displaced.add(other)
            log.warning(
                "client %d is no longer node %d but node %d; if both are running, give one another partition-id",
                client,
                other,
                node,
            )
        self.present[client] = Greeting(node, examples)
        log.info("client %d is node %d, with %d examples", client, node, examples)
        return None

    def _refuse(self, node: int, reason: str) -> None:
        self.refused[node] = reason
        log.warning("node %d is refused: %s", node, reason)

    def ask(self, kind: str, contents: Mapping[int, RecordDict], group: str, timeout: float) -> Answers:
        """Send a message to each client and collect the answers.

        Args:
            kind: Flower's message type.
            contents: the message for each client.
            group: Flower's group id; the round, for training.
            timeout: seconds to wait for answers.
        """
        node_of = {client: self.present[client].node for client in contents if client in self.present}
        client_of = {node: client for client, node in node_of.items()}
        by_node = {node: contents[client] for client, node in node_of.items()}
        answered, missing = self._exchange(kind, by_node, group, timeout)
        answers: dict[int, RecordDict] = {}
        reasons = {client: NOT_CONNECTED for client in contents if client not in node_of}
        reasons |= {client_of[node]: reason for node, reason in missing.items()}
        for node, records in answered.items():
            reason = refusal_reason(records)
            if reason is None:
                answers[client_of[node]] = records
            else:
                reasons[client_of[node]] = reason
                self._known.discard(node)  # greet it again: a node restarted under its old id has changed
        return answers, reasons

    def _exchange(self, kind: str, contents: Mapping[int, RecordDict], group: str, timeout: float) -> Answers:
        """Send a message to each node and collect answers until all have arrived or the time is up."""
        deadline = time.monotonic() + timeout
        messages = [Message(records, node, kind, ttl=timeout + 5, group_id=group) for node, records in contents.items()]
        ids = list(self._grid.push_messages(messages))
        waiting = dict(zip(ids, contents, strict=True))
        reasons = {node: "the message could not be sent" for message_id, node in waiting.items() if not message_id}
        waiting = {message_id: node for message_id, node in waiting.items() if message_id}
        answers: dict[int, RecordDict] = {}
        pause = POLL
        while waiting:
            for reply in self._grid.pull_messages(list(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id)
                if reply.has_error():
                    reasons[node] = str(reply.error.reason or f"error {reply.error.code}")
                else:
                    answers[node] = reply.content
            if time.monotonic() >= deadline:
                break
            if waiting:
                time.sleep(pause)
                pause = min(pause * SLOWDOWN, LONGEST_POLL)
        reasons |= dict.fromkeys(waiting.values(), f"no answer within {timeout:g} s")
        return answers, reasons


def too_few(present: int, minimum: int, problem: str) -> UserError:
    """The error that ends a run with too few clients."""
    return UserError(
        f"{problem}: {present} of at least {minimum} (deploy.minimum); start more SuperNodes or check their logs, "
        "then run it again: it continues from its last checkpoint"
    )
