"""A ClientApp in plain PyTorch, without any fedflat code."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

app = ClientApp()


def network() -> nn.Module:
    """A small classifier with BatchNorm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))


def examples(site: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [n, 20] and labels [n] of a site: three clouds of points, in different proportions at each site."""
    random = torch.Generator().manual_seed(site)
    labels = torch.randint(0, 3, (300,), generator=random) * torch.randint(0, site + 2, (300,), generator=random) % 3
    centres = torch.randn(3, 20, generator=torch.Generator().manual_seed(99))
    return centres[labels] + torch.randn(300, 20, generator=random), labels


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received model for one epoch."""
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = examples(int(context.node_config["partition-id"]))
    for batch in torch.arange(len(x)).split(32):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimiser.step()
    metrics = MetricRecord({"num-examples": len(x)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Measure the accuracy of the received model on this site's examples."""
    model = network().eval()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = examples(int(context.node_config["partition-id"]))
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    metrics = MetricRecord({"num-examples": len(x), "accuracy": accuracy})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
