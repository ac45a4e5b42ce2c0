"""From Flower's run config, whose keys are those of a fedflat config, to an experiment and to how it is deployed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedflat.errors import UserError, one_of
from fedflat.experiment.config import Config, EngineSettings, config

PREFIX = "deploy."
AT_SITES = {"device", "precision"}
"""What of the engine's settings a site has a use for."""


class Deployment(BaseModel):
    """How an experiment is spread over sites."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    out: Path = Field(Path("runs/deployed"), description="the run's folder, from where the SuperLink was started")
    minimum: int = Field(1, ge=1, description="least number of accepted updates for a round to count")
    tries: int = Field(3, ge=1, description="how often a round is asked for before the run pauses")
    timeout: float = Field(600.0, gt=0, description="seconds that a client has for a round")
    wait: float = Field(120.0, ge=0, description="seconds to wait for nodes that are not there yet")
    bound: float = Field(
        30.0, gt=1, description="an update whose norm is this many times the cohort's median is refused"
    )
    clipping_norm: float | None = Field(
        None, gt=0, description="sent to sites for Flower's fixedclipping_mod; longer updates are refused"
    )
    noise_multiplier: float = Field(
        0.0, ge=0, description="deviation of the noise added to the mean, times clipping_norm / updates"
    )
    score: bool = Field(True, description="in the end, ask every site for the model's score on its own held-out data")


def experiment_of(run_config: Mapping[str, Any]) -> Config:
    """The experiment that a run config describes; a checkpoint after every round, since nodes keep two generations of state."""
    nested: dict[str, Any] = {}
    for key, value in run_config.items():
        if not key.startswith(PREFIX):
            *sections, last = key.split(".")
            inside = nested
            for section in sections:
                inside = inside.setdefault(section, {})
            inside[last] = value
    idle = sorted((nested.setdefault("engine", {}).keys() & EngineSettings.model_fields) - AT_SITES)
    if idle:
        raise UserError(
            f"engine.{idle[0]} is for simulations; a site trains its client alone, and every round has a checkpoint: leave it out"
        )
    nested["engine"] |= {"workers": 1, "checkpoint_every": 1}
    made = config(nested)
    if made.flatness.every is not None:
        raise UserError(
            "flatness.every needs the clients' data on the server; leave it out and look at the run later (fedflat flatness)"
        )
    if made.federation.dropout:
        raise UserError("federation.dropout is for simulations; real clients drop out by themselves, leave it at 0")
    return made


def deployment_of(run_config: Mapping[str, Any]) -> Deployment:
    """How a run config wants it deployed."""
    values = {key.removeprefix(PREFIX): value for key, value in run_config.items() if key.startswith(PREFIX)}
    for name in values:
        if name not in Deployment.model_fields:
            raise one_of("setting in deploy", name, Deployment.model_fields)
    try:
        return Deployment.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"deploy.{first['loc'][0]}={first['input']!r} is not possible: {first['msg'].lower()}"
        ) from None
