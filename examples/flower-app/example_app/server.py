"""A ServerApp that uses one of fedflat's algorithms."""

from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from example_app.client import network
from fedflat.deploy import Strategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and save the average of the last rounds' models."""
    config, sites = context.run_config, int(context.run_config["sites"])
    strategy = Strategy(str(config["algorithm"]), min_available_nodes=sites, min_train_nodes=sites)
    result = strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=int(config["rounds"]))
    accuracies = {round: metrics["accuracy"] for round, metrics in result.evaluate_metrics_clientapp.items()}
    out = Path(str(config["out"]))
    unfinished = out.with_suffix(".tmp")  # renamed once it is complete
    torch.save({"model": result.arrays.to_torch_state_dict(), "accuracy": accuracies}, unfinished)
    unfinished.replace(out)
