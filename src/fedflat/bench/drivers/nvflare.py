"""Driver of NVFlare: its FedAvgRecipe in the simulator SimEnv; the clients' script trains like the plain loop."""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch import nn

from fedflat.bench.drivers import benchmark_folder, connected_timer, plain_loop
from fedflat.bench.peers import Simulator
from fedflat.bench.plain import training_loss
from fedflat.bench.setting import ROUNDS
from fedflat.errors import UserError


class Network(nn.Module):
    """The benchmark's model, in a class that NVFlare's server can build without arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = plain_loop().new_model()
        self.inner.load_state_dict(plain_loop().state)


def run(simulator: Simulator) -> None:
    """Run NVFlare's FedAvgRecipe with all clients in every round; the rounds are timed in ``train``."""
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.recipe import SimEnv

    if simulator.clients != simulator.setting.clients_per_round:
        raise UserError(
            "nvflare is measured with all clients in every round; use equal --clients and --clients-per-round"
        )
    script = benchmark_folder() / "bench_client.py"
    script.write_text("from fedflat.bench.drivers import nvflare\nnvflare.train()\n")
    model = {"class_path": f"{__name__}.{Network.__name__}", "args": {}}
    recipe = FedAvgRecipe(
        name="bench", min_clients=simulator.clients, num_rounds=ROUNDS, model=model, train_script=str(script)
    )
    recipe.execute(SimEnv(num_clients=simulator.clients, workspace_root=str(benchmark_folder() / "nvflare")))
    sys.exit("the simulation ended early")


def train() -> None:
    """Script that every client runs: train each received model and send the result.

    The first client also reports the rounds to the timer: a round is over when it receives the next round's model.
    """
    import nvflare.client as flare

    torch.set_num_threads(1)
    flare.init()
    client, loop = int(flare.get_site_name().rpartition("-")[2]) - 1, plain_loop()
    timer = connected_timer() if client == 0 else None
    while flare.is_running():
        received = flare.receive()
        state = {name.removeprefix("inner."): torch.as_tensor(value) for name, value in received.params.items()}
        if timer is not None and received.current_round > 0:
            timer.round_done(partial(training_loss, loop.problem, state))
        state, examples = loop.train(state, client, received.current_round)
        sent = {f"inner.{name}": tensor.cpu() for name, tensor in state.items()}
        # NVFlare weights clients by this number, which its examples set to the number of steps.
        flare.send(flare.FLModel(params=sent, meta={"NUM_STEPS_CURRENT_ROUND": examples}))
