"""The nodes of a federation: who is there, which client each of them is, and messages to them that may never be answered."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedflat.deploy.flower.wire import WORDS, content, why_not
from fedflat.deploy.trust.identity import Identity
from fedflat.errors import UserError

log = logging.getLogger("flwr")
POLL, LONGEST_POLL, SLOWER = 0.2, 2.0, 1.3
"""Seconds between looks for answers at first and at most, and how they grow: looking keeps the SuperLink busy."""
GREETING, GREETINGS = 60.0, 2
"""Seconds that a new node has for a greeting at most, and how often it is greeted: one that died before keeps nobody waiting for long."""
Answers = tuple[dict[int, RecordDict], dict[int, str]]
"""What came, by client; and, of all others that were asked, why nothing did."""


class Greeting(NamedTuple):
    """What a node said when it joined."""

    node: int
    examples: int


class Nodes:
    """Who is there. A node that comes back is greeted as a new one: after a kill it has a new number in Flower, after a cut its old one."""

    def __init__(self, grid: Grid, identity: Identity, clients: int) -> None:
        self._grid, self._identity, self._clients = grid, identity, clients
        self._known: set[int] = set()
        self._greeted: Counter[int] = Counter()
        self._displaced: set[int] = set()
        self.present: dict[int, Greeting] = {}
        """The nodes that may take part, by client."""
        self.refused: dict[int, str] = {}
        """Why others may not, by Flower's number of the node."""

    def gather(self, wanted: Callable[[], bool], wait: float, timeout: float) -> None:
        """Greet whoever is new, and go on doing so until there are enough or the time is over."""
        until = time.monotonic() + wait
        while True:
            self._greet(timeout)
            if wanted() or time.monotonic() >= until:
                return
            time.sleep(POLL)

    def _greet(self, timeout: float) -> None:
        here = set(self._grid.get_node_ids())
        left = {client: greeting for client, greeting in self.present.items() if greeting.node in here}
        if len(left) < len(self.present):  # perhaps the place of one that another displaced
            self._known -= self._displaced
            self._displaced.clear()
        self.present = left
        self._known &= here
        new = sorted(here - self._known)
        if not new:
            return
        words = self._identity.values()
        came, missing = self._exchange(
            "query.hello", {node: content(words=words) for node in new}, "hello", min(timeout, GREETING)
        )
        self._greeted.update(new)
        self._known |= {node for node in missing if self._greeted[node] >= GREETINGS}
        for node in missing:
            log.warning("node %d did not answer the greeting: %s", node, missing[node])
        for node, records in came.items():
            self._known.add(node)
            self._seat(node, records)

    def _seat(self, node: int, records: RecordDict) -> None:
        no = why_not(records)
        if no is not None:
            return self._refuse(node, no)
        said = records.config_records.get(WORDS) or {}
        client, examples = said.get("client"), said.get("examples")
        different = self._identity.differences(said, "at the server", "at the node")
        if different:
            return self._refuse(node, f"client {client!r} cannot take part: {different}")
        if not isinstance(client, int) or not 0 <= client < self._clients:
            return self._refuse(
                node, f"it says that it is client {client!r}, but there are clients 0 to {self._clients - 1}"
            )
        if not isinstance(examples, int) or examples < 1:
            return self._refuse(node, f"client {client!r} says that it has {examples!r} examples")
        self.present = {taken: greeting for taken, greeting in self.present.items() if greeting.node != node}
        if client in self.present:
            other = self.present[client].node
            self._displaced.add(other)
            log.warning(
                "client %d is no longer node %d but node %d; where both run, give one of them another partition-id",
                client,
                other,
                node,
            )
        self.present[client] = Greeting(node, examples)
        log.info("client %d is node %d, with %d examples", client, node, examples)
        return None

    def _refuse(self, node: int, why: str) -> None:
        self.refused[node] = why
        log.warning("node %d is refused: %s", node, why)

    def ask(self, kind: str, contents: Mapping[int, RecordDict], group: str, timeout: float) -> Answers:
        """Ask clients something; those that are not there, refuse, fail or are late are named with the reason."""
        node_of = {client: self.present[client].node for client in contents if client in self.present}
        client_of = {node: client for client, node in node_of.items()}
        came, missing = self._exchange(
            kind, {node: contents[client] for client, node in node_of.items()}, group, timeout
        )
        answers: dict[int, RecordDict] = {}
        why = {client: "its node is not there" for client in contents if client not in node_of}
        why |= {client_of[node]: reason for node, reason in missing.items()}
        for node, records in came.items():
            no = why_not(records)
            if no is not None:
                why[client_of[node]] = no
                self._known.discard(
                    node
                )  # it may be greeted again: a node that was started anew under its old number has changed
            else:
                answers[client_of[node]] = records
        return answers, why

    def _exchange(self, kind: str, contents: Mapping[int, RecordDict], group: str, timeout: float) -> Answers:
        """Send a message to each node and gather answers until all are there or the time is over."""
        until = time.monotonic() + timeout
        messages = [Message(records, node, kind, ttl=timeout + 5, group_id=group) for node, records in contents.items()]
        numbers = list(self._grid.push_messages(messages))
        waiting = dict(zip(numbers, contents, strict=True))
        why = {node: "the message could not be sent" for number, node in waiting.items() if not number}
        waiting = {number: node for number, node in waiting.items() if number}
        came: dict[int, RecordDict] = {}
        pause = POLL
        while waiting:
            for reply in self._grid.pull_messages(list(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id)
                if reply.has_error():
                    why[node] = str(reply.error.reason or f"error {reply.error.code}")
                else:
                    came[node] = reply.content
            if time.monotonic() >= until:
                break
            if waiting:
                time.sleep(pause)
                pause = min(pause * SLOWER, LONGEST_POLL)
        why |= dict.fromkeys(waiting.values(), f"no answer within {timeout:g} s")
        return came, why


def too_few(present: int, minimum: int, what: str) -> UserError:
    """The error that ends a run which has too few clients."""
    return UserError(
        f"{what}: {present} of at least {minimum} (deploy.minimum); start more SuperNodes, or look at their logs, "
        "and run it again: it goes on from its last checkpoint"
    )
