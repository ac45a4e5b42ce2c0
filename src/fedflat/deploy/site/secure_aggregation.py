"""A site's part in secure aggregation: keys, shares, the masked update, and the shares that unmask.

Flower handles every message in a new process, so the secrets are in Flower's context between messages. They are new for
every sum and deleted with the last message. The site trusts nothing that the server says about other sites: it checks
what they have signed or confirmed.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from torch import Tensor

from fedflat.deploy.flower.wire import (
    BASE,
    BUFFERS,
    CLIENT,
    DISPLACEMENT,
    EXPERIMENT,
    FIRST_BASE,
    HEADER,
    INTEGERS,
    ROUND,
    STATE_VERSION,
    message_content,
)
from fedflat.deploy.settings import config_of, deployment_of, settings_digest
from fedflat.deploy.site.client_memory import ClientMemory
from fedflat.deploy.site.policy import MINIMUM, SitePolicy
from fedflat.deploy.site.site import Site
from fedflat.deploy.trust.secure_sum import (
    CLIPPED,
    LOSS,
    NORMALISED,
    SECURE,
    SHARE_BYTES,
    PublicKeys,
    Purpose,
    Roster,
    add_mask,
    agree,
    are_signed,
    commitment,
    encode,
    exceeds_range,
    mask_key,
    new_secret,
    pair_sign,
    public_bytes,
    require_public_integers,
    seal,
    sign_keys,
    split,
    statement_tag,
    unseal,
)
from fedflat.engines.round.contract import Training
from fedflat.errors import UserError

log = logging.getLogger("flwr")
STATE = "fedflat-secure"
"""Key in a node's context: the secrets of the sum that this site takes part in."""
ROSTER = ("members", "mask_keys", "box_keys", "examples")
"""What the server says about the sites of a sum, and what each site keeps of it."""
MASKED, CONFIRMED = "masked", "confirmed"
"""Stages of a sum, and what a site states to others in them: with whom it has masks, and who remains."""


