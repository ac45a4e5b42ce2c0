"""Checks a Flower project without Flower: its settings, its hooks, and whether server and sites fit together."""

from __future__ import annotations

import importlib
import math
import sys
import tomllib
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fedflat.algorithms import algorithm
from fedflat.data import Dataset
from fedflat.data.scaling import own_statistics_advice
from fedflat.deploy.settings import (
    ANY_NODE,
    Deployment,
    check_cohorts,
    check_deployment,
    config_of,
    deployment_of,
)
from fedflat.deploy.site.site import Site, load_site_data
from fedflat.deploy.trust.identity import identity_of
from fedflat.deploy.trust.secure_sum import threshold
from fedflat.deploy.trust.secure_support import require_support
from fedflat.deploy.trust.signatures import read_site_list
from fedflat.display import counted
from fedflat.engines.round.contract import Training
from fedflat.errors import UserError
from fedflat.experiment.setup.engine import training_of
from fedflat.experiment.setup.problem import build_problem
from fedflat.setting_names import flat
from fedflat.text import absolute_path

TOLERABLE_NOISE = 3.0
"""Norm of the noise, divided by the clipping norm, up to which accuracy lost few points (docs/privacy.md)."""


@dataclass(frozen=True)
class CheckedProject:
    """A project without mistakes.

    Attributes:
        parts: the data of the server and of the checked sites.
        privacy: noise and epsilon of the run; empty without differential privacy.
        secure_aggregation: whether the server sees only sums.
        sums: minimum number of sites in a sum, as text; empty without secure aggregation.
        advice: what the operator may have to change.
        missing: what must exist before the run starts, but has not been found.
    """

    parts: list[CheckedPart]
    privacy: str
    secure_aggregation: bool
    sums: str
    advice: list[str]
    missing: list[str]


@dataclass(frozen=True)
class CheckedPart:
    """The data that the server or a site loads.

    Attributes:
        part: ``server``, or e.g. ``site 0``.
        dataset: name of its dataset.
        train: number of training examples; those of the server are not trained on.
        test: number of test examples.
        outputs: names of the classes or labels, or e.g. ``1 number``.
    """

    part: str
    dataset: str
    train: int
    test: int
    outputs: str


def check_project(
    folder: Path, sites: Iterable[int] = (), node_config: Mapping[str, Any] | None = None
) -> CheckedProject:
    """Load what the server of a project loads, and then the data of some of its sites.

    Raises ``UserError`` if a setting is invalid, if a hook fails or returns something else, if model and data do not
    fit together, or if a site would be rejected.

    Args:
        folder: the project, as written by ``fedflat deploy init``.
        sites: numbers of the sites whose data can be loaded on this machine.
        node_config: what the hook ``site_data`` gets as the node config of these sites.
    """
    app = _flower_settings(folder)
    run_config = dict(flat(app.get("config", {})))
    config = config_of(run_config)
    deployment = deployment_of(run_config)
    check_deployment(config, deployment)
    hooks = _import_hooks(folder, app["components"]["serverapp"].split(".")[0])
    held_out, model = _call(hooks, "held_out", Dataset), _call(hooks, "model", nn.Module)
    problem, partition = build_problem(config, held_out, model)
    clients = len(partition.clients)
    training = training_of(config, algorithm(config.algorithm), clients, problem, is_deployed=True)
    require_support(training, problem, config.algorithm, deployment)
    check_cohorts(config, clients, deployment)
    identity = identity_of(problem, training)
    parts = [_part("server", problem.data, len(problem.data.train))]
    advice = {"server": own_statistics_advice(problem.data) if held_out is not None else ""}
    for number in sites:
        data = _call(hooks, "site_data", Dataset, number, {**(node_config or {}), "partition-id": number})
        site = Site(config, number, folder, data, _call(hooks, "model", nn.Module))
        differences = identity.differences(site.identity().values(), "at the server", f"at site {number}")
        own_statistics = own_statistics_advice(site.problem.data) if site.has_own_data else ""
        if differences:
            reasons = (f"the server would reject site {number}: {differences}", own_statistics)
            raise UserError("; ".join(filter(None, reasons)))
        parts.append(_part(f"site {number}", site.problem.data, len(site.indices)))
        advice[f"site {number}"] = own_statistics
    rounds, cohort_size = config.training.rounds - config.init_rounds, min(config.federation.clients_per_round, clients)
    advice["privacy"] = noise_advice(training, problem.layout.size, cohort_size)
    return CheckedProject(
        parts,
        training.privacy.describe(rounds) if training.privacy else "",
        deployment.secure_aggregation,
        _describe_sums(deployment, cohort_size, config.federation.sampling) if deployment.secure_aggregation else "",
        [f"{part}: {text}" for part, text in advice.items() if text],
        _missing_keys(deployment.sites, clients),
    )


