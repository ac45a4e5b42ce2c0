"""A ClientApp in plain PyTorch, which knows nothing of fedflat."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits
from torch import nn

app = ClientApp()


def network() -> nn.Module:
    """A small classifier of digits, with BatchNorm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


def examples(site: int, sites: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [n, 64] and labels [n] of a site, which has every ``sites``-th digit."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[site::sites] / 16, dtype=torch.float32), torch.tensor(labels[site::sites])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received model for one epoch."""
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = examples(int(context.node_config["partition-id"]), int(context.run_config["sites"]))
    for batch in torch.arange(len(x)).split(32):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimiser.step()
    metrics = MetricRecord({"num-examples": len(x)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Measure the accuracy of the received model on this site's digits."""
    model = network().eval()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = examples(int(context.node_config["partition-id"]), int(context.run_config["sites"]))
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    metrics = MetricRecord({"num-examples": len(x), "accuracy": accuracy})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
