"""A site's part in secure aggregation, in four messages: keys, shares, the masked update, and the shares that unmask.

Flower handles every message in a new process, so the secrets are in Flower's context between messages. They are new for
every sum and deleted with the last message.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from torch import Tensor

from fedflat.deploy.flower.wire import (
    BASE,
    BUFFERS,
    CLIENT,
    DISPLACEMENT,
    EXPERIMENT,
    HEADER,
    INTEGERS,
    ROUND,
    message_content,
)
from fedflat.deploy.settings import deployment_of, experiment_of
from fedflat.deploy.site.site import Site
from fedflat.deploy.trust.secure_sum import (
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
    mask_key,
    new_secret,
    pair_sign,
    public_bytes,
    seal,
    sign_keys,
    split,
    unseal,
)
from fedflat.deploy.trust.signatures import read_site_list
from fedflat.engines.round.contract import Training
from fedflat.errors import UserError

STATE = "fedflat-secure"
"""Key in a node's context: the secrets of the sum that this site takes part in."""
SITES = "sites"
"""Key of a node config: a list of sites, with which the site checks the keys that the server forwards."""


class SiteSum:
    """A sum that this site takes part in, as it is when a message about it arrives.

    Every method answers one message and raises ``UserError`` if the message does not follow from the previous one.

    Args:
        question: content of the message.
        context: Flower's context, which has the secrets between messages.
    """

    def __init__(self, question: RecordDict, context: Context) -> None:
        header = question.config_records[HEADER]
        self._context, self._client = context, int(str(header[CLIENT]))
        self._purpose = _purpose(header)
        self._received = dict(question.config_records.get(SECURE) or {})

    def offer_keys(self, key: ec.EllipticCurvePrivateKey | None) -> RecordDict:
        """Return new public keys, signed if the site has a ``key``."""
        secret, box_key = new_secret(), X25519PrivateKey.generate()
        keys = PublicKeys(public_bytes(mask_key(secret)), public_bytes(box_key))
        self._keep("keys", {**self._purpose._asdict(), "secret": secret, "box_key": box_key.private_bytes_raw()})
        signature = sign_keys(key, self._purpose, self._client, keys) if key else b""
        return _content({**keys._asdict(), "signature": signature})

    def offer_shares(self) -> RecordDict:
        """Return shares of this site's two secrets for each other site, encrypted, and a commitment to its seed."""
        state, received, client = self._kept("keys"), self._received, self._client
        roster = self._roster(received)
        box_key, seed = X25519PrivateKey.from_private_bytes(state["box_key"]), new_secret()
        own_keys = PublicKeys(public_bytes(mask_key(state["secret"])), public_bytes(box_key))
        all_keys = [key for keys in roster.keys.values() for key in keys]
        if roster.keys.get(client) != own_keys or len(set(all_keys)) < len(all_keys) or len(roster.keys) < 2:
            raise UserError("the server's list of keys repeats a key, or lacks this site or all others")
        if self._context.node_config.get(SITES):
            _require_signatures(
                roster, received["signatures"], Path(str(self._context.node_config[SITES])).expanduser()
            )
        secrets = [split(secret, roster.threshold, len(roster.keys)) for secret in (seed, state["secret"])]
        shares = dict(zip(roster.clients, map(b"".join, zip(*secrets, strict=True)), strict=True))
        own_shares, digest = shares.pop(client), roster.digest()
        boxes = [
            seal(agree(box_key, roster.keys[other].box, b"box", digest), content, client, other)
            for other, content in shares.items()
        ]
        self._keep("shares", state | received | {"seed": seed, "own_shares": own_shares})
        return _content({"clients": list(shares), "boxes": boxes, "commitment": commitment(seed)})

    def mask(self, site: Site, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> RecordDict:
        """Return the content of a reply with masked arrays; integer buffers and numbers, except the loss, stay clear.

        The shares of the other sites, which come with the task to train, are decrypted and kept. Raises ``UserError``
        if too few sites have sent shares, or a value is outside the range of the sum.
        """
        state, client = self._kept("shares"), self._client
        roster = self._roster(state)
        if roster.examples[client] != len(site.indices):
            raise UserError(f"this node has {len(site.indices)} examples, but the sum has {roster.examples[client]}")
        boxes = dict(zip(self._received.get("clients", []), self._received.get("boxes", []), strict=True))
        if client in boxes or len(boxes) + 1 < roster.threshold or not boxes.keys() <= roster.keys.keys():
            raise UserError(f"{len(boxes) + 1} sites remain in the sum, but at least {roster.threshold} are required")
        box_key, digest = X25519PrivateKey.from_private_bytes(state["box_key"]), roster.digest()
        shares = [
            unseal(agree(box_key, roster.keys[sender].box, b"box", digest), box, sender, client)
            for sender, box in boxes.items()
        ]
        arrays = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in tensors.items()}
        clear = {name: array for name, array in arrays.items() if name.startswith(INTEGERS)}
        weights = dict.fromkeys(arrays.keys() - clear.keys(), roster.weights()[client])
        if LOSS in numbers:
            arrays[LOSS], weights[LOSS] = np.asarray(numbers[LOSS]), 1 / len(roster.keys)
        shrinks = site.training.privacy is not None  # rounding must not exceed the clipping norm
        masked = {
            name: encode(name, arrays[name], weight, roster.deployment, shrinks) for name, weight in weights.items()
        }
        add_mask(masked, state["seed"], 1)
        key = mask_key(state["secret"])
        for other in boxes:
            add_mask(masked, agree(key, roster.keys[other].mask, b"mask", digest), pair_sign(client, other))
        self._keep("masked", state | {"senders": [client, *boxes], "shares": [state["own_shares"], *shares]})
        record = ArrayRecord({name: Array(array) for name, array in (clear | masked).items()})
        return message_content(record, numbers=dict(numbers) | dict.fromkeys(numbers.keys() & {LOSS}, 0.0))

    def reveal_shares(self) -> RecordDict:
        """Return shares of the seeds of sites whose updates arrived, and of the keys of those that dropped out.

        The secrets are deleted first, so that the server cannot ask twice.
        """
        state, survivors = self._kept("masked"), set(self._received["clients"])
        del self._context.state[STATE]
        roster = self._roster(state)
        if not survivors <= set(state["senders"]) or len(survivors) < roster.threshold:
            raise UserError(f"{len(survivors)} updates are in the sum, but at least {roster.threshold} are required")
        shares = [
            pair[:SHARE_BYTES] if client in survivors else pair[SHARE_BYTES:]
            for client, pair in zip(state["senders"], state["shares"], strict=True)
        ]
        return _content({"clients": state["senders"], "shares": shares})

    def _keep(self, stage: str, values: Mapping[str, Any]) -> None:
        """Keep secrets until the next message, which must be the one after ``stage``."""
        self._context.state[STATE] = ConfigRecord({**values, "stage": stage})

    def _kept(self, stage: str) -> dict[str, Any]:
        """Return the secrets of the sum; raises ``UserError`` unless ``stage`` was its last one."""
        state = dict(self._context.state.config_records.get(STATE) or {})
        if state.get("stage") != stage or _purpose(state) != self._purpose:
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
            experiment_of(run_config).federation.weighting,
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


def _purpose(header: Mapping[str, Any]) -> Purpose:
    return Purpose(str(header[EXPERIMENT]), int(header[ROUND]), str(header[BASE]))


def _require_signatures(roster: Roster, signatures: list[bytes], path: Path) -> None:
    """Raise ``UserError`` unless the keys of all sites are signed with the keys in this site's own list."""
    sites = read_site_list(path)
    for client, signature in zip(roster.clients, signatures, strict=True):
        site = sites.get(client)
        if site is None or not are_signed(site.key, signature, roster.purpose, client, roster.keys[client]):
            raise UserError(f"the keys of client {client} are not signed with the key in this site's list of sites")
