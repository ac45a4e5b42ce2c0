"""The same ClientApp for algorithms that change local training, such as SCAFFOLD or FedSAM."""

from collections.abc import Callable

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from example_app.client import evaluate, examples, network
from fedflat.deploy import LocalSteps, client

app = ClientApp()
app.evaluate()(evaluate)


@app.train()
@client
def train(message: Message, context: Context, make_optimiser: Callable[..., LocalSteps]) -> Message:
    """Train the received model for one epoch with the steps of the server's algorithm."""
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = examples(int(context.node_config["partition-id"]))
    batches = torch.arange(len(x)).split(32)
    optimiser = make_optimiser(model, lr=0.1, steps=len(batches))
    for batch in batches:

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            return loss

        optimiser.step(closure)
    metrics = MetricRecord({"num-examples": len(x)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)
