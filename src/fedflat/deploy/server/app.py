"""Flower's ServerApp: an ordinary run whose engine is the federation."""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedflat.data import Dataset
from fedflat.deploy.flower.wire import BUFFERS, MODEL, content, numbers_of
from fedflat.deploy.server.engine import SitesEngine
from fedflat.deploy.server.ledger import Ledger
from fedflat.deploy.server.nodes import Nodes, too_few
from fedflat.deploy.server.settings import Deployment, deployment_of, experiment_of
from fedflat.deploy.trust.identity import identity_of
from fedflat.deploy.trust.privacy import refuse_noise
from fedflat.engines.problem.task import Task
from fedflat.errors import UserError
from fedflat.experiment.callback import Callback, RunView
from fedflat.experiment.config import Config
from fedflat.experiment.run import Run
from fedflat.experiment.setup.problem import custom
from fedflat.experiment.stopping import OVER
from fedflat.experiment.store.atomic_files import write_whole
from fedflat.experiment.store.record import Record
from fedflat.experiment.store.run_folder import SITES, RunFolder
from fedflat.units import shown_metric, with_unit

log = logging.getLogger("flwr")
LEDGER, SCORES = "participation.jsonl", "sites.json"


def server_app(
    data: Callable[[], Dataset] | None = None,
    model: Callable[[], nn.Module] | None = None,
    task: Callable[[], Task] | None = None,
) -> ServerApp:
    """The server's side of a federation. ``data`` gives what the server evaluates on; without it, the config's dataset does."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            serve(grid, context.run_config, data and data(), model and model(), task and task())
        except UserError as mistake:
            raise SystemExit(f"fedflat: {mistake}") from None

    return app


def serve(
    grid: Grid,
    run_config: Mapping[str, Any],
    data: Dataset | None = None,
    model: nn.Module | None = None,
    task: Task | None = None,
) -> Record:
    """Run an experiment over a federation, from its last checkpoint where its folder has one."""
    config, wanted = custom(experiment_of(run_config), data, model), deployment_of(run_config)
    folder = RunFolder(wanted.out.expanduser().absolute())

    def engine(run: Run) -> SitesEngine:
        refuse_noise(wanted, run.problem, run.training)
        nodes = Nodes(grid, identity_of(run.problem, run.training), len(run.partition.clients))
        return SitesEngine(run.problem, nodes, Ledger(folder.path / LEDGER), wanted)

    begun = _goes_on(folder, config, wanted)
    run = Run(config, folder.path, data=data, model=model, task=task, callbacks=(_Told(),), resume=begun, engine=engine)
    _require_cohorts(run, wanted.minimum)
    sites = run.engine
    assert isinstance(sites, SitesEngine)
    clients = len(run.partition.clients)
    sites.nodes.gather(lambda: len(sites.nodes.present) >= clients, wanted.wait, wanted.timeout)
    if len(sites.nodes.present) < wanted.minimum:
        raise too_few(len(sites.nodes.present), wanted.minimum, "too few sites have joined")
    record = run.go()
    if wanted.score:
        _score_sites(sites, record, run.primary, clients)
    return record


def _goes_on(folder: RunFolder, config: Config, wanted: Deployment) -> bool:
    """Whether there is a run to go on with; one of another experiment, or one to which nothing is left to do, is refused."""
    if not folder.exists:
        return False
    if folder.config() != config:
        raise UserError(
            f"there is a run of another experiment in {folder.path}; choose another deploy.out, or keep its settings"
        )
    status = folder.status()["status"]
    if status in OVER and (not wanted.score or (folder.path / SCORES).exists()):
        raise UserError(
            f"the run in {folder.path} is over ({status}); look at it with fedflat show, or choose another deploy.out"
        )
    return True


def _require_cohorts(run: Run, minimum: int) -> None:
    """Refuse a minimum that some round could never reach."""
    smallest = min(range(run.config.init_rounds, run.config.training.rounds), key=lambda round: len(run.cohort(round)))
    count = len(run.cohort(smallest))
    if count < minimum:
        raise UserError(
            f"deploy.minimum={minimum} is more than the clients that take part in round {smallest}, which are {count}; "
            "lower it, or raise federation.clients_per_round"
        )


def _experiment(folder: Path) -> str:
    """The name under which nodes keep what they remember: made once, and kept with the run."""
    path = folder / SITES
    if not path.exists():
        write_whole(path, json.dumps({"experiment": secrets.token_hex(8)}) + "\n")
    return str(json.loads(path.read_text())["experiment"])


def _score_sites(sites: SitesEngine, record: Record, name: str, clients: int) -> None:
    """Ask every site how good the final model is on what it held out, and keep the answers with the run."""
    model = record.models.get(name, record.models["server"])
    down = {MODEL: model.weights} | ({BUFFERS: model.buffers} if len(model.buffers) else {})
    asked = {client: content(down) for client in range(clients)}
    answers, missing = sites.nodes.ask("evaluate", asked, "score", sites.wanted.timeout)
    scores = {str(client): _finite(numbers_of(records)) for client, records in answers.items()}
    assert record.folder is not None
    why = {str(client): reason for client, reason in missing.items()}
    write_whole(record.folder.path / SCORES, json.dumps({"model": name, "sites": scores, "missing": why}) + "\n")


def _finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


class _Told(Callback):
    """Says in Flower's log how the run goes, and gives it its name once it has a folder."""

    def began(self, run: RunView) -> None:
        assert isinstance(run.engine, SitesEngine)
        assert run.folder is not None
        run.engine.experiment = _experiment(run.folder.path)
        log.info(
            "fedflat: %s, from round %d of %d", run.config.algorithm, run.server.rounds, run.config.training.rounds
        )

    def evaluated(self, run: RunView) -> None:
        metric = run.metric
        scores = run.history[-1]["test"].get(run.primary) or run.history[-1]["test"]["server"]
        shown = f"{with_unit(metric)} {shown_metric(scores[metric], metric)}"
        log.info("fedflat: round %d of %d, test %s", run.server.rounds, run.config.training.rounds, shown)

    def ended(self, run: RunView, record: Record) -> None:
        log.info(
            "fedflat: %s after round %d, in %s",
            record.status,
            run.server.rounds,
            record.folder.path if record.folder else "memory",
        )
