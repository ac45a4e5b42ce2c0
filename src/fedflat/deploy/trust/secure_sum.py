"""Secure aggregation: masks that cancel in the sum of the sites' messages (Bonawitz et al. 2017).

Every site adds two kinds of masks to its message. Each pair of sites has a mask in common, from a key exchange. One of
the two adds it and the other subtracts it, so it cancels in the sum. The site's own mask follows from a random seed.
The sites share both secrets, the key and the seed, among each other (Shamir 1979). For a site whose message has
arrived, the others reveal the seed; for a site that has dropped out, the key. No site reveals both.

A server that tells sites different things must not profit from it. The sites therefore confirm to each other, through
the server, with whom they have masks in common and, if a site has dropped out, whose messages are in the sum.

Flower's own implementation is not used: it expands 32-bit seeds to masks with a generator that is not secure.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedflat.deploy.settings import Deployment
from fedflat.engines.round.aggregation import weights_by_samples
from fedflat.errors import UserError

SECURE = "secure"
"""Name of the record of a message that belongs to secure aggregation."""
LOSS, NORMALISED, CLIPPED = "loss", "normalised", "clipped"
"""Names of masked arrays that are not in the messages of other runs."""
COUNTER = "num_batches_tracked"
"""Name of the integer buffer of BatchNorm."""
SECRET_BYTES, KEY_BYTES, SHARE_BYTES, NONCE_BYTES, TAG_BYTES = 16, 32, 17, 12, 16
SEALED_BYTES = NONCE_BYTES + 2 * SHARE_BYTES + TAG_BYTES
"""Length of two encrypted shares."""
PRIME = 2**130 - 5
"""Order of the field of Shamir's shares; larger than any secret."""
SCALAR_RANGE, SCALAR_BITS = 2.0**32, 64
"""Numbers, such as losses and counts of steps, need a larger range than vectors, and cost nothing."""


