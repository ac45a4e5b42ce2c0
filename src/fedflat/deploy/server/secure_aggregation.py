"""Rounds in which the server sees only sums of what sites send, and which experiments have such rounds."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedflat.deploy.flower.wire import (
    ARRAYS,
    BUFFERS,
    DISPLACEMENT,
    GRADIENT,
    INTEGERS,
    array_record,
    message_content,
    numbers_of,
    numpy_of,
)
from fedflat.deploy.server.arrivals import report_of, total_gradient_cost
from fedflat.deploy.server.engine import NO_TRAINING, RoundAttempt
from fedflat.deploy.server.nodes import Absences
from fedflat.deploy.server.secure_answers import Tags, are_bytes, receive_tags, values_of
from fedflat.deploy.settings import Deployment
from fedflat.deploy.trust.inspection import ArraySpec, ExpectedUpdates, Update, find_wrong_array, find_wrong_number
from fedflat.deploy.trust.secure_sum import (
    CLIPPED,
    KEY_BYTES,
    LOSS,
    NORMALISED,
    SEALED_BYTES,
    SECURE,
    SHARE_BYTES,
    PublicKeys,
    Purpose,
    Roster,
    add_mask,
    agree,
    are_signed,
    combine,
    commitment,
    decode,
    fixed_point,
    interpolation,
    is_usable,
    mask_key,
    pair_sign,
    public_bytes,
)
from fedflat.deploy.trust.secure_support import unavailable_means
from fedflat.deploy.trust.signatures import arrays_digest
from fedflat.engines.round.cohort import build_outcome
from fedflat.engines.round.contract import Outcome

log = logging.getLogger("flwr")
LARGEST_ERROR = 0.01
"""Rounding error of a mean, relative to its size, above which the server warns."""


class _Sum(NamedTuple):
    """The sum of the updates of some sites.

    Attributes:
        means: weighted means of the arrays, by name; the loss is a sum.
        updates: what each site sent in the clear: integer buffers and numbers.
    """

    means: Mapping[str, Tensor]
    updates: list[Update]


class SecureAttempt(RoundAttempt):
    """An attempt at a round whose server sees only sums, and numbers that do not depend on the sites' data."""

    def _common_gradient(self, broadcast: Mapping[str, Tensor]) -> Tensor | None:
        total = self._sum("train.gradient", broadcast, self._expected_gradients(), NO_TRAINING)
        if total is None:
            return None
        self._gradient_cost = total_gradient_cost(total.updates)
        # GPUs may round differently in another attempt, but sites train with only one gradient per round.
        key = (self.round, *self.accepted)
        self.engine.gradients = {key: self.engine.gradients.get(key, total.means[GRADIENT])}
        return self.engine.gradients[key]

    def _train(self, broadcast: Mapping[str, Tensor], common_gradient: Tensor | None) -> Outcome | None:
        expected = self._expected_updates()
        arrays = {LOSS: ArraySpec((), np.dtype(np.float64)), **expected.arrays}
        if self.training.algorithm.drift.displacement_divisor is not None:
            arrays[NORMALISED] = arrays.pop(DISPLACEMENT)
        total = self._sum("train", broadcast, replace(expected, arrays=arrays))
        return None if total is None else self._outcome(total, common_gradient)

    def _outcome(self, total: _Sum, common_gradient: Tensor | None) -> Outcome:
        """Return the outcome of a round from its sum."""
        count, means = len(total.updates), total.means
        reports = [report_of(update, self.z.device) for update in total.updates]
        reports = [report._replace(loss=float(means[LOSS]) / count) for report in reports]
        equal_steps = len({report.steps for report in reports}) == 1
        averages = {f"sent/{name}": mean for name, mean in means.items() if "." in name}
        averages |= {name: means[name] for name in (DISPLACEMENT, NORMALISED) if name in means}
        averages[BUFFERS] = self.model.buffers + means[BUFFERS] if BUFFERS in means else self.model.buffers
        if DISPLACEMENT in means:
            averages |= {"uniform": means[DISPLACEMENT], "direction": -means[DISPLACEMENT] / reports[0].lr_sum}
        # An algorithm of the user that needs these must not continue with other means.
        weighting = self.training.aggregation.weighting
        for name in unavailable_means(self.training.algorithm, weighting, equal_steps):
            averages[name] = torch.full_like(self.z, math.nan)
        by_number = {client.number: client for client in self.cohort}
        clients = [by_number[update.client] for update in total.updates]
        return build_outcome(self.start, averages, clients, reports, self._gradient_cost, common_gradient)

    def _sum(
        self,
        kind: str,
        broadcast: Mapping[str, Tensor],
        expected: ExpectedUpdates,
        numbers: Mapping[str, float] | None = None,
    ) -> _Sum | None:
        """Let sites work on a message, and return the sum of their answers; None if too few sites remain.

        Args:
            kind: Flower's message type.
            broadcast: the tensors that sites receive.
            expected: what honest answers look like, without masks.
            numbers: numbers that sites do not report.
        """
        expected = replace(expected, arrays={CLIPPED: ArraySpec((), np.dtype(np.float64)), **expected.arrays})
        record = array_record(broadcast)
        roster, signatures = self._collect_keys(arrays_digest(record))
        self.required = max(roster.threshold, self.engine.deployment.minimum)
        if len(roster.keys) < self.required:
            return None
        boxes, commitments = self._collect_shares(roster, signatures)
        if len(boxes) < self.required:
            return None
        masked, updates, tags = self._collect_updates(kind, record, roster, boxes, expected, numbers or {})
        self.accepted = [update.client for update in updates]
        if len(updates) < self.required:
            return None
        shares = self._collect_secrets(roster, list(boxes), tags)
        if len(shares) < roster.threshold or not self._unmask(masked, roster, shares, commitments):
            self.accepted = []  # the updates cannot be used
            return None
        weight = sum(roster.weights()[client] for client in self.accepted)
        weights = dict.fromkeys(masked, weight) | dict.fromkeys((LOSS, CLIPPED), 1 / len(roster.keys))
        means = {
            name: decode(array, weights[name], roster.deployment, expected.arrays[name].shape)
            for name, array in masked.items()
        }
        self._warn_of_inaccuracy(means, roster.deployment, weight)
        return _Sum({name: torch.from_numpy(mean).to(self.z) for name, mean in means.items()}, updates)

    def _warn_of_inaccuracy(self, means: Mapping[str, np.ndarray], deployment: Deployment, weight: float) -> None:
        """Warn of clipped values and of large rounding errors; ``weight`` is the sum of the sites' weights."""
        if clipped := round(float(means[CLIPPED])):
            log.warning(
                "round %d: %d of %d sites clipped values that exceed deploy.secure_range=%g or are not finite; raise "
                "deploy.secure_range or lower the learning rate",
                self.round,
                clipped,
                len(self.accepted),
                deployment.secure_range,
            )
        _, _, steps = fixed_point(deployment, is_scalar=False)
        error = math.sqrt(len(self.accepted) / 12) / (steps * weight)  # errors of sites are independent and uniform
        for name, mean in means.items():
            size = float(np.sqrt(np.mean(np.square(mean)))) if mean.size else 0.0
            # Vectors of an algorithm may be zero, for example in the first round.
            if mean.shape and error > LARGEST_ERROR * size and (size > 0 or "." not in name):
                log.warning(
                    "round %d: rounding to %d bits changes %s by about %.0f %%; raise deploy.secure_bits or lower "
                    "deploy.secure_range",
                    self.round,
                    deployment.secure_bits,
                    name,
                    100 * min(1.0, error / size if size else 1.0),
                )

    def _collect_keys(self, base: str) -> tuple[Roster, dict[int, bytes]]:
        """Ask for the sites' public keys; returns the sites of the sum, and the signatures of their keys."""
        keys: dict[int, PublicKeys] = {}
        signatures: dict[int, bytes] = {}

        def receive(client: int, records: RecordDict) -> str:
            mask, box, signature = values_of(records, "mask", "box", "signature")
            if not are_bytes([mask, box], KEY_BYTES) or not isinstance(signature, bytes):
                return "its keys have an unexpected format"
            others = {key for pair in keys.values() for key in pair}
            if mask == box or {mask, box} & others or not (is_usable(mask) and is_usable(box)):
                return "its keys are invalid or repeat another site's"  # all other sites would refuse them
            offered, site = PublicKeys(mask, box), self.engine.nodes.site(client)
            if site is not None and not are_signed(site.key, signature, purpose, client, offered):
                return f"its keys are not signed with the key of {site.name}"
            keys[client], signatures[client] = offered, signature
            return ""

        purpose = Purpose(self.engine.experiment, self.round, base, self._first_base, self.engine.settings_digest)
        self._exclude(self._exchange("query.keys", {client: {} for client in self._eligible()}, base, receive))
        examples = {client: self._examples[client] for client in keys}
        return Roster(purpose, keys, examples, self.engine.deployment, self.training.aggregation.weighting), signatures

    def _collect_shares(
        self, roster: Roster, signatures: Mapping[int, bytes]
    ) -> tuple[dict[int, dict[int, bytes]], dict[int, bytes]]:
        """Send the list of sites; returns their encrypted shares, by sender and receiver, and their commitments."""
        members = roster.clients
        content = {
            "members": members,
            "mask_keys": [roster.keys[client].mask for client in members],
            "box_keys": [roster.keys[client].box for client in members],
            "examples": [roster.examples[client] for client in members],
            "signatures": [signatures[client] for client in members],
        }
        boxes: dict[int, dict[int, bytes]] = {}
        commitments: dict[int, bytes] = {}

        def receive(client: int, records: RecordDict) -> str:
            receivers, sealed, hashed = values_of(records, "clients", "boxes", "commitment")
            others = [member for member in members if member != client]
            if receivers != others or not are_bytes(sealed, SEALED_BYTES, len(others)):
                return "its shares have an unexpected format"
            if not are_bytes([hashed], KEY_BYTES):
                return "its commitment has an unexpected format"
            boxes[client], commitments[client] = dict(zip(others, sealed, strict=True)), hashed
            return ""

        self._exclude(self._exchange("query.shares", dict.fromkeys(members, content), roster.purpose.base, receive))
        return boxes, commitments

    def _collect_updates(
        self,
        kind: str,
        broadcast: ArrayRecord,
        roster: Roster,
        boxes: Mapping[int, Mapping[int, bytes]],
        expected: ExpectedUpdates,
        numbers: Mapping[str, float],
    ) -> tuple[dict[str, np.ndarray], list[Update], Tags]:
        """Let the sites work.

        Returns:
            The sums of their masked arrays, what they sent in the clear, and what they state to each other.
        """
        masked_specs = {name: spec for name, spec in expected.arrays.items() if not name.startswith(INTEGERS)}
        specs = dict(expected.arrays)
        for name, spec in masked_specs.items():
            specs[name] = ArraySpec(spec.shape or (1,), fixed_point(roster.deployment, is_scalar=not spec.shape)[0])
        totals = {name: np.zeros(specs[name].shape, specs[name].dtype) for name in masked_specs}
        updates: dict[int, Update] = {}
        tags: Tags = {}

        def receive(client: int, records: RecordDict) -> str:
            """Add an update to the sums at once; returns its flaw."""
            received = records.array_records.get(ARRAYS) or ArrayRecord()
            arrays = numpy_of(received)
            received.clear()  # Flower's records are reference cycles, which Python frees late
            clear = {name: array for name, array in arrays.items() if name not in totals}
            update = Update(client, clear, {**numbers_of(records), **numbers})
            flaw = find_wrong_array(arrays, specs) or find_wrong_number(update, expected)
            flaw = flaw or receive_tags(tags, client, records, [other for other in boxes if other != client])
            if not flaw:
                for name, total in totals.items():
                    total += arrays[name]
                updates[client] = update
            return flaw

        contents = {}
        for client in boxes:
            senders = [sender for sender in boxes if sender != client]
            contents[client] = {"clients": senders, "boxes": [boxes[sender][client] for sender in senders]}
        quorum = self.engine.deployment.quorum
        enough = None if quorum is None else max(quorum, roster.threshold)
        self._exclude(self._exchange(kind, contents, roster.purpose.base, receive, broadcast, enough))
        accepted = [updates[client.number] for client in self.cohort if client.number in updates]
        return totals, accepted, tags

    def _collect_secrets(self, roster: Roster, senders: list[int], tags: Tags) -> dict[int, dict[int, bytes]]:
        """Ask for the shares of the secrets that unmask the sum; returns them by sender and owner of the secret.

        If a site has dropped out since it sent shares, the others first confirm to each other who remains. A site that
        does not answer stays in the sum.

        Args:
            roster: the sites that began the sum.
            senders: the sites that sent shares.
            tags: what sites state to each other about their masks.
        """
        base, survivors = roster.purpose.base, self.accepted
        contents: dict[int, dict[str, Any]] = {
            client: {"clients": survivors, "tags": [tags[other][client] for other in survivors if other != client]}
            for client in survivors
        }
        if len(survivors) < len(senders):
            confirmations: Tags = {}

            def receive_confirmation(client: int, records: RecordDict) -> str:
                others = [other for other in sorted(survivors) if other != client]
                return receive_tags(confirmations, client, records, others)

            self._note(self._exchange("query.confirm", contents, base, receive_confirmation))
            for client in survivors:
                others = [other for other in confirmations if other != client]
                contents[client]["confirmed"] = others
                contents[client]["confirmations"] = [confirmations[other][client] for other in others]
            contents = {client: contents[client] for client in confirmations}
        shares: dict[int, dict[int, bytes]] = {}

        def receive(client: int, records: RecordDict) -> str:
            owners, values = values_of(records, "clients", "shares")
            if owners != [client, *(sender for sender in senders if sender != client)]:
                return "its shares are those of other sites"
            if not are_bytes(values, SHARE_BYTES, len(senders)):
                return "its shares have an unexpected format"
            shares[client] = dict(zip(owners, values, strict=True))
            return ""

        absences = self._exchange("query.unmask", contents, base, receive, quorum=roster.threshold)
        self._note(absences if len(shares) < roster.threshold else absences._replace(missing={}))  # the rest is late
        return shares

    def _note(self, absences: Absences) -> None:
        """Log which sites did not help to reveal a sum that their updates are in."""
        for client, reason in (absences.missing | absences.rejected).items():
            label = self.engine.nodes.label(client)
            log.warning("round %d: %s did not help to unmask the sum: %s", self.round, label, reason)

    def _unmask(
        self,
        totals: Mapping[str, np.ndarray],
        roster: Roster,
        shares: Mapping[int, Mapping[int, bytes]],
        commitments: Mapping[int, bytes],
    ) -> bool:
        """Remove the masks from sums in place; returns False if a secret cannot be recovered.

        Args:
            totals: sums of masked arrays, by name.
            roster: the sites that began the sum.
            shares: shares of secrets, by sender and owner of the secret.
            commitments: hashes of the seeds of the sites that sent shares, by client.
        """
        responders, digest = sorted(shares)[: roster.threshold], roster.digest()
        factors = interpolation([roster.clients.index(client) + 1 for client in responders])
        for owner, hashed in commitments.items():
            secret = combine([shares[client][owner] for client in responders], factors)
            if owner in self.accepted:
                is_right = commitment(secret) == hashed
                add_mask(totals, secret, -1)
            else:
                key = mask_key(secret)
                is_right = public_bytes(key) == roster.keys[owner].mask
                for client in self.accepted:
                    pair = agree(key, roster.keys[client].mask, b"mask", digest)
                    add_mask(totals, pair, -pair_sign(client, owner))
            if not is_right:
                log.warning(
                    "round %d: a secret of %s cannot be recovered, because a site has sent wrong shares",
                    self.round,
                    self.engine.nodes.label(owner),
                )
                return False
        return True

    def _exchange(
        self,
        kind: str,
        contents: Mapping[int, Mapping[str, Any]],
        base: str,
        receive: Callable[[int, RecordDict], str],
        arrays: ArrayRecord | None = None,
        quorum: int | None = None,
    ) -> Absences:
        """Send clients a message of secure aggregation each, and receive their answers, as ``Nodes.ask`` does."""
        messages = {}
        for client, values in contents.items():
            messages[client] = message_content(arrays, self._header(client, base))
            messages[client][SECURE] = ConfigRecord(dict(values))
        return self.engine.nodes.ask(kind, messages, str(self.round), self.engine.deployment.timeout, receive, quorum)

    def _exclude(self, absences: Absences) -> None:
        """Leave out clients that did not answer, or not as expected."""
        self.missing |= absences.missing
        self.rejected |= absences.rejected