class SiteSum:
    """A sum that this site takes part in, in its state when a message about it arrives.

    Every method answers one message and raises ``UserError`` if the message does not follow from the previous one.

    Args:
        question: content of the message.
        context: Flower's context, which has the secrets between messages.
        policy: what the site permits.
    """

    def __init__(self, question: RecordDict, context: Context, policy: SitePolicy) -> None:
        header = question.config_records[HEADER]
        self._context, self._policy, self._client = context, policy, policy.client
        if header[CLIENT] != policy.client:
            raise UserError(f"this node is client {policy.client}, but the message is for client {header[CLIENT]}")
        experiment, base, first_base = (str(header[name]) for name in (EXPERIMENT, BASE, FIRST_BASE))
        settings = settings_digest(context.run_config)
        self._purpose = Purpose(experiment, int(header[ROUND]), base, first_base, settings)
        self._version = int(header[STATE_VERSION])
        self._memory = ClientMemory(policy.folder, experiment, policy.client)
        self._received = dict(question.config_records.get(SECURE) or {})

    def offer_keys(self) -> RecordDict:
        """Return new public keys, signed if the site has a key."""
        secret, box_key = new_secret(), X25519PrivateKey.generate()
        keys = PublicKeys(public_bytes(mask_key(secret)), public_bytes(box_key))
        self._keep("keys", self._purpose._asdict() | {"secret": secret, "box_key": box_key.private_bytes_raw()})
        key = self._policy.key
        signature = sign_keys(key, self._purpose, self._client, keys) if key else b""
        return _content({**keys._asdict(), "signature": signature})

    def offer_shares(self) -> RecordDict:
        """Return shares of this site's two secrets for each other site, encrypted, and a commitment to its seed."""
        state, received, client = self._kept("keys"), self._received, self._client
        roster = self._roster(received)
        box_key, seed = X25519PrivateKey.from_private_bytes(state["box_key"]), new_secret()
        own_keys = PublicKeys(public_bytes(mask_key(state["secret"])), public_bytes(box_key))
        all_keys = [key for keys in roster.keys.values() for key in keys]
        if roster.keys.get(client) != own_keys or len(set(all_keys)) < len(all_keys):
            raise UserError("the server's list of keys repeats a key, or lacks this site")
        if min(roster.examples.values()) < 1:
            raise UserError("the server's list contains a site without examples")
        if roster.threshold < self._policy.minimum:  # the server chooses the threshold
            raise UserError(
                f"the sum needs only {roster.threshold} of {len(roster.keys)} sites, but this node requires at least "
                f"{self._policy.minimum} ({MINIMUM} in its --node-config); start more sites or raise "
                "deploy.secure_threshold"
            )
        if self._policy.sites is not None:
            self._require_signatures(roster, received["signatures"])
        secrets = [split(secret, roster.threshold, len(roster.keys)) for secret in (seed, state["secret"])]
        shares = dict(zip(roster.clients, map(b"".join, zip(*secrets, strict=True)), strict=True))
        own_shares, digest = shares.pop(client), roster.digest()
        boxes = [
            seal(agree(box_key, roster.keys[other].box, b"box", digest), content, client, other)
            for other, content in shares.items()
        ]
        listed = {name: received[name] for name in ROSTER}  # nothing else: the server must not replace a secret
        self._keep("shares", listed | state | {"seed": seed, "own_shares": own_shares})
        return _content({"clients": list(shares), "boxes": boxes, "commitment": commitment(seed)})

    def open(self, kind: str, examples: int) -> None:
        """Decrypt the shares of the other sites, which come with the task to train, before the site works on it.

        Raises ``UserError`` if too few sites have sent shares, if the site has worked on another task in this round, or
        if it is asked to train from an earlier state: comparing two such sums could reveal a single update.

        Args:
            kind: what is summed: all sites of a sum must say the same.
            examples: number of examples of this site.
        """
        state, client = self._kept("shares"), self._client
        roster = self._roster(state)
        if roster.examples[client] != examples:
            listed = roster.examples[client]
            raise UserError(f"this node has {examples} examples, but the server's list says {listed}")
        boxes = dict(zip(self._received.get("clients", []), self._received.get("boxes", []), strict=True))
        _require_enough(len(boxes) + 1, roster.threshold)
        if client in boxes or not boxes.keys() <= roster.keys.keys():
            raise UserError("the server sent shares of sites that are not in the sum")
        box_key, digest = X25519PrivateKey.from_private_bytes(state["box_key"]), roster.digest()
        shares = [
            unseal(agree(box_key, roster.keys[sender].box, b"box", digest), box, sender, client)
            for sender, box in boxes.items()
        ]
        round, version, summed = self._purpose.round, self._version, self._memory.last_round("sum")
        if version <= summed < round:
            raise UserError(
                f"this client's update of round {summed} has already been summed, so this node refuses to train from "
                f"an older state in round {round}; start a new run"
            )
        task = json.dumps([*self._purpose, self._memory.digest(version), examples])
        if self._memory.commit(kind, round, task) != task:
            raise UserError(
                f"round {round} has already begun with a different model, client state, dataset or settings, and a "
                "second sum would reveal the difference between the updates; restore the originals or start a new run"
            )
        self._opened = state | {
            "kind": kind,
            "senders": [client, *boxes],
            "shares": [state["own_shares"], *shares],
        }

    def mask(self, site: Site, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> RecordDict:
        """Return the content of a reply with masked arrays; integer buffers and numbers, except the loss, stay clear.

        Values outside the range of the sum are clipped; the server sees how many sites do so. ``open`` comes first.
        """
        state, client = self._opened, self._client
        roster = self._roster(state)
        others, digest = state["senders"][1:], roster.digest()
        arrays = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in tensors.items()}
        clear = {name: array for name, array in arrays.items() if name.startswith(INTEGERS)}
        require_public_integers(clear)
        weights = dict.fromkeys(arrays.keys() - clear.keys(), roster.weights()[client])
        if LOSS in numbers:
            arrays[LOSS], weights[LOSS] = np.asarray(numbers[LOSS]), 1 / len(roster.keys)
        exceeding = sorted(name for name in weights if exceeds_range(arrays[name], roster.deployment))
        if exceeding:
            log.warning("fedflat: %s has values beyond deploy.secure_range, which are clipped", ", ".join(exceeding))
        is_private = site.training.privacy is not None
        # The number of sites that clip has no noise, so private runs do not count them.
        arrays[CLIPPED], weights[CLIPPED] = np.asarray(float(bool(exceeding) and not is_private)), 1 / len(roster.keys)
        # Rounding must not exceed the clipping norm of privacy.
        masked = {name: encode(arrays[name], weight, roster.deployment, is_private) for name, weight in weights.items()}
        add_mask(masked, state["seed"], 1)
        key = mask_key(state["secret"])
        for other in others:
            add_mask(masked, agree(key, roster.keys[other].mask, b"mask", digest), pair_sign(client, other))
        self._keep(MASKED, state)
        record = ArrayRecord({name: Array(array) for name, array in (clear | masked).items()})
        content = message_content(record, numbers=dict(numbers) | dict.fromkeys(numbers.keys() & {LOSS}, 0.0))
        content[SECURE] = self._statement(state, roster, others, _masked_with(state))
        return content

    def confirm(self) -> RecordDict:
        """Confirm to the sites whose updates arrived that it knows them; from then on, it knows no others."""
        state = self._kept(MASKED)
        roster = self._roster(state)
        survivors = self._survivors(state, roster)
        self._keep(CONFIRMED, state | {"survivors": survivors})
        others = [client for client in survivors if client != self._client]
        return RecordDict(
            {SECURE: self._statement(state, roster, others, [*_masked_with(state), CONFIRMED, survivors])}
        )

    def reveal_shares(self) -> RecordDict:
        """Return shares of the seeds of sites whose updates arrived, and of the keys of those that dropped out.

        Keys are revealed only if enough sites confirm who has dropped out. The secrets are deleted first, so that the
        server cannot ask twice.
        """
        state = self._kept(MASKED, CONFIRMED)
        del self._context.state[STATE]
        self._memory.next_token(state["token"])
        roster = self._roster(state)
        survivors = self._survivors(state, roster)
        if survivors != state.get("survivors", sorted(state["senders"])):
            raise UserError("the server named a different set of sites than this node confirmed")
        if "survivors" in state:
            confirmed = dict(zip(self._received["confirmed"], self._received["confirmations"], strict=True))
            statement = [*_masked_with(state), CONFIRMED, survivors]
            agreeing = [
                client
                for client, tag in confirmed.items()
                if client in survivors
                and client != self._client
                and self._states(state, roster, client, statement, tag)
            ]
            _require_enough(len(agreeing) + 1, roster.threshold)
        deployment, round = roster.deployment, self._purpose.round
        clients = ", ".join(map(str, survivors))
        encoding = f"range {deployment.secure_range}, {deployment.secure_bits} bits"
        # Other settings may change the weights of sites, and two sums with different weights reveal single updates.
        wanted = f"{clients} ({encoding}, settings {self._purpose.settings[:12]})"
        recorded = self._memory.commit("sum", round, wanted)
        if recorded != wanted:
            raise UserError(
                f"round {round} has been summed with clients {recorded}, and another sum, with clients {wanted}, could "
                "reveal single updates; restore the same clients and settings, or start a new run"
            )
        shares = [
            pair[:SHARE_BYTES] if client in survivors else pair[SHARE_BYTES:]
            for client, pair in zip(state["senders"], state["shares"], strict=True)
        ]
        return _content({"clients": state["senders"], "shares": shares})

    def _survivors(self, state: Mapping[str, Any], roster: Roster) -> list[int]:
        """Return the sites whose updates are in the sum, in ascending order.

        Raises ``UserError`` if they are too few, or have masks in common with other sites than this one: the server
        could remove all masks of a site that has them only in common with sites that have dropped out.
        """
        survivors = sorted(set(self._received["clients"]))
        _require_enough(len(survivors), roster.threshold)
        others = [client for client in self._received["clients"] if client != self._client]
        if len(others) != len(survivors) - 1 or not set(survivors) <= set(state["senders"]):
            raise UserError("the server's list of updates repeats a site, lacks this one, or has unknown ones")
        for other, tag in zip(others, self._received["tags"], strict=True):
            if not self._states(state, roster, other, _masked_with(state), tag):
                raise UserError(
                    f"client {other} shares masks with a different set of sites than this node, or its statement is "
                    "forged"
                )
        return survivors

    def _statement(
        self, state: Mapping[str, Any], roster: Roster, others: list[int], statement: list[Any]
    ) -> ConfigRecord:
        """Return a statement to other sites: the proof for each of them."""
        box_key = X25519PrivateKey.from_private_bytes(state["box_key"])
        tags = [
            statement_tag(box_key, roster.keys[other].box, self._client, statement, roster.digest()) for other in others
        ]
        return ConfigRecord({"clients": others, "tags": tags})

    def _states(self, state: Mapping[str, Any], roster: Roster, other: int, statement: list[Any], tag: bytes) -> bool:
        """Whether another site makes a statement to this one."""
        box_key = X25519PrivateKey.from_private_bytes(state["box_key"])
        expected = statement_tag(box_key, roster.keys[other].box, other, statement, roster.digest())
        return hmac.compare_digest(expected, tag)

    def _require_signatures(self, roster: Roster, signatures: list[bytes]) -> None:
        """Raise ``UserError`` unless the keys of all sites are signed with the keys in this site's own list."""
        assert self._policy.sites is not None
        for client, signature in zip(roster.clients, signatures, strict=True):
            site = self._policy.sites.get(client)
            if site is None or not are_signed(site.key, signature, roster.purpose, client, roster.keys[client]):
                raise UserError(f"the keys of client {client} are not signed with the key in this site's list of sites")

    def _keep(self, stage: str, values: Mapping[str, Any]) -> None:
        """Keep secrets until the next message, which must be the one after ``stage``.

        Flower may handle messages concurrently, with the same secrets. Only one of them gets here.
        """
        token = self._memory.next_token(values.get("token"))
        self._context.state[STATE] = ConfigRecord({**values, "stage": stage, "token": token})

    def _kept(self, *stages: str) -> dict[str, Any]:
        """Return the secrets of the sum; raises ``UserError`` unless its last stage was one of ``stages``."""
        state = dict(self._context.state.config_records.get(STATE) or {})
        if state.get("stage") not in stages or [state[name] for name in Purpose._fields] != list(self._purpose):
            raise UserError("this node was restarted during the round and lost its keys; it waits for the next round")
        return state

    def _roster(self, values: Mapping[str, Any]) -> Roster:
        """Return the sites of the sum, from the server's message or from what this site has kept of it."""
        members, run_config = values["members"], self._context.run_config
        keys = map(PublicKeys, values["mask_keys"], values["box_keys"])
        return Roster(
            self._purpose,
            dict(zip(members, keys, strict=True)),
            dict(zip(members, values["examples"], strict=True)),
            deployment_of(run_config),
            config_of(run_config).federation.weighting,
        )


def summable(training: Training, sent: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a site sends such that the server needs no more than one weighted sum of each array.

    BatchNorm statistics become differences to those received, which have a smaller range. If the drift divides
    displacements, the quotient replaces the displacement.
    """
    tensors = dict(sent)
    if BUFFERS in tensors:
        tensors[BUFFERS] = tensors[BUFFERS] - received[BUFFERS]
    divisor = training.algorithm.drift.displacement_divisor
    if divisor is not None:
        tensors[NORMALISED] = tensors.pop(DISPLACEMENT) / tensors[f"drift.{divisor}"].clamp(min=1)
    return tensors


def _content(values: Mapping[str, Any]) -> RecordDict:
    return RecordDict({SECURE: ConfigRecord(dict(values))})


def _masked_with(state: Mapping[str, Any]) -> list[Any]:
    """Return what all sites of a sum must agree on when they mask: what is summed, and who has masks."""
    return [MASKED, state["kind"], sorted(state["senders"])]


def _require_enough(count: int, threshold: int) -> None:
    """Raise ``UserError`` if a sum has fewer sites than its threshold."""
    if count < threshold:
        raise UserError(f"{count} sites remain in the sum, but at least {threshold} are required")
