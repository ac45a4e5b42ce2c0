"""Splits Flower's run config into an experiment (settings of fedflat) and a deployment (keys ``deploy.*``)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedflat.errors import UserError, one_of
from fedflat.experiment.config import Config, EngineSettings, parse_config
from fedflat.experiment.setup.engine import sampler_of
from fedflat.experiment.setup.timing import has_time
from fedflat.setting_names import nest

PREFIX = "deploy."
ANY_NODE = "any"
"""Value of ``deploy.sites`` that admits every node, without a key."""
NO_TRACKING = "none"
"""Value of ``deploy.track`` that disables it."""
TRACKERS = ("tensorboard", "mlflow", "wandb")
"""Other values of ``deploy.track``, the keys of ``fedflat.reporting.tracking.BACKENDS``."""
SITE_ENGINE_SETTINGS = {"device", "precision"}
"""Engine settings that apply to sites; all others apply only to simulations."""


class Deployment(BaseModel):
    """How an experiment is run across sites."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    out: Path = Field(Path("runs/deployed"), description="run folder, relative to where the SuperLink was started")
    sites: str = Field(
        ANY_NODE, description="list of the sites that may take part, with their public keys; any admits every node"
    )
    minimum: int = Field(1, ge=1, description="minimum number of accepted updates per round")
    quorum: int | None = Field(None, ge=1, description="close a round as soon as this many clients have answered")
    tries: int = Field(3, ge=1, description="attempts at a round before the run pauses")
    timeout: float = Field(600.0, gt=0, description="time limit of a client in a round, in seconds")
    wait: float = Field(120.0, ge=0, description="seconds to wait for nodes that have not connected yet")
    bound: float = Field(
        30.0, gt=1, description="reject an update whose norm is more than this many times the cohort's median norm"
    )
    validation: bool = Field(False, description="at every evaluation, ask sites for the model's score on their data")
    track: str = Field(NO_TRACKING, description="log every evaluation to tensorboard, mlflow or wandb")
    score: bool = Field(True, description="finally, ask every site for the model's score on its held-out data")
    secure_aggregation: bool = Field(False, description="let the server see only sums of the sites' messages")
    secure_threshold: float = Field(
        2 / 3, ge=0.5, le=1, description="share of a round's sites that must remain; at least a majority"
    )
    secure_range: float = Field(
        64.0, ge=1e-9, le=1e9, description="largest absolute value in a vector that sites sum; larger ones are clipped"
    )
    secure_bits: Literal[16, 32, 64] = Field(32, description="bits of each value in a secure sum")

    @field_validator("track")
    @classmethod
    def _known_tracker(cls, name: str) -> str:
        if name not in (NO_TRACKING, *TRACKERS):
            raise one_of("tracking backend", name, TRACKERS)
        return name


def config_of(run_config: Mapping[str, Any]) -> Config:
    """Return the config of the experiment in a Flower run config, i.e. all keys that do not start with ``deploy.``.

    The server saves a checkpoint after every round, because a site keeps only the last two versions of its client's
    state: the server could not resume from an older checkpoint.
    """
    settings = {key: value for key, value in run_config.items() if not key.startswith(PREFIX)}
    groups = {"engine", *(key.partition(".")[0] for key in settings if "." in key)}
    for group in groups & settings.keys():
        parse_config({group: settings[group]})  # raises an error for a value in place of a group, e.g. data="digits"
    nested = nest(settings)
    engine = nested.setdefault("engine", {})
    simulation_settings = sorted((engine.keys() & EngineSettings.model_fields) - SITE_ENGINE_SETTINGS)
    if simulation_settings:
        raise UserError(
            f"engine.{simulation_settings[0]} is for simulations; remove it: a site trains one client, "
            "and every round is saved"
        )
    engine |= {"workers": 1, "checkpoint_every": 1}
    engine.setdefault("precision", "float32")  # all sites compute in the same precision, whatever their GPUs support
    config = parse_config(nested)
    if config.flatness.every is not None:
        raise UserError(
            "flatness.every needs the clients' data on the server; remove it and measure the finished run with "
            "fedflat flatness"
        )
    if config.federation.dropout:
        raise UserError("federation.dropout is for simulations, real clients drop out by themselves; remove it")
    if has_time(config):
        raise UserError("a deployment runs in real time; remove federation.clock and federation.policy")
    return config


def settings_digest(run_config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the experiment's settings as received: paths in a ``Config`` depend on the machine."""
    settings = sorted((key, value) for key, value in run_config.items() if not key.startswith(PREFIX))
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def deployment_of(run_config: Mapping[str, Any]) -> Deployment:
    """Return the deployment settings in a run config: its keys with the prefix ``deploy.``."""
    values = {key.removeprefix(PREFIX): value for key, value in run_config.items() if key.startswith(PREFIX)}
    for name in values:
        if name not in Deployment.model_fields:
            raise one_of("setting in deploy", name, Deployment.model_fields)
    try:
        return Deployment.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"deploy.{first['loc'][0]}={first['input']!r} is invalid: {first['msg'].lower()}") from None


def check_deployment(config: Config, deployment: Deployment) -> None:
    """Raise ``UserError`` if rounds would close below ``deploy.minimum``, or if a setting would spoil privacy."""
    quorum, minimum, privacy = deployment.quorum, deployment.minimum, config.federation.privacy
    if quorum is not None and quorum < minimum:
        raise UserError(f"deploy.quorum={quorum} closes rounds below deploy.minimum={minimum}; raise it")
    if quorum is not None and privacy:
        raise UserError(
            f"deploy.quorum={quorum} does not work with federation.privacy={privacy}: whose "
            "updates count would depend on the clients' data; remove deploy.quorum"
        )
    if deployment.validation and privacy:
        raise UserError(
            f"deploy.validation does not work with federation.privacy={privacy}: every round would reveal metrics of "
            "the sites' data without noise; remove deploy.validation"
        )


def check_cohorts(config: Config, clients: int, deployment: Deployment) -> None:
    """Check the cohorts of a federation of ``clients`` clients against ``deploy.minimum`` and ``deploy.quorum``.

    Raises:
        UserError: some cohort is smaller than the minimum, or every cohort is smaller than the quorum.
    """
    sampler, minimum, quorum = sampler_of(config, clients), deployment.minimum, deployment.quorum
    # A run that starts from another run's model starts with round init_rounds.
    cohort_sizes = {
        round: len(sampler(config.seed, round)) for round in range(config.init_rounds, config.training.rounds)
    }
    smallest_round = min(cohort_sizes, key=lambda round: cohort_sizes[round])
    if cohort_sizes[smallest_round] < minimum:
        raise UserError(
            f"deploy.minimum={minimum}, but only {cohort_sizes[smallest_round]} clients take part in round "
            f"{smallest_round}; lower it or raise federation.clients_per_round"
        )
    largest = max(cohort_sizes.values())
    # All clients, not only the cohort, are asked for validation scores.
    if quorum is not None and quorum > largest and not deployment.validation:
        raise UserError(
            f"deploy.quorum={quorum}, but at most {largest} clients take part in a round, so it would have no effect; "
            "lower it, remove it, or raise federation.clients_per_round"
        )
