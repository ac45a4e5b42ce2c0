"""Flower's ServerApp: an ordinary run whose engine trains at real sites."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedflat.data import Dataset
from fedflat.deploy.server.check_project import noise_advice
from fedflat.deploy.server.engine import SITES_SET, SitesEngine
from fedflat.deploy.server.federation_file import SCORES, FederationFile, read_document
from fedflat.deploy.server.ledger import LEDGER, RoundLedger
from fedflat.deploy.server.nodes import Nodes
from fedflat.deploy.server.secure_aggregation import SecureAttempt
from fedflat.deploy.server.site_scores import ask_for_scores, log_missing_scores
from fedflat.deploy.settings import (
    ANY_NODE,
    NO_TRACKING,
    Deployment,
    check_cohorts,
    check_deployment,
    config_of,
    deployment_of,
    settings_digest,
)
from fedflat.deploy.trust.identity import identity_of
from fedflat.deploy.trust.secure_support import require_support
from fedflat.deploy.trust.signatures import AllowedSite, read_site_list
from fedflat.display import counted, shown_metric, with_unit
from fedflat.engines.problem.task import Task, finite_or_none
from fedflat.errors import UserError
from fedflat.experiment.callback import Callback, RunView
from fedflat.experiment.config import Config
from fedflat.experiment.run import Run
from fedflat.experiment.setup.problem import name_user_objects
from fedflat.experiment.stopping import ENDED_STATUSES
from fedflat.experiment.store.checkpoint import has_checkpoint
from fedflat.experiment.store.files import LockedError, write_atomically
from fedflat.experiment.store.run_folder import SITES, Record, RunFolder
from fedflat.text import absolute_path

log = logging.getLogger("flwr")


def server_app(
    data: Callable[[], Dataset] | None = None,
    model: Callable[[], nn.Module] | None = None,
    task: Callable[[], Task] | None = None,
) -> ServerApp:
    """Return the ServerApp of a federation.

    Args:
        data: returns the dataset that the server evaluates on; by default the config's dataset.
        model: returns a user-supplied model.
        task: returns a user-supplied task.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        """Run the experiment in Flower's run config; Flower reports an exception at once, but not ``SystemExit``."""
        try:
            serve(
                grid, context.run_config, data() if data else None, model() if model else None, task() if task else None
            )
        except UserError as error:
            log.error("fedflat: %s", error)
            log.addFilter(_drop_traceback)  # Flower logs the exception, too
            raise

    return app


def _drop_traceback(record: logging.LogRecord) -> bool:
    """Drop the traceback of a ``UserError`` from a log record; its message suffices."""
    if record.exc_info and isinstance(record.exc_info[1], UserError):
        record.exc_info = None
    return True


def serve(
    grid: Grid,
    run_config: Mapping[str, Any],
    data: Dataset | None = None,
    model: nn.Module | None = None,
    task: Task | None = None,
) -> Record:
    """Run an experiment over a federation, from its last checkpoint if its folder has one.

    Args:
        grid: Flower's connection to the nodes.
        run_config: Flower's run config, with the settings of the experiment and the deployment.
        data: the dataset that the server evaluates on; by default the config's dataset.
        model: user-supplied model.
        task: user-supplied task.

    Returns:
        The record of the run.
    """
    config = name_user_objects(config_of(run_config), data, model)
    deployment = deployment_of(run_config)
    check_deployment(config, deployment)
    folder = RunFolder(absolute_path(deployment.out))

    allowed = _allowed_sites(deployment)

    def build_engine(run: Run) -> SitesEngine:
        """Connect the run to the federation's nodes."""
        nodes = Nodes(grid, identity_of(run.problem, run.training), len(run.partition.clients), allowed)
        sites = SitesEngine(run.problem, nodes, RoundLedger(folder.path / LEDGER), deployment)
        if deployment.secure_aggregation:
            sites.attempt_class, sites.settings_digest = SecureAttempt, settings_digest(run_config)
        return sites

    run = Run(
        config,
        folder.path,
        data=data,
        model=model,
        task=task,
        callbacks=(_ProgressLog(), *_tracking(deployment)),
        resume=_is_resumable(folder, config, deployment),
        engine=build_engine,
    )
    require_support(run.training, run.problem, config.algorithm, deployment)
    clients = len(run.partition.clients)
    check_cohorts(config, clients, deployment)
    cohort_size = min(config.federation.clients_per_round, clients)
    if advice := noise_advice(run.training, run.problem.layout.size, cohort_size):
        log.warning("fedflat: %s", advice)
    sites = run.engine
    assert isinstance(sites, SitesEngine)
    try:
        record = run.execute()
    except LockedError:  # another process executes the run, and writes its status
        raise
    except Exception as error:
        _note_in_status(folder, sites.nodes, str(error))
        raise
    if deployment.score:
        _score_sites(sites, record, run.primary, clients)
    _note_in_status(folder, sites.nodes)
    log.info("fedflat: done; show the results with: fedflat show %s", shlex.quote(str(folder.path)))
    return record


