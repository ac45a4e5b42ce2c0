"""Differential privacy of clients: the mechanisms that a run can name, and the accountant that computes their epsilon.

Nothing here trains or imports torch. May import ``registry``, ``text``, ``display`` and ``errors``.
"""

from fedflat.privacy.accountant import Accountant, noise_for
from fedflat.privacy.mechanisms import MECHANISMS, DifferentialPrivacy, GaussianMechanism, privacy_spec

__all__ = ["MECHANISMS", "Accountant", "DifferentialPrivacy", "GaussianMechanism", "noise_for", "privacy_spec"]
