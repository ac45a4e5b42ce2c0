"""The settings of client sampling, aggregation and virtual time."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

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

    @field_validator("clock")
    @classmethod
    def _canonical_clock(cls, text: str | None) -> str | None:
        """Check a clock, spell the names of its parts as registered and make paths absolute; ``none`` disables it."""
        if text is None or text.strip().lower() == "none":
            return None
        from fedflat.timing import CLOCK_PARTS, clock_spec

        text = respell(text, CLOCK_PARTS)
        clock_spec(text)
        return text

    @field_validator("policy")
    @classmethod
    def _canonical_policy(cls, text: str) -> str:
        """Check a policy and spell its name as registered."""
        if text == "wait":  # importing the policies imports numpy, which --help should not need
            return text
        from fedflat.timing import POLICIES, policy_spec

        text = respell(text, POLICIES)
        policy_spec(text)
        return text

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
