"""The nodes of a federation: which are connected, which client each of them runs, and how to send them messages."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedflat.deploy.flower.wire import CHALLENGE, CLIENT, HEADER, message_content, refusal_reason
from fedflat.deploy.trust.identity import Identity
from fedflat.deploy.trust.signatures import AllowedSite, receipt_flaw
from fedflat.display import names_by_reason
from fedflat.errors import UserError
from fedflat.setting_names import MAX_COUNT

log = logging.getLogger("flwr")
POLL, LONGEST_POLL, SLOWDOWN = 0.2, 2.0, 1.3
"""First and longest interval between polls in seconds, and its growth factor: frequent polls load the SuperLink."""
GREETING_TIMEOUT = 60.0
"""Seconds that a round waits for the answer of a new node to its greeting."""
GREETING_TTL = 120.0
"""Seconds after which an unanswered greeting is sent again."""
PULLED_AT_ONCE = 2
"""Answers that are pulled together: Flower holds all of them in memory."""
NOT_CONNECTED = "its node is not connected, or was rejected"
LONGEST_REASON = 4000
"""Characters of a site's text that are stored and logged."""


class Absences(NamedTuple):
    """For every client that was asked in vain, why there is no answer, or why it is rejected."""

    missing: dict[int, str]
    rejected: dict[int, str]


class JoinedNode(NamedTuple):
    """A node that has joined: Flower's id of the node, and its client's number of examples."""

    node: int
    examples: int


class _Greeting(NamedTuple):
    """A greeting that has not been answered: the node, the content, and the time at which it is sent again."""

    node: int
    content: RecordDict
    until: float


