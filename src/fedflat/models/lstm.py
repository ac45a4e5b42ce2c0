"""Recurrent networks over characters.

An LSTM layer has states ``h`` and ``c``. With ``i, f, g, o`` the four quarters of ``W_ih x + b_ih + W_hh h + b_hh``, it
computes at each character

    c <- sigmoid(f) * c + sigmoid(i) * tanh(g)
    h <- sigmoid(o) * tanh(c)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.models.registry import ModelExample, ModelSpec, require_sequence
from fedflat.text import param


@dataclass(frozen=True)
class CharLstm(ModelSpec):
    """An LSTM that predicts the next character at each position of a text (McMahan et al. 2017; LEAF; FedJAX)."""

    name = "char-lstm"
    dataset = "shakespeare"
    partition = "natural"
    examples = (ModelExample("char-lstm", (80,), 90, "McMahan et al. 2017; LEAF, FedJAX; WiMA (2023)"),)
    embedding: int = param(8, "dimensions per character", low=1)
    hidden: int = param(256, "width of each LSTM layer", low=1)
    layers: int = param(2, "number of LSTM layers", low=1, high=1000)
    tanh: bool = param(False, "an additional tanh after each LSTM layer, as in FedJAX")
    fused: bool = param(
        False, "torch's fused kernel: faster for small batches, but without vmap and forward-mode derivatives"
    )

    def check(self, input_shape: tuple[int, ...]) -> None:
        require_sequence(self.name, input_shape)

    def network(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for a vocabulary of ``classes`` characters, which are both inputs and predictions."""
        recurrent: list[nn.Module] = []
        for layer in range(self.layers):
            inputs = self.embedding if layer == 0 else self.hidden
            recurrent.append(
                nn.LSTM(inputs, self.hidden, batch_first=True) if self.fused else UnrolledLstm(inputs, self.hidden)
            )
        embedding, classifier = nn.Embedding(classes, self.embedding), nn.Linear(self.hidden, classes)
        return CharacterNetwork(embedding, recurrent, classifier, self.tanh)


class CharacterNetwork(nn.Module):
    """Maps characters [batch, length] int64 to logits [batch, length, vocabulary]; LSTM states start at zero."""

    def __init__(self, embedding: nn.Embedding, recurrent: list[nn.Module], classifier: nn.Module, tanh: bool) -> None:
        super().__init__()
        self.embedding = embedding
        self.recurrent = nn.ModuleList(recurrent)
        self.classifier = classifier
        self.tanh = tanh

    def forward(self, characters: Tensor) -> Tensor:
        """Return logits of the next character at each position; padding, which is negative, ends a text."""
        x: Tensor = self.embedding(characters.clamp(min=0))
        for layer in self.recurrent:
            x, _ = layer(x)
            if self.tanh:
                x = torch.tanh(x)
        logits: Tensor = self.classifier(x)
        return logits


class UnrolledLstm(nn.Module):
    """One LSTM layer with the parameters, initialisation and results of ``nn.LSTM(batch_first=True)``.

    torch's kernel supports neither vmap nor forward-mode derivatives, which engines and curvature need.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        """Draw the parameters uniformly from -1/sqrt(hidden) to 1/sqrt(hidden), as ``nn.LSTM`` does."""
        super().__init__()
        self.hidden = hidden
        bound = 1 / math.sqrt(hidden)

        def uniform(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))

        self.weight_ih_l0 = uniform(4 * hidden, inputs)
        self.weight_hh_l0 = uniform(4 * hidden, hidden)
        self.bias_ih_l0 = uniform(4 * hidden)
        self.bias_hh_l0 = uniform(4 * hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run over the inputs ``x`` [batch, length, inputs].

        Returns:
            The hidden states h at each position [batch, length, hidden], and the last hidden and cell states (h, c),
            each [batch, hidden]; i, f, g and o are the usual gates.
        """
        # The input part does not depend on the state: one large product over all positions.
        from_input = F.linear(x, self.weight_ih_l0, self.bias_ih_l0 + self.bias_hh_l0)
        h = c = from_input.new_zeros(x.shape[0], self.hidden)
        states = []
        for input_part in from_input.unbind(1):
            i, f, g, o = (input_part + F.linear(h, self.weight_hh_l0)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
        return torch.stack(states, 1), (h, c)
