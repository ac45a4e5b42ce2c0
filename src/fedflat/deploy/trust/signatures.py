"""Proof of who answers what: a site signs every answer with its key, and the server has a list of sites and keys.

A signed answer states the run, the round, the base model and a random challenge of the message that it answers, and the
digest of its own content. A replayed, misdirected or changed answer therefore does not match.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedflat.deploy.flower.wire import CLAIMS, HEADER, RECEIPT
from fedflat.errors import UserError, system_reason

SIGNATURE = "signature"
PURPOSE = b"fedflat answer\n"
"""Begins every signed text: Flower signs other texts with the same key."""
NAME = re.compile(r"[\w.-]{1,64}")
LINE = "CLIENT NAME PUBLIC-KEY, for example: 0 hospital-a ecdsa-sha2-nistp384 AAAA..."
NEW_KEY = "ssh-keygen -t ecdsa -b 384 -N '' -f site.key"
MISMATCHES = {
    "experiment": "it belongs to another run",
    "round": "it is for round {claimed}, not for round {expected}",
    "client": "it is the answer of client {claimed}, not of client {expected}",
    "base": "it starts from another model",
    "challenge": "it answers another message, so it is a replay",
}
"""Why an answer is rejected, by the claim in which it differs."""


class AllowedSite(NamedTuple):
    """A site that may take part: its name and its public key."""

    name: str
    key: ec.EllipticCurvePublicKey


def read_site_list(path: Path) -> dict[int, AllowedSite]:
    """Return the sites that may take part, by number of the client, from a file with one line per site.

    A line has the number of the client, the name of the site, and its public key as in ``site.key.pub``. Empty lines
    and lines that begin with ``#`` are ignored. Raises ``UserError`` if the file is missing or damaged.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text"
        raise UserError(
            f"cannot read the list of sites {path} ({(reason or str(error)).lower()}); fedflat deploy certificates "
            'writes it; set deploy.sites to its path, or to "any" for a trial in which every node may take part'
        ) from None
    sites: dict[int, AllowedSite] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        client, site = _parse_site(line, f"line {number} of {path}")
        for other, known in sites.items():
            if client == other or site.name == known.name or site.key == known.key:
                raise UserError(f"line {number} of {path} repeats the client, the name or the key of {known.name}")
        sites[client] = site
    if not sites:
        raise UserError(f"{path} lists no site; add a line for every site: {LINE}")
    return sites


def _parse_site(line: str, where: str) -> tuple[int, AllowedSite]:
    """Return the client and the site in a line of the list; ``where`` begins error messages."""
    client, name, key_text = [*line.split(maxsplit=2), "", "", ""][:3]
    if not client.isascii() or not client.isdigit() or not NAME.fullmatch(name):
        raise UserError(f"{where} is not a site; expected {LINE}")
    try:
        key = load_ssh_public_key(key_text.encode())
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UserError(f"{where} has no ECDSA public key; expected the content of site.key.pub, made with: {NEW_KEY}")
    return int(client), AllowedSite(name, key)


def read_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key of a site; raises ``UserError`` if the file has none."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise UserError(f"cannot read the key {path} ({system_reason(error)})") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path} has no ECDSA private key without a password; make one with: {NEW_KEY}")
    return key


def arrays_digest(record: ArrayRecord) -> str:
    """Return the SHA-256 of arrays: their names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(record):
        array = record[name]
        digest.update(json.dumps([name, array.dtype, list(array.shape), len(array.data)]).encode())
        digest.update(array.data)
    return digest.hexdigest()


def add_receipt(answer: RecordDict, question: RecordDict, key: ec.EllipticCurvePrivateKey | None) -> None:
    """Add to an answer what it answers, signed if the site has a key; the server checks it with ``receipt_flaw``."""
    claims = claims_of(question)
    signature = "" if key is None else key.sign(_signed_text(answer, claims), ec.ECDSA(hashes.SHA384())).hex()
    answer[RECEIPT] = ConfigRecord({**claims, SIGNATURE: signature})


def claims_of(question: RecordDict) -> dict[str, Any]:
    """Return what the answer to a message must repeat: the part ``CLAIMS`` of the message's header."""
    header = question.config_records.get(HEADER) or {}
    return {name: header[name] for name in CLAIMS if name in header}


def receipt_flaw(answer: RecordDict, question: RecordDict, site: AllowedSite | None) -> str:
    """Say why an answer is not this site's answer to this message; empty if it is.

    Args:
        answer: content of the answer.
        question: content of the message that it should answer.
        site: the site that was asked; None if sites need no key.
    """
    receipt = answer.config_records.get(RECEIPT)
    if receipt is None:
        return "it does not say which message it answers"
    expected = claims_of(question)
    for name, reason in MISMATCHES.items():
        if name in expected and receipt.get(name) != expected[name]:
            return reason.format(claimed=receipt.get(name), expected=expected[name])
    if site is None:
        return ""
    signature = receipt.get(SIGNATURE)
    if not isinstance(signature, str) or not signature:
        return (
            f"it is not signed; {site.name} must start its SuperNode with --node-config 'partition-id=N key=\"FILE\"'"
        )
    try:
        site.key.verify(bytes.fromhex(signature), _signed_text(answer, expected), ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, ValueError):
        return f"it is not signed with the key of {site.name}"
    return ""


def _signed_text(answer: RecordDict, claims: Mapping[str, Any]) -> bytes:
    """Return the text that a site signs: what it answers, and the digest of each record of the answer."""
    digests = {}
    for name, record in answer.items():
        if isinstance(record, ArrayRecord):
            digests[name] = arrays_digest(record)
        elif name != RECEIPT:
            text = json.dumps(dict(record), sort_keys=True, default=repr)
            digests[name] = hashlib.sha256(text.encode()).hexdigest()
    return PURPOSE + json.dumps([dict(claims), digests], sort_keys=True).encode()