def _allowed_sites(deployment: Deployment) -> dict[int, AllowedSite] | None:
    """Return the sites that may take part, by client; None if every node may."""
    if deployment.sites == ANY_NODE:
        log.warning(
            "fedflat: sites need no key, so every node that reaches the SuperLink can pretend to be a site; "
            "between machines, set deploy.sites to the list that fedflat deploy certificates writes"
        )
        return None
    return read_site_list(absolute_path(deployment.sites))


def _tracking(deployment: Deployment) -> tuple[Callback, ...]:
    """Return the callback that logs to the tracking service in ``deploy.track``, if there is one."""
    if deployment.track == NO_TRACKING:
        return ()
    from fedflat.reporting.tracking import Tracker  # imports reports, which other servers do not need

    return (Tracker(deployment.track),)


def _note_in_status(folder: RunFolder, nodes: Nodes, error: str = "") -> None:
    """Add the rejected nodes to the status of the run, if there are any, and why it has failed, if it has."""
    if not folder.exists:
        return
    status = folder.status()
    if error and status["status"] not in ENDED_STATUSES:
        status |= {"status": "paused", "reason": error}
    if nodes.rejected:
        status["rejected_nodes"] = nodes.rejections()
    folder.write_status(**status)


def _is_resumable(folder: RunFolder, config: Config, deployment: Deployment) -> bool:
    """Whether the folder has a run to resume; raises ``UserError`` if that run is another experiment or is complete.

    A run that has ended is complete once it has the sites' scores, unless ``deploy.score`` is off. Another experiment
    is replaced if it failed before it evaluated its first model, because too few sites had joined.
    """
    if not folder.exists:
        return False
    if folder.config() != config:
        if folder.metrics_length() == 0 and not (folder.path / LEDGER).exists() and not has_checkpoint(folder):
            _discard_run(folder)
            return False
        raise UserError(
            f"{folder.path} contains a run of another experiment; choose another deploy.out or restore its settings"
        )
    was_secure = read_document(folder.path / SITES).get("secure_aggregation", deployment.secure_aggregation)
    if was_secure != deployment.secure_aggregation:
        raise UserError(
            f"the run in {folder.path} began with deploy.secure_aggregation={str(was_secure).lower()}; "
            "restore this setting or choose another deploy.out"
        )
    status = folder.status()["status"]
    if status in ENDED_STATUSES and (not deployment.score or (folder.path / SCORES).exists()):
        raise UserError(
            f"the run in {folder.path} has ended ({status}); view it with fedflat show, or choose another deploy.out"
        )
    return True