def threshold(members: int, share: float) -> int:
    """Return how many of ``members`` sites must remain: at least ``share`` of them, and always more than half.

    With at most half, the server could obtain the seed of a site from one half and its key from the other.

    >>> threshold(3, 2 / 3), threshold(10, 2 / 3), threshold(4, 0.5), threshold(2, 0.5)
    (2, 7, 3, 2)
    """
    return max(members // 2 + 1, math.ceil(share * members - 1e-9))


class Purpose(NamedTuple):
    """What is summed, and how sites compute it.

    Attributes:
        experiment: name of the experiment.
        round: number of the round.
        base: digest of the arrays that the sites receive.
        first_base: digest of those that they received in the round's first phase; empty in that phase.
        settings: digest of the run's settings.
    """

    experiment: str
    round: int
    base: str
    first_base: str
    settings: str


class PublicKeys(NamedTuple):
    """A site's public keys for one sum: for masks, and for shares on their way through the server."""

    mask: bytes
    box: bytes


@dataclass(frozen=True)
class Roster:
    """What all sites that begin a sum must agree on; ``digest`` enters every mask, so masks cancel only if they do.

    Attributes:
        purpose: what is summed.
        keys: public keys of the sites, by client.
        examples: number of examples of the sites, by client.
        deployment: the settings of secure aggregation.
        weighting: the weights of clients, ``samples`` or ``uniform``, from the run's settings.
    """

    purpose: Purpose
    keys: Mapping[int, PublicKeys]
    examples: Mapping[int, int]
    deployment: Deployment
    weighting: str

    @property
    def clients(self) -> list[int]:
        """The clients in ascending order; the position of a client, from 1, is that of its Shamir shares."""
        return sorted(self.keys)

    @property
    def threshold(self) -> int:
        """Number of sites that can reveal a secret, and minimum number of sites in a sum."""
        return threshold(len(self.keys), self.deployment.secure_threshold)

    def digest(self) -> bytes:
        """Return a hash of everything in the roster."""
        sites = [[client, *(key.hex() for key in self.keys[client]), self.examples[client]] for client in self.clients]
        encoding = [self.deployment.secure_range, self.deployment.secure_bits, self.threshold]
        return hashlib.sha256(json.dumps([self.purpose, sites, encoding]).encode()).digest()

    def weights(self) -> dict[int, float]:
        """Return the weight of each client; they sum to 1 if all clients remain."""
        sizes = [self.examples[client] if self.weighting == "samples" else 1 for client in self.clients]
        return dict(zip(self.clients, weights_by_samples(sizes), strict=True))


# Fixed-point numbers


def fixed_point(deployment: Deployment, is_scalar: bool) -> tuple[np.dtype[Any], float, float]:
    """Return the type of masked numbers, the largest number that a site may send, and the steps per unit.

    Sums are computed modulo 2^bits. A weighted mean of numbers in the range takes half of these values, which leaves
    the rest for rounding.
    """
    bits, largest = (SCALAR_BITS, SCALAR_RANGE) if is_scalar else (deployment.secure_bits, deployment.secure_range)
    return np.dtype(f"<u{bits // 8}"), largest, 2.0 ** (bits - 2) / largest


def exceeds_range(values: np.ndarray, deployment: Deployment) -> bool:
    """Whether a number is outside the range of the sum, or not finite, so that ``encode`` changes it."""
    _, largest, _ = fixed_point(deployment, is_scalar=not values.shape)
    return not (np.abs(values) <= largest).all()


def encode(values: np.ndarray, weight: float, deployment: Deployment, shrinks: bool) -> np.ndarray:
    """Return a weighted array as fixed-point numbers, [n]; a scalar becomes [1].

    Numbers are clipped to the range, and NaN becomes 0: a site that refused to send them would tell the server
    something about its update. ``shrinks`` rounds towards zero, so that no norm grows.
    """
    dtype, largest, steps = fixed_point(deployment, is_scalar=not values.shape)
    exact = np.clip(np.nan_to_num(np.atleast_1d(values).astype(np.float64)), -largest, largest)
    rounded = (np.trunc if shrinks else np.rint)(exact * (weight * steps))
    return rounded.astype(np.int64).astype(dtype)


def decode(total: np.ndarray, weight: float, deployment: Deployment, shape: tuple[int, ...]) -> np.ndarray:
    """Return the weighted mean, float64 with the given shape, from a sum of fixed-point numbers and of weights."""
    dtype, _, steps = fixed_point(deployment, is_scalar=not shape)
    signed = total.view(dtype.str.replace("u", "i")).astype(np.float64)
    return (signed / (steps * weight)).reshape(shape)


def require_public_integers(names: Iterable[str]) -> None:
    """Raise ``UserError`` if an integer buffer of the model may depend on the data: these buffers have no masks."""
    for name in names:
        if not name.endswith(COUNTER):
            raise UserError(
                f"the model has an integer buffer ({name}) that sites would send unmasked; only BatchNorm's {COUNTER} "
                "is allowed; set training.statistics=own, or deploy.secure_aggregation=false"
            )


# Keys, masks and shares


def new_secret() -> bytes:
    """Return a random secret that can be shared."""
    return secrets.token_bytes(SECRET_BYTES)


def mask_key(secret: bytes) -> X25519PrivateKey:
    """Return the private key that follows from a secret."""
    return X25519PrivateKey.from_private_bytes(_derive(secret, b"fedflat mask key"))


def public_bytes(key: X25519PrivateKey) -> bytes:
    """Return the public key of a private key."""
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def agree(key: X25519PrivateKey, other: bytes, use: bytes, digest: bytes) -> bytes:
    """Return the secret of two sites for one use: both compute it from their own key and the other's public key."""
    try:
        return _derive(key.exchange(X25519PublicKey.from_public_bytes(other)), use + digest)
    except ValueError:
        raise UserError("the public key of another site is invalid") from None


def is_usable(public: bytes) -> bool:
    """Whether a secret can be agreed on with a public key; some points, such as 0, have none."""
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return False
    return True


def statement_tag(
    key: X25519PrivateKey, other: bytes, sender: int, statement: Sequence[str | list[int]], digest: bytes
) -> bytes:
    """Return what proves to one other site that ``sender`` makes a statement; only these two can compute it.

    ``key`` is the private key of one of the two sites, and ``other`` the public key of the other one.
    """
    return agree(key, other, b"statement" + json.dumps([sender, *statement]).encode(), digest)


def _derive(secret: bytes, info: bytes) -> bytes:
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)


