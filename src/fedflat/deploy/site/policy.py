"""What a site permits: its ``--node-config``, which the server cannot change."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.app import Context

from fedflat.deploy.settings import Deployment, config_of, deployment_of
from fedflat.deploy.trust.secure_sum import threshold
from fedflat.deploy.trust.signatures import AllowedSite, read_private_key, read_site_list
from fedflat.display import counted
from fedflat.errors import UserError
from fedflat.experiment.config import Config
from fedflat.privacy import DifferentialPrivacy, privacy_spec
from fedflat.text import absolute_path

CLIENT_NUMBER, KEY, STATE_FOLDER, FRESH_STATE = "partition-id", "key", "state", "fresh-state"
SECURE_ONLY, MINIMUM, SITES, SCORES, PRIVACY = "secure-aggregation", "secure-minimum", "sites", "scores", "privacy"
KEYS = (CLIENT_NUMBER, KEY, STATE_FOLDER, FRESH_STATE, SECURE_ONLY, MINIMUM, SITES, SCORES, PRIVACY)
"""Keys of a node config; hooks of the user may read others."""
FEWEST = 2
"""Minimum number of sites in a sum: a sum of one would reveal the update."""


@dataclass(frozen=True)
class SitePolicy:
    """The settings of a site.

    Attributes:
        client: number of its client.
        key: its private key; None if it has none.
        sites: its own list of sites, by client; None if it has none.
        folder: where its client's state is saved.
        may_start_afresh: whether a client without its state may start anew.
        secure_only: whether the server may see only sums of its messages.
        minimum: smallest threshold of a secure sum, and hence the minimum number of sites in it.
        reports_scores: whether it answers with metrics on its held-out data.
        privacy: the mechanism that it insists on; None for any, or for none.
    """

    client: int
    key: EllipticCurvePrivateKey | None
    sites: dict[int, AllowedSite] | None
    folder: Path
    may_start_afresh: bool
    secure_only: bool
    minimum: int
    reports_scores: bool
    privacy: DifferentialPrivacy | None

    @classmethod
    def of(cls, context: Context) -> SitePolicy:
        """Return the policy in a node config; raises ``UserError`` if it is incomplete."""
        config = context.node_config
        for name in config:
            meant = name.lower().replace("_", "-")
            if meant in KEYS and name not in KEYS:
                raise UserError(f"{name!r} in the --node-config of this node has no effect; did you mean {meant!r}?")
        client, minimum = config.get(CLIENT_NUMBER), config.get(MINIMUM, FEWEST)
        if not isinstance(client, int):
            raise UserError(
                "this node does not say which client it is; start its SuperNode with --node-config 'partition-id=N'"
            )
        if not isinstance(minimum, int) or minimum < FEWEST:
            raise UserError(f"{MINIMUM}={minimum} in the --node-config of this node; expected at least {FEWEST}")
        key, sites, folder = (config.get(name) for name in (KEY, SITES, STATE_FOLDER))
        secure_only = _flag(context, SECURE_ONLY, MINIMUM in config)
        folder = folder or os.environ.get("FEDFLAT_STATE") or "~/.fedflat/state"
        return cls(
            client,
            read_private_key(absolute_path(str(key))) if key else None,
            read_site_list(absolute_path(str(sites))) if sites else None,
            absolute_path(str(folder)),
            _flag(context, FRESH_STATE, False),
            secure_only,
            minimum,
            _flag(context, SCORES, not secure_only),
            privacy_spec(str(config[PRIVACY])) if PRIVACY in config else None,
        )

    def require_compliance(self, context: Context) -> None:
        """Raise ``UserError`` if the site does not permit a run with these settings."""
        config, deployment = config_of(context.run_config), deployment_of(context.run_config)
        if self.secure_only and not deployment.secure_aggregation:
            raise UserError(
                f"this node takes part only in runs with secure aggregation ({SECURE_ONLY} in its --node-config); "
                "set deploy.secure_aggregation=true"
            )
        if self.secure_only and (self.sites is None or self.key is None):
            raise UserError(
                f"{SECURE_ONLY} in the --node-config of this node needs key and sites as well: without the keys of "
                "the other sites, the server could invent them and see this site's update; add 'sites=\"sites.txt\"'"
            )
        if deployment.secure_aggregation:
            self._require_sums(config, deployment)
        privacy = config.federation.privacy
        if self.privacy and (privacy is None or privacy_spec(privacy) != self.privacy):
            wanted = context.node_config[PRIVACY]
            raise UserError(
                f"this node takes part only in runs with federation.privacy={wanted} ({PRIVACY} in its "
                f"--node-config), but the run has {privacy or 'none'}"
            )

    def _require_sums(self, config: Config, deployment: Deployment) -> None:
        """Raise ``UserError`` if all sums of a run have a threshold below this site's minimum."""
        federation, clients = config.federation, config.data.clients
        largest = federation.clients_per_round if federation.sampling == "fixed" else clients
        if largest is None:  # not known before the first sum, which the site checks as well
            return
        largest = min(largest, clients or largest)
        smallest_sum = threshold(largest, deployment.secure_threshold)
        if smallest_sum >= self.minimum:
            return
        remedy = f"set federation.clients_per_round to at least {self.minimum}"
        if self.minimum <= largest:
            share = math.ceil(1000 * self.minimum / largest) / 1000
            remedy = f"write secure_threshold = {share} below [tool.flwr.app.config.deploy] in pyproject.toml"
        raise UserError(
            f"sums of this run need only {smallest_sum} of {counted(largest, 'site')}, but this node requires at least "
            f"{self.minimum} ({MINIMUM} in its --node-config); {remedy}"
        )


def _flag(context: Context, name: str, default: bool) -> bool:
    """Return a value that is true or false; raises ``UserError`` for others, such as the text "false"."""
    value = context.node_config.get(name, default)
    if not isinstance(value, bool):
        raise UserError(f"{name}={value!r} in the --node-config of this node; expected true or false, without quotes")
    return value
