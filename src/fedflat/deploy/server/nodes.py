"""The nodes of a federation: which are connected, which client each of them runs, and how to send them messages."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedflat.deploy.flower.wire import HEADER, message_content, refusal_reason
from fedflat.deploy.trust.identity import Identity
from fedflat.errors import UserError

log = logging.getLogger("flwr")
POLL, LONGEST_POLL, SLOWDOWN = 0.2, 2.0, 1.3
"""First and longest interval between polls in seconds, and its growth factor: frequent polls load the SuperLink."""
GREETING_TIMEOUT, GREETINGS = 60.0, 2
"""Seconds that a new node has to answer a greeting, and the number of greetings after which the server gives up."""
NOT_CONNECTED = "its node is not connected"
Answers = tuple[dict[int, RecordDict], dict[int, str]]
"""Answers by client, and for every other client that was asked, why there is none."""


class JoinedNode(NamedTuple):
    """A node that has joined: Flower's id of the node, and its client's number of examples."""

    node: int
    examples: int


class Nodes:
    """The connected nodes.

    The server greets every new node, and the node answers which client it runs. A node that returns is greeted again:
    Flower gives it a new id if it was killed, and its old id if it only lost its connection.

    Args:
        grid: Flower's connection to the nodes.
        identity: the experiment that nodes must match.
        clients: number of clients in the federation.

    Attributes:
        present: the nodes that take part, by client.
        refused: for each refused node, by Flower's id of the node, the reason.
    """

    def __init__(self, grid: Grid, identity: Identity, clients: int) -> None:
        self._grid, self._identity, self._clients = grid, identity, clients
        self._settled: set[int] = set()  # nodes that need no greeting: joined, refused or given up
        self._greetings: Counter[int] = Counter()  # by node
        self._displaced: set[int] = set()  # nodes whose client has joined again from another node
        self.present: dict[int, JoinedNode] = {}
        self.refused: dict[int, str] = {}

    def wait_for(self, enough: Callable[[], bool], wait: float, timeout: float) -> None:
        """Greet new nodes until ``enough()`` is true or ``wait`` seconds have passed.

        Each greeting may take ``timeout`` seconds, at most ``GREETING_TIMEOUT``.
        """
        deadline = time.monotonic() + wait
        while True:
            self._greet(timeout)
            if enough() or time.monotonic() >= deadline:
                return
            time.sleep(POLL)

    def _greet(self, timeout: float) -> None:
        """Forget nodes that have left, greet new ones and admit those that answer within ``timeout`` seconds."""
        connected = set(self._grid.get_node_ids())
        remaining = {client: joined for client, joined in self.present.items() if joined.node in connected}
        # Displaced nodes lost their client to another node. Once some node has left, they may be able to take it back.
        if len(remaining) < len(self.present):
            self._settled -= self._displaced
            self._displaced.clear()
        self.present = remaining
        self._settled &= connected
        new_nodes = sorted(connected - self._settled)
        if not new_nodes:
            return
        contents = {node: message_content(header=self._identity.values()) for node in new_nodes}
        answers, missing = self._exchange("query.hello", contents, "hello", min(timeout, GREETING_TIMEOUT))
        self._greetings.update(new_nodes)
        for node, reason in missing.items():
            log.warning("node %d did not answer the greeting: %s", node, reason)
            if self._greetings[node] >= GREETINGS:
                self._settled.add(node)
        for node, records in answers.items():
            self._settled.add(node)
            refusal = self._join(node, records)
            if refusal is not None:
                self.refused[node] = refusal
                log.warning("node %d is refused: %s", node, refusal)

    def _join(self, node: int, records: RecordDict) -> str | None:
        """Let a node join that answered a greeting with ``records``; returns why it is refused, None if it joined."""
        reason = refusal_reason(records)
        if reason is not None:
            return reason
        header = records.config_records.get(HEADER) or {}
        client, examples = header.get("client"), header.get("examples")
        differences = self._identity.differences(header, "at the server", "at the node")
        if differences:
            return f"client {client!r} cannot take part: {differences}"
        if not isinstance(client, int) or not 0 <= client < self._clients:
            return f"it claims to be client {client!r}; expected 0 to {self._clients - 1}"
        if not isinstance(examples, int) or examples < 1:
            return f"client {client!r} claims to have {examples!r} examples; expected at least one"
        # A node that was restarted under its old id may have joined as another client before.
        self.present = {number: joined for number, joined in self.present.items() if joined.node != node}
        if client in self.present:
            previous_node = self.present[client].node
            self._displaced.add(previous_node)
            log.warning(
                "client %d is no longer node %d but node %d; if both are running, give one another partition-id",
                client,
                previous_node,
                node,
            )
        self.present[client] = JoinedNode(node, examples)
        log.info("client %d is node %d, with %d examples", client, node, examples)
        return None

    def ask(self, kind: str, contents: Mapping[int, RecordDict], group: str, timeout: float) -> Answers:
        """Send a message to each client; return the answers by client, and the reason for each client without one.

        Args:
            kind: Flower's message type.
            contents: the message for each client, by number of the client.
            group: Flower's group id of the messages; the round, for training.
            timeout: seconds to wait for answers.
        """
        node_of = {client: self.present[client].node for client in contents if client in self.present}
        client_of = {node: client for client, node in node_of.items()}
        by_node = {node: contents[client] for client, node in node_of.items()}
        answers_by_node, missing = self._exchange(kind, by_node, group, timeout)
        answers: dict[int, RecordDict] = {}
        reasons = {client: NOT_CONNECTED for client in contents if client not in node_of}
        reasons |= {client_of[node]: reason for node, reason in missing.items()}
        for node, records in answers_by_node.items():
            reason = refusal_reason(records)
            if reason is None:
                answers[client_of[node]] = records
            else:
                reasons[client_of[node]] = reason
                self._settled.discard(node)  # greet it again: a node restarted under its old id has changed
        return answers, reasons

    def _exchange(self, kind: str, contents: Mapping[int, RecordDict], group: str, timeout: float) -> Answers:
        """Send a message to each node and collect answers until all have arrived or the time is up.

        Args:
            kind: Flower's type of the messages, such as ``train``.
            contents: content of the message to each node.
            group: Flower's group id of the messages, e.g. the round.
            timeout: seconds to wait for answers.

        Returns:
            The answers by node, and for each node without one the reason.
        """
        deadline = time.monotonic() + timeout
        messages = [Message(records, node, kind, ttl=timeout + 5, group_id=group) for node, records in contents.items()]
        waiting: dict[str, int] = {}  # nodes by message id
        answers: dict[int, RecordDict] = {}
        reasons: dict[int, str] = {}
        for message_id, node in zip(self._grid.push_messages(messages), contents, strict=True):
            if message_id:
                waiting[message_id] = node
            else:
                reasons[node] = "the message could not be sent"
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


def too_few_clients(count: int, minimum: int, what_happened: str) -> UserError:
    """Return the error that ends a run with too few clients; ``what_happened`` begins its message."""
    return UserError(
        f"{what_happened}: {count}, but at least {minimum} are required (deploy.minimum); start more SuperNodes or "
        "check their logs, then start the run again, which continues from its last checkpoint"
    )
