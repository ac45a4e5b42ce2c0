"""The settings of client sampling, aggregation, virtual time and privacy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from fedflat.errors import UserError
from fedflat.experiment.settings_group import SettingsGroup
from fedflat.text import respell


class FederationSettings(SettingsGroup):
    """Client sampling and aggregation."""

    clients_per_round: int = Field(10, ge=1, description="clients per round (expected number with Bernoulli sampling)")
    sampling: Literal["fixed", "bernoulli"] = Field(
        "fixed", description="sample exactly clients_per_round clients, or each client independently"
    )
    weighting: Literal["samples", "uniform"] = Field(
        "samples", description="weight client updates by their number of examples, or equally"
    )
    aggregation: Literal["mean", "median", "trimmed", "clipped"] = Field(
        "mean", description="aggregate updates by their mean or by a robust alternative"
    )
    trim: float = Field(0.1, ge=0, lt=0.5, description="fraction that trimmed removes at each end")
    longest: float = Field(
        1.0, gt=0, description="norm to which clipped limits updates, in medians of the cohort's norms"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="probability that a sampled client never responds")
    partial: float = Field(0.0, ge=0, le=1, description="probability that a client completes only part of its steps")
    clock: str | None = Field(
        None, description="virtual time of clients, as speed+network+availability, e.g. lognormal(sigma=0.6)+uplink(10)"
    )
    policy: str = Field(
        "wait", description="wait, over-select, deadline (synchronous), fedbuff or fedasync (asynchronous)"
    )

    privacy: str | None = Field(
        None, description="differential privacy of clients: dp(epsilon=8) at the server, or local-dp(epsilon=8)"
    )

    @model_validator(mode="before")
    @classmethod
    def _weight_equally_with_privacy(cls, values: Any) -> Any:
        """Make uniform the default weighting of a differentially private run."""
        if isinstance(values, dict) and str(values.get("privacy")).strip().lower() != "none":
            return {"weighting": "uniform", **values}
        return values

    @field_validator("clock", "policy", "privacy")
    @classmethod
    def _canonical(cls, text: str | None, info: ValidationInfo) -> str | None:
        """Check a setting, spell its names as registered and make paths absolute; ``none`` disables clock, privacy."""
        name = str(info.field_name)
        if text is None or text == cls.model_fields[name].default:  # --help should not need to import numpy
            return text
        if name != "policy" and text.strip().lower() == "none":
            return None
        from fedflat.privacy import MECHANISMS, privacy_spec
        from fedflat.timing import CLOCK_PARTS, POLICIES, clock_spec, policy_spec

        known: dict[str, tuple[Mapping[str, Any], Callable[[str], object]]] = {
            "clock": (CLOCK_PARTS, clock_spec),
            "policy": (POLICIES, policy_spec),
            "privacy": (MECHANISMS, privacy_spec),
        }
        parts, check = known[name]
        text = respell(text, parts)
        check(text)
        return text

    @model_validator(mode="after")
    def _check_privacy(self) -> FederationSettings:
        """Reject settings with which a client's influence or the cohorts depend on the clients' data."""
        if self.privacy is None:
            return self
        from fedflat.timing import clock_spec

        reason = ""
        if self.weighting != "uniform":
            reason = "all clients must have equal weights; remove federation.weighting or set it to uniform"
        elif self.aggregation != "mean":
            reason = f"noise protects a mean, not federation.aggregation={self.aggregation}; use mean"
        elif self.sampling != "fixed":
            reason = "the accountant assumes cohorts of fixed size; use federation.sampling=fixed"
        elif self.policy != "wait":
            reason = f"whose updates count with federation.policy={self.policy} depends on the clients' data; use wait"
        elif self.clock is not None and clock_spec(self.clock).availability is not None:
            reason = "the accountant assumes uniform cohorts; remove the availability of clients from federation.clock"
        if reason:
            raise UserError(f"federation.privacy={self.privacy} cannot be used here: {reason}")
        return self

    @model_validator(mode="after")
    def _check_clock(self) -> FederationSettings:
        """Reject a synchronous policy that compares times without a clock."""
        if self.clock is not None or self.policy == "wait":
            return self
        from fedflat.timing import policy_spec

        if not policy_spec(self.policy).is_asynchronous:
            raise UserError(
                f"federation.policy={self.policy} needs virtual time; add a clock, such as "
                "--clock 'lognormal(sigma=0.6)' (Python: clock='lognormal(sigma=0.6)')"
            )
        return self
