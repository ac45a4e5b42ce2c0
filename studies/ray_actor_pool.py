"""Compare the Ray engine with a small one on ``ray.util.ActorPool``, for docs/cluster.md.

    OMP_NUM_THREADS=1 python studies/ray_actor_pool.py

Both train the same rounds on two Ray nodes of this machine, each with one worker per node, and must agree bit for bit.
They alternate in blocks of rounds, so that other load affects both alike. The prototype has the same workers, but sends
them one client at a time and keeps client states as references. It cannot replace lost workers, nodes or states.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median
from typing import Any

import torch

from fedflat.algorithms.algorithm import States, flat_fields, nested_state
from fedflat.bench.machine import Load, cpu_seconds
from fedflat.bench.setting import RandomImages
from fedflat.engines.cpu.engine import one_thread
from fedflat.engines.ray.cluster import ray_module
from fedflat.engines.ray.engine import RayEngine
from fedflat.engines.ray.messages import DispatchedClient
from fedflat.engines.ray.results import CohortResults, RoundContext, most_common_state, outcomes_from_rows
from fedflat.engines.ray.scheduling import WorkItem
from fedflat.engines.ray.worker import Worker
from fedflat.engines.round.cohort_buffers import state_from_arrays, state_to_arrays
from fedflat.engines.round.contract import Client, Cost, ModelState, Outcome, RemoteState, RoundStart, Training
from fedflat.experiment.analysis.replay import Replay
from fedflat.experiment.make_config import make_config
from fedflat.experiment.setup.engine import ray_engine
from fedflat.experiment.setup.problem import build_problem

os.environ.update({"RAY_worker_niceness": "0"})  # as in clusters that fedflat starts
ray = ray_module()
NODE = {"num_cpus": 1, "resources": {"pool": 1}, "object_store_memory": 200_000_000, "include_dashboard": False}
DATA = RandomImages(4000).dataset()
SETTINGS = {"clients": 40, "clients_per_round": 10, "partition": "iid", "lr": 0.01, "device": "cpu", "engine": "ray"}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "mlp, 1 step": (10, {"model": "mlp(hidden=8)", "local_steps": 1, "batch_size": 10}),
    "mlp, 1.2 MB per state": (10, {"model": "mlp(hidden=100)", "local_steps": 1, "batch_size": 10}),
    "lenet5, 5 steps": (2, {"model": "lenet5", "local_steps": 5, "batch_size": 50}),
    "lenet5, 20 steps": (1, {"model": "lenet5", "local_steps": 20, "batch_size": 25}),
    "lenet5, unequal clients": (2, {"model": "lenet5", "local_epochs": 2, "partition": "dirichlet(0.1)"}),
}
"""Rounds per block and settings."""


class PoolWorker(Worker):
    """A worker that also returns the row of the client that it trained."""

    def train_row(self, row: int, *arguments: Any) -> Any:
        result = self.train(*arguments)
        return [(row, result[0]), result[1]] if isinstance(result, list) else (row, result)


class ReferencedState(RemoteState):
    """A client's state in the object store; ``ref`` is Ray's reference to it."""

    def __init__(self, ref: Any) -> None:
        super().__init__(lambda: self.deliver(state_from_arrays({k: rows[0] for k, rows in ray.get(ref).items()})))
        self.ref = ref


class ActorPoolEngine(RayEngine):
    """The prototype, on the actors of an ``ActorPool``; builds its broadcast and buffers as the Ray engine does."""

    def __init__(self, engine: RayEngine, actors: list[Any]) -> None:
        self.problem, self.cohort_buffers, self._training = engine.problem, None, None
        self.actors = ray.util.ActorPool(actors)
        ray.get([actor.build_problem.remote(engine._source) for actor in actors])

    def train(self, training: Training, round: int, model: ModelState, server: States, cohort: list[Client]) -> Outcome:
        start_of_round, initial = RoundStart.of(training, round, model, server), most_common_state(cohort)
        broadcast = self._build_broadcast(start_of_round, cohort, initial)
        context = RoundContext(training, cohort, broadcast, ray.put(broadcast), None, initial)
        keeps_state = bool(flat_fields(training.algorithm.client_fields()))
        states: list[Any] = [nested_state({})] * len(cohort)

        def start(actor: Any, row: int) -> Any:
            client, state = cohort[row], []
            if isinstance(client.state, ReferencedState):
                state = [client.state.ref]
            elif client.state is not initial:
                state = [{name: array[None] for name, array in state_to_arrays(client.state).items()}]
            message = DispatchedClient(client.number, client.indices, None, (0, 0) if state else None)
            method = actor.train_row.options(num_returns=2 if keeps_state else 1)
            result = method.remote(row, context.broadcast_ref, None, [message], None, *state)
            if not keeps_state:
                return result
            states[row] = ReferencedState(result[1])
            return result[0]

        trained = self.actors.map_unordered(start, range(len(cohort)))
        items = [WorkItem("train", lambda _: (), [row], result=result) for row, result in trained]
        results = CohortResults(context, start_of_round, None, items, states, Cost())
        with one_thread():
            return outcomes_from_rows(results, self._buffers_for(results), [cohort])[0]


def compare(algorithm: str, case: str, address: str, actors: list[Any], blocks: int) -> str:
    """Train blocks of rounds with both designs alternately; returns a row of the table."""
    rounds, settings = CASES[case]
    config = make_config(settings={**SETTINGS, **settings, "algorithm": algorithm, "ray_address": address})
    problem, partition = build_problem(config, data=DATA)
    engine = ray_engine(config, problem, {"data": DATA, "model": None, "task": None})
    assert len({worker.node for worker in engine.pool.started_workers}) == len(actors)
    replays = [Replay(config, problem, partition, workers=1) for _ in range(2)]
    replays[0].engine, replays[1].engine = engine, ActorPoolEngine(engine, actors)
    times: list[list[tuple[float, float]]] = [[], []]  # of each design: wall and CPU seconds of each block
    for block in range(-1, blocks):  # the first block is not measured
        for design in (0, 1) if block % 2 else (1, 0):
            start, cpu = time.perf_counter(), cpu_seconds(os.getpid()) or 0.0
            for _ in range(rounds):
                replays[design].advance()
            if block >= 0:
                times[design].append((time.perf_counter() - start, (cpu_seconds(os.getpid()) or 0.0) - cpu))
    assert torch.equal(*(replay.moment.model.weights for replay in replays))
    cells = []
    for clock in range(2):
        today, pool = ([1e3 * seconds[clock] / rounds for seconds in each] for each in times)
        ratio = median(theirs / ours for ours, theirs in zip(today, pool, strict=True))
        cells += [f"{median(today):.0f}", f"{median(pool):.0f}", f"{ratio:.2f}"]
    return f"| {case} | {algorithm} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--blocks", type=int, default=11)
    options = parser.parse_args()
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    actors = [ray.remote(num_cpus=0, resources={"pool": 1})(PoolWorker).remote() for _ in range(2)]
    load = Load()
    print("| round | algorithm | ms | ms, pool | ratio | CPU ms | CPU ms, pool | ratio |\n" + "|---" * 8 + "|")
    for case in options.cases:
        for algorithm in ("fedavg", "scaffold"):
            print(compare(algorithm, case, cluster.address, actors, options.blocks), flush=True)
    print(f"other processes used {load.share_of_others():.0%} of the cores")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