def _discard_run(folder: RunFolder) -> None:
    """Delete the files that mark a folder as a run; raises ``UserError`` if another server is waiting for its sites."""
    folder.acquire_lock()
    try:
        for name in ("metrics.jsonl", "timing.jsonl", SITES, "config.yaml"):  # the config last: it marks a run
            (folder.path / name).unlink(missing_ok=True)
    finally:
        folder.release_lock()


def _score_sites(sites: SitesEngine, record: Record, name: str, clients: int) -> None:
    """Ask every site for a final model's metrics on its held-out data, and store them with the run.

    Args:
        sites: the engine, which knows the nodes.
        record: the finished run.
        name: the model to score, ``server`` or an average such as ``wima``.
        clients: number of clients in the federation.
    """
    # An average that has not started yet has no model.
    model = record.models.get(name, record.models["server"])
    log.info("fedflat: asking %s for their scores of the final model", counted(clients, "site"))
    scores, missing = ask_for_scores(sites.nodes, sites.experiment, model, range(clients), sites.deployment.timeout)
    log_missing_scores(sites.nodes, missing)
    assert record.folder is not None
    document: dict[str, Any] = {
        "model": name,
        "sites": {
            str(client): {metric: finite_or_none(value) for metric, value in numbers.items()}
            for client, numbers in scores.items()
        },
        "missing": {str(client): reason for client, reason in missing.items()},
    }
    if names := sites.nodes.names():
        document["names"] = {str(client): site for client, site in names.items()}
    write_atomically(record.folder.path / SCORES, json.dumps(document) + "\n")


class _ProgressLog(Callback):
    """Logs progress in Flower's log, and stores the name of the experiment and its sites in the run folder."""

    _file: FederationFile

    def began(self, run: RunView) -> None:
        """Tell the engine the names that it sends to nodes, log where the run starts, and wait for the sites."""
        assert isinstance(run.engine, SitesEngine)
        assert run.folder is not None
        self._file = FederationFile(run.folder.path)
        run.engine.experiment, run.engine.primary = self._file.experiment, run.primary
        log.info(
            "fedflat: %s, from round %d of %d", run.config.algorithm, run.server.rounds, run.config.training.rounds
        )
        if run.engine.deployment.secure_aggregation:
            log.info("fedflat: secure aggregation is on; this server sees only sums of what sites send")
        self.round_done(run)
        nodes, deployment, clients = run.engine.nodes, run.engine.deployment, len(run.partition.clients)
        nodes.wait_for(lambda: len(nodes.present) >= clients, deployment.wait, deployment.timeout)
        self.round_done(run)
        if len(nodes.present) < deployment.minimum:
            raise nodes.too_few_error(len(nodes.present), deployment.minimum, "too few sites have joined")

    def round_done(self, run: RunView) -> None:
        """Store the sites, to which new ones may have come."""
        assert isinstance(run.engine, SitesEngine)
        nodes, clients = run.engine.nodes, range(len(run.partition.clients))
        names = {client: name for client, name in nodes.names().items() if client in clients}
        examples = {client: joined.examples for client, joined in nodes.present.items()}
        self._file.note(run.engine.deployment.secure_aggregation, names, examples)

    def evaluated(self, run: RunView) -> None:
        """Log the test metric of the last evaluation."""
        metric = run.metric
        # run.primary is the reported model; an average that has not started yet has no metrics.
        scores = run.history[-1]["test"].get(run.primary) or run.history[-1]["test"]["server"]
        shown = f"{with_unit(metric)} {shown_metric(scores[metric], metric)}"
        if SITES_SET in run.history[-1]:
            ((_, means),) = run.history[-1][SITES_SET].items()
            shown += f", at the sites {shown_metric(means[metric], metric)}"
        if "epsilon" in run.history[-1]:
            shown += f", epsilon {run.history[-1]['epsilon']:.3g}"
        log.info("fedflat: round %d of %d, test %s", run.server.rounds, run.config.training.rounds, shown)

    def ended(self, run: RunView, record: Record) -> None:
        log.info("fedflat: %s after round %d", record.status, run.server.rounds)