class Nodes:
    """The connected nodes.

    The server greets every new node, and the node answers which client it runs. A node that returns is greeted again:
    Flower gives it a new id if it was killed, and its old id if it only lost its connection.

    A node must prove with its site's key which client it is, if there is a list of sites. Otherwise a client belongs to
    the first node that claims it, for as long as that node is connected.

    Args:
        grid: Flower's connection to the nodes.
        identity: the experiment that nodes must match.
        clients: number of clients in the federation.
        sites: the sites that may take part, by client; None if every node may.

    Attributes:
        present: the nodes that take part, by client.
        rejected: for each rejected node, by Flower's id of the node, the reason.
    """

    def __init__(
        self, grid: Grid, identity: Identity, clients: int, sites: Mapping[int, AllowedSite] | None = None
    ) -> None:
        self._grid, self._identity, self._clients, self._sites = grid, identity, clients, sites
        self._settled: set[int] = set()  # nodes that need no greeting: joined, or replaced by another node
        self._replaced: set[int] = set()  # nodes whose client is at another node
        self._known: set[int] = set()  # nodes that have been greeted before
        self._tried: set[int] = set()  # connected nodes that have been greeted in this call of wait_for
        self._greetings: dict[str, _Greeting] = {}  # unanswered, by message id
        self._client_of: dict[int, int] = {}  # the clients that nodes have proven to be, also of rejected nodes
        self.present: dict[int, JoinedNode] = {}
        self.rejected: dict[int, str] = {}

    def label(self, client: int) -> str:
        """Return the client's number, with the name of its site if that is known."""
        site = self.site(client)
        return f"client {client} ({site.name})" if site else f"client {client}"

    def labelled(self, reasons: Mapping[int, str]) -> dict[str, str]:
        """Return reasons by client, in ascending order, with the clients' labels in place of their numbers."""
        return {self.label(client): reason for client, reason in sorted(reasons.items())}

    def rejections(self) -> dict[str, str]:
        """Return why nodes are rejected, by site, or by node if its site is unknown."""
        clients = self._client_of
        return {
            self.label(clients[node]) if node in clients else f"node {node}": reason
            for node, reason in self.rejected.items()
        }

    def too_few_error(self, count: int, minimum: int, what_happened: str, setting: str = "deploy.minimum") -> UserError:
        """Return the error that ends a run with too few clients.

        Args:
            count: number of clients, or of their updates.
            minimum: the required number.
            what_happened: begins the message.
            setting: decides on ``minimum``.
        """
        reasons = names_by_reason(self.rejections()).items()
        rejected = "".join(f"; rejected {names}: {reason}" for reason, names in reasons)
        return UserError(
            f"{what_happened}: {count}, but at least {minimum} are required ({setting}){rejected}; start more "
            "SuperNodes or check their logs, then start the run again, which continues from its last checkpoint"
        )

    def names(self) -> dict[int, str]:
        """Return the names of the sites by client; empty without a list of sites."""
        return {client: site.name for client, site in (self._sites or {}).items()}

    def site(self, client: int) -> AllowedSite | None:
        """Return the name and the key of a client's site; None without a list of sites."""
        return None if self._sites is None else self._sites.get(client)

    def wait_for(self, enough: Callable[[], bool], wait: float, timeout: float) -> None:
        """Greet new nodes until ``enough()`` is true or ``wait`` seconds have passed.

        Each greeting may take ``timeout`` seconds, at most ``GREETING_TIMEOUT``.
        """
        deadline = time.monotonic() + wait
        self._tried.clear()
        while True:
            self._greet(timeout)
            if enough() or time.monotonic() >= deadline:
                return
            time.sleep(POLL)

    def _greet(self, timeout: float) -> None:
        """Forget nodes that have left, greet all others that take no part, and admit those that answer.

        New nodes have ``timeout`` seconds. The others, which were rejected or have not answered so far, are greeted
        again once per round, and the round does not wait for them.
        """
        earlier = self.rejections()
        connected = set(self._grid.get_node_ids())
        remaining = {client: joined for client, joined in self.present.items() if joined.node in connected}
        # Once some node has left, a node whose client was at another node may be able to take its place.
        if len(remaining) < len(self.present):
            self._settled -= self._replaced
            self._tried -= self._replaced
            self._replaced.clear()
        self.present = remaining
        self._settled &= connected
        self._known &= connected
        self._tried &= connected
        start = time.monotonic()
        self._greetings = {
            number: greeting
            for number, greeting in self._greetings.items()
            if greeting.node in connected and greeting.until > start
        }
        waiting = {greeting.node for greeting in self._greetings.values()}
        due = sorted(connected - self._settled - self._tried - waiting)
        new_nodes = set(due) - self._known
        self._tried.update(due)
        self._known.update(due)
        values = self._identity.values()
        contents = {node: message_content(header=values | {CHALLENGE: secrets.token_hex(16)}) for node in due}
        sent, not_sent = self._push("query.hello", contents, "hello", GREETING_TTL)
        self._greetings |= {
            number: _Greeting(node, contents[node], start + GREETING_TTL) for number, node in sent.items()
        }
        self._receive_greetings()
        while new_nodes & self._unanswered() and time.monotonic() < start + min(timeout, GREETING_TIMEOUT):
            time.sleep(POLL)
            self._receive_greetings()
        late = dict.fromkeys(new_nodes & self._unanswered(), "it has not answered the greeting so far")
        self.rejected |= not_sent | late
        new = {name: reason for name, reason in self.rejections().items() if earlier.get(name) != reason}
        for reason, names in names_by_reason(new).items():
            log.warning("rejected %s: %s", names, reason)

    def _unanswered(self) -> set[int]:
        """Return the nodes that have not answered their greeting."""
        return {greeting.node for greeting in self._greetings.values()}

    def _receive_greetings(self) -> None:
        """Admit or reject the nodes whose answers to a greeting have arrived."""
        for number, answer in self._pull(self._greetings):
            node, content, _ = self._greetings.pop(number)
            reason = answer if isinstance(answer, str) else self._join(node, content, answer)
            if reason:
                self.rejected[node] = _printable(reason)
            else:  # earlier nodes of this client no longer matter
                former = {other for other, client in self._client_of.items() if client == self._client_of[node]}
                self.rejected = {other: why for other, why in self.rejected.items() if other not in former}

    def _join(self, node: int, greeting: RecordDict, records: RecordDict) -> str:
        """Let a node join that answered a greeting with ``records``; returns why it is rejected, empty if it joined."""
        header = records.config_records.get(HEADER) or {}
        client, examples = header.get(CLIENT), header.get("examples")
        known_clients = range(self._clients) if self._sites is None else self._sites
        if isinstance(client, int) and client in known_clients:
            flaw = receipt_flaw(records, greeting, self.site(client))
            if not flaw:
                self._client_of[node] = client
        reason = refusal_reason(records)
        if reason is not None:
            return reason
        differences = self._identity.differences(header, "at the server", "at the node")
        if differences:
            return differences
        if not isinstance(client, int) or not 0 <= client < self._clients:
            return f"it claims to be client {client!r}; expected 0 to {self._clients - 1}"
        if not isinstance(examples, int) or not 1 <= examples <= MAX_COUNT:
            return f"it claims to have {examples!r} examples; expected 1 to {MAX_COUNT}"
        if self._sites is not None and client not in self._sites:
            return f"it claims to be client {client}, which is not in the list of sites"
        if flaw:
            return f"it claims to be {self.label(client)}, but its answer proves nothing: {flaw}"
        # A node that was restarted under its old id may have joined as another client before.
        self.present = {number: joined for number, joined in self.present.items() if joined.node != node}
        if client in self.present:
            previous_node = self.present[client].node
            if self._sites is None:  # nothing proves that the new node is the client
                self._replaced.add(node)
                self._settled.add(node)
                return (
                    f"node {node} claims to be client {client}, which is node {previous_node}; "
                    "give one of them another partition-id"
                )
            self._replaced.add(previous_node)
            log.warning("%s is no longer node %d but node %d", self.label(client), previous_node, node)
        self._settled.add(node)
        self.present[client] = JoinedNode(node, examples)
        log.info("%s is node %d, with %d examples", self.label(client), node, examples)
        return ""

    def ask(
        self,
        kind: str,
        contents: Mapping[int, RecordDict],
        group: str,
        timeout: float,
        receive: Callable[[int, RecordDict], str],
        quorum: int | None = None,
    ) -> Absences:
        """Send a message to each client, and collect answers until all or enough have arrived, or the time is up.

        Every message gets a new challenge.

        Args:
            kind: Flower's message type.
            contents: the message for each client, by number of the client.
            group: Flower's group id of the messages; the round, for training.
            timeout: seconds to wait for answers.
            receive: called with the client and its answer as soon as it has arrived; returns why the answer is
                rejected, or an empty string.
            quorum: number of valid answers that are enough; None to wait for all.
        """
        client_of = {self.present[client].node: client for client in contents if client in self.present}
        by_node = {node: contents[client] for node, client in client_of.items()}
        for records in by_node.values():
            records.config_records[HEADER][CHALLENGE] = secrets.token_hex(16)
        missing = {client: NOT_CONNECTED for client in contents if client not in client_of.values()}
        rejected: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        waiting, not_sent = self._push(kind, by_node, group, timeout + 5)
        missing |= {client_of[node]: reason for node, reason in not_sent.items()}
        late, pause, valid = f"no answer within {timeout:g} s", POLL, 0
        while waiting:
            for number, answer in self._pull(waiting):
                node = waiting.pop(number)
                client = client_of[node]
                if isinstance(answer, str):
                    missing[client] = _printable(answer)
                elif (reason := refusal_reason(answer)) is not None:
                    missing[client] = _printable(reason)
                    self._settled.discard(node)  # restarted under its old id, the node has changed: greet it as new
                    self._known.discard(node)
                elif flaw := receipt_flaw(answer, by_node[node], self.site(client)) or receive(client, answer):
                    rejected[client] = _printable(flaw)
                else:
                    valid += 1
            if quorum is not None and valid >= quorum:
                late = f"no answer before {quorum} others (deploy.quorum)"
                break
            if time.monotonic() >= deadline:
                break
            if waiting:
                time.sleep(pause)
                pause = min(pause * SLOWDOWN, LONGEST_POLL)
        missing |= {client_of[node]: late for node in waiting.values()}
        return Absences(missing, rejected)

    def _push(
        self, kind: str, contents: Mapping[int, RecordDict], group: str, ttl: float
    ) -> tuple[dict[str, int], dict[int, str]]:
        """Send a message to each node, valid for ``ttl`` seconds.

        Returns:
            The nodes by message id, and for each node to which no message could be sent the reason.
        """
        messages = [Message(records, node, kind, ttl=ttl, group_id=group) for node, records in contents.items()]
        pushed = list(zip(self._grid.push_messages(messages), contents, strict=True))
        not_sent = {node: "the message could not be sent" for message_id, node in pushed if not message_id}
        return {message_id: node for message_id, node in pushed if message_id}, not_sent

    def _pull(self, waiting: Iterable[str]) -> Iterator[tuple[str, RecordDict | str]]:
        """Yield the answers that have arrived, by id of the message: the content, or why there is none."""
        numbers = list(waiting)
        for start in range(0, len(numbers), PULLED_AT_ONCE):
            for reply in self._grid.pull_messages(numbers[start : start + PULLED_AT_ONCE]):
                if reply.has_error():
                    answer: RecordDict | str = str(reply.error.reason or f"error {reply.error.code}")
                else:
                    answer = reply.content
                yield reply.metadata.reply_to_message_id, answer


def _printable(text: str) -> str:
    """Return the text of a site on one line: line breaks and control characters could forge lines of the log."""
    return "".join(character if character.isprintable() else " " for character in text[:LONGEST_REASON])
