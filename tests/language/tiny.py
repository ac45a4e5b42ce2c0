"""A tiny transformer with the calling convention of ``transformers``, and texts of different lengths."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.data import IGNORED_TOKEN, Dataset, Examples

VOCABULARY, LENGTH, WIDTH = 12, 6, 8
SMALL = {"clients": 4, "clients_per_round": 2, "partition": "iid", "batch_size": 4, "local_steps": 2, "lr": 0.1}


@dataclass
class Output:
    """Output object of the model; the loss is not used."""

    logits: Tensor
    loss: Tensor | None = None


class Tiny(nn.Module):
    """One layer of attention and a head: tied to the embedding for tokens, or a linear layer for classes."""

    def __init__(self, classes: int = 0, dropout: float = 0.1) -> None:
        super().__init__()
        self.config = SimpleNamespace(max_position_embeddings=LENGTH, pad_token_id=None)
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, classes or VOCABULARY, bias=False)
        self.is_causal = not classes
        if self.is_causal:
            self.head.weight = self.embedding.weight
        self.register_buffer("position_ids", torch.arange(LENGTH), persistent=False)
        self.register_buffer("scale", torch.tensor(WIDTH**-0.5), persistent=False)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Output:
        x = self.embedding(input_ids) + self.positions(self.position_ids[: input_ids.shape[1]])
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        allowed = mask.bool()[:, None, :].expand(-1, input_ids.shape[1], -1)
        if self.is_causal:
            allowed = allowed.tril()
        x = x + self.dropout(F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1), attn_mask=allowed)) * self.scale
        if not self.is_causal:
            x = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return Output(self.head(x))


def texts(count: int, seed: int = 0) -> Tensor:
    """Tokens of texts of 2 to 7 tokens, padded to 7; each token determines the next."""
    rng = torch.Generator().manual_seed(seed)
    rows = (torch.randint(VOCABULARY, (count, 1), generator=rng) + 5 * torch.arange(LENGTH + 1)) % VOCABULARY
    lengths = torch.randint(2, LENGTH + 2, (count, 1), generator=rng)
    return torch.where(torch.arange(LENGTH + 1) < lengths, rows, IGNORED_TOKEN)


def language(count: int = 24) -> Dataset:
    """Texts for language models: the target of a token is the next one."""
    splits = [Examples(rows[:, :-1].clone(), rows[:, 1:].clone()) for rows in (texts(count), texts(9, seed=1))]
    return Dataset("language", *splits, tuple(map(str, range(VOCABULARY))), kind="text")


def labelled(count: int = 24) -> Dataset:
    """Texts with a label each."""
    splits = [Examples(rows[:, :-1].clone(), rows[:, 0] % 3) for rows in (texts(count), texts(9, seed=1))]
    return Dataset("labelled", *splits, ("a", "b", "c"), kind="text")