def commitment(seed: bytes) -> bytes:
    """Return a hash by which the server recognises the seed of a site's own mask."""
    return hashlib.sha256(b"fedflat seed" + seed).digest()


def add_mask(arrays: Mapping[str, np.ndarray], seed: bytes, sign: int) -> None:
    """Add a mask, times 1 or -1, to arrays of unsigned integers in place; sums wrap around."""
    stream = Cipher(algorithms.AES(_derive(seed, b"fedflat mask")), modes.CTR(bytes(16))).encryptor()
    for name in sorted(arrays):
        array = arrays[name]
        mask = np.frombuffer(stream.update(bytes(array.nbytes)), array.dtype)
        (np.add if sign > 0 else np.subtract)(array, mask, out=array)


def pair_sign(client: int, other: int) -> int:
    """Return the sign with which ``client`` applies the mask that it has in common with ``other``."""
    return 1 if client < other else -1


def split(secret: bytes, needed: int, count: int) -> list[bytes]:
    """Split a secret into ``count`` shares of which any ``needed`` determine it, and fewer say nothing about it."""
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(needed - 1))]
    shares = []
    for position in range(1, count + 1):
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * position + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def interpolation(positions: Sequence[int]) -> list[int]:
    """Return the factors of the shares at some positions, from 1, in the secret."""
    factors = []
    for position in positions:
        factor = 1
        for other in positions:
            if other != position:
                factor = factor * other * pow(other - position, -1, PRIME) % PRIME
        factors.append(factor)
    return factors


def combine(shares: Sequence[bytes], factors: Sequence[int]) -> bytes:
    """Return the secret of shares; ``factors`` are those of ``interpolation``. A wrong share gives a wrong secret.

    >>> shares = split(b"sixteen bytes...", 2, 3)
    >>> combine([shares[2], shares[0]], interpolation([3, 1]))
    b'sixteen bytes...'
    """
    value = sum(int.from_bytes(share, "big") * factor for share, factor in zip(shares, factors, strict=True)) % PRIME
    return int(value % 2 ** (8 * SECRET_BYTES)).to_bytes(SECRET_BYTES, "big")


def seal(key: bytes, content: bytes, sender: int, receiver: int) -> bytes:
    """Encrypt what one site sends to another through the server."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, content, f"{sender} to {receiver}".encode())


def unseal(key: bytes, box: bytes, sender: int, receiver: int) -> bytes:
    """Decrypt what another site sent; raises ``UserError`` if it was changed or is for another site or round."""
    try:
        return AESGCM(key).decrypt(box[:NONCE_BYTES], box[NONCE_BYTES:], f"{sender} to {receiver}".encode())
    except (InvalidTag, ValueError):
        raise UserError(f"the shares of client {sender} were changed on their way to client {receiver}") from None


# Signed keys, for sites that have a list of sites


def sign_keys(key: ec.EllipticCurvePrivateKey, purpose: Purpose, client: int, keys: PublicKeys) -> bytes:
    """Sign the keys of a site, so that other sites can tell them from keys that the server made up."""
    return key.sign(_key_text(purpose, client, keys), ec.ECDSA(hashes.SHA384()))


def are_signed(
    key: ec.EllipticCurvePublicKey, signature: bytes, purpose: Purpose, client: int, keys: PublicKeys
) -> bool:
    """Whether the keys of a site are signed with its key."""
    try:
        key.verify(signature, _key_text(purpose, client, keys), ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        return False
    return True


def _key_text(purpose: Purpose, client: int, keys: PublicKeys) -> bytes:
    return b"fedflat mask keys\n" + json.dumps([*purpose, client, keys.mask.hex(), keys.box.hex()]).encode()