def _part(part: str, data: Dataset, train: int) -> CheckedPart:
    """Describe the data of the server or of a site, of which ``train`` examples are for training."""
    outputs = ", ".join(data.classes) or counted(data.num_outputs, "number")
    return CheckedPart(part, data.name, train, len(data.test), outputs)


def noise_advice(training: Training, parameters: int, cohort_size: int) -> str:
    """Say by how much the noise exceeds what it protects; empty if accuracy tolerates it, or without privacy.

    The mean of a cohort's updates has at most the norm ``clip``. Noise with the standard deviation s in each of d
    coordinates has a norm of about s * sqrt(d). Local noise is averaged over the cohort, too.
    """
    privacy = training.privacy
    if privacy is None:
        return ""
    averaged = math.sqrt(cohort_size) if privacy.is_local else cohort_size
    ratio = privacy.noise_multiplier * math.sqrt(parameters) / averaged
    if ratio <= TOLERABLE_NOISE:
        return ""
    return (
        f"the noise on a round's mean update is {ratio:.3g} times as large as the update can be (ℓ2 norms), so expect "
        "low accuracy; use many more clients per round, a smaller model, fewer rounds or a larger epsilon"
    )


def _describe_sums(deployment: Deployment, cohort_size: int, sampling: str) -> str:
    """Describe the minimum number of sites in a secure sum, with ``cohort_size`` sites and if sites are missing."""
    if sampling != "fixed":  # any cohort may be small
        return f"every sum includes at least {counted(deployment.minimum, 'site')} (deploy.minimum)"
    smallest = max(threshold(cohort_size, deployment.secure_threshold), deployment.minimum)
    text = f"every sum includes at least {smallest} of {cohort_size} sites"
    if smallest > deployment.minimum:
        text += f", or at least {deployment.minimum} (deploy.minimum) if sites are missing when a round starts"
    return text


def _missing_keys(sites: str, clients: int) -> list[str]:
    """Say what the list of sites, the setting ``deploy.sites``, lacks; nothing if every node may take part."""
    if sites == ANY_NODE:
        return []
    path = absolute_path(sites)
    if not path.exists():
        return [
            f"the list of sites {sites} (deploy.sites), in the folder in which the SuperLink is started; "
            "fedflat deploy certificates writes it"
        ]
    keys = read_site_list(path)
    return [f"client {client} in the list of sites {sites}" for client in range(clients) if client not in keys]


def _flower_settings(folder: Path) -> dict[str, Any]:
    """Return the table ``tool.flwr.app`` of a project."""
    path = folder / "pyproject.toml"
    try:
        settings: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
        settings["components"]["serverapp"].split(".")
        return settings
    except OSError:
        raise UserError(f"{folder} has no pyproject.toml; expected a project written by fedflat deploy init") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
    except (KeyError, AttributeError, TypeError):
        raise UserError(f"{path} is not a Flower project; it needs serverapp in [tool.flwr.app.components]") from None


def _import_hooks(folder: Path, package: str) -> ModuleType:
    """Import the module ``hooks`` of the project's package."""
    sys.path.insert(0, str(folder.absolute()))
    try:
        return importlib.import_module(f"{package}.hooks")
    except Exception as error:
        raise _explain(f"{package}/hooks.py", error) from error
    finally:
        sys.path.pop(0)


def _call(hooks: ModuleType, name: str, expected: type[Any], *site: Any) -> Any:
    """Return the result of a hook, which must be an instance of ``expected``; None if the hook is not set.

    ``site`` is the number and the node config of a site, if the hook is about one.
    """
    hook = getattr(hooks, name, None)
    if hook is None:
        return None
    try:
        result = load_site_data(hook, *site) if site else hook()
    except UserError:
        raise
    except Exception as error:
        raise _explain(f"{name} in hooks.py", error) from error
    if not isinstance(result, expected):
        raise UserError(f"{name} in hooks.py returns {type(result).__name__}; expected a {expected.__name__}")
    return result


def _explain(what: str, error: Exception) -> UserError:
    """Return an error that says which line of the user's code raised ``error``."""
    line = traceback.extract_tb(error.__traceback__)[-1]
    return UserError(f"{what} fails with {type(error).__name__}: {error} ({line.filename}, line {line.lineno})")
