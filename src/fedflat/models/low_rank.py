"""Low-rank adapters (LoRA; Hu et al. 2022), which update a frozen linear layer W:

    y = W x + b + (alpha / r) B A x,    A: r x in, initialised like a linear layer,    B: out x r, initially zero

An adapted model thus starts as the original. Adapted layers keep the names of their weights and gain A and B.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.models.peft_adapters import is_peft_model

QUERY_AND_VALUE = frozenset({"query", "value", "q", "v", "q_proj", "v_proj", "to_q", "to_v", "wq", "wv"})
"""Names of separate query and value layers, which are adapted by default."""
RESIDUAL = "residual_weight"
"""Name of the buffer that keeps averages of adapters exact (FedEx-LoRA)."""


class Adapter(NamedTuple):
    """A layer to adapt.

    Attributes:
        layer: its name in the model.
        pieces: number of equal pieces of its outputs: 3 for a layer that computes query, key and value, else 1.
        adapted: numbers, from 0, of the pieces that get an A and B each.
    """

    layer: str
    pieces: int = 1
    adapted: tuple[int, ...] = (0,)


class LowRankLinear(nn.Linear):
    """A linear layer W x + b with LoRA adapters, which add (alpha / r) B A x, where A has r rows and B r columns.

    The outputs are divided into equal pieces, e.g. query, key and value; each adapted piece has its own A and B.
    """

    residual_weight: Tensor | None

    def __init__(
        self,
        base: nn.Linear,
        rank: int,
        alpha: float,
        pieces: int = 1,
        adapted: tuple[int, ...] = (0,),
        residual: bool = False,
    ) -> None:
        """Adapt the layer ``base``, whose weight and bias are shared, not copied.

        Args:
            base: the layer.
            rank: rank r of A and B.
            alpha: numerator of the scale alpha / r.
            pieces: number of equal pieces of the outputs.
            adapted: numbers, from 0, of the pieces that get an A and B each.
            residual: whether to add a buffer to W, initially zero, which keeps averages of adapters exact.
        """
        nn.Module.__init__(self)  # nn.Linear would allocate another weight
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight = base.weight
        self.register_parameter("bias", base.bias)
        self.rank, self.scale, self.pieces, self.adapted = rank, alpha / rank, pieces, adapted
        # The matrices A of all adapted pieces, stacked, and the matrices B.
        self.lora_a_weight = nn.Parameter(base.weight.detach().new_empty(len(adapted) * rank, self.in_features))
        self.lora_b_weight = nn.Parameter(
            base.weight.detach().new_zeros(len(adapted), self.out_features // pieces, rank)
        )
        nn.init.kaiming_uniform_(self.lora_a_weight, a=math.sqrt(5))
        self.register_buffer(RESIDUAL, torch.zeros_like(base.weight.detach()) if residual else None)

    def forward(self, input: Tensor) -> Tensor:
        """Compute W x + b for inputs x, and add (alpha / r) B A x to each adapted piece of the outputs."""
        products_with_a = torch.split(F.linear(input, self.lora_a_weight), self.rank, -1)
        weight = self.weight if self.residual_weight is None else self.weight + self.residual_weight.to(self.weight)
        outputs = list(F.linear(input, weight, self.bias).chunk(self.pieces, -1))
        for piece, a_x, b in zip(self.adapted, products_with_a, self.lora_b_weight.unbind(0), strict=True):
            outputs[piece] = outputs[piece] + self.scale * F.linear(a_x, b)
        return torch.cat(outputs, -1) if self.pieces > 1 else outputs[0]

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Return (alpha / r) B A [out, in] for A and B of the shapes of ``lora_a_weight`` and ``lora_b_weight``."""
        update = a.new_zeros(self.pieces, self.out_features // self.pieces, self.in_features)
        for piece, a_piece, b_piece in zip(self.adapted, torch.split(a, self.rank), b, strict=True):
            update[piece] = self.scale * b_piece @ a_piece
        return update.flatten(0, 1)

    def to_linear(self) -> nn.Linear:
        """Return the equivalent plain layer, with weight W + (alpha / r) B A and the residual; it shares the bias."""
        plain = nn.Linear.__new__(nn.Linear)  # skips the random initialisation
        nn.Module.__init__(plain)
        plain.in_features, plain.out_features = self.in_features, self.out_features
        weight = self.weight.detach() + self.product(self.lora_a_weight.detach(), self.lora_b_weight.detach())
        if self.residual_weight is not None:
            weight += self.residual_weight
        plain.weight = nn.Parameter(weight, self.weight.requires_grad)
        plain.register_parameter("bias", self.bias)
        return plain.train(self.training)


def adaptable_layers(model: nn.Module) -> list[str]:
    """Return the names of the linear layers inside ``model`` that can be replaced by ``LowRankLinear``."""
    names, excluded_prefixes = [], []
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):
            # These modules read the weights of their layers directly, bypassing an adapter.
            excluded_prefixes.append(f"{name}." if name else "")
        elif name and type(module) in (nn.Linear, LowRankLinear):
            names.append(name)
    return [name for name in names if not name.startswith(tuple(excluded_prefixes))]


def attention_adapters(model: nn.Module) -> list[Adapter]:
    """Choose the query and value layers of attention to adapt, recognised by their names.

    In a joint ``qkv`` layer, these are the first and the last third of the outputs.
    """
    adapters = []
    for name in adaptable_layers(model):
        layer_type = name.rpartition(".")[2]
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if layer_type == "qkv" and layer.out_features % 3 == 0:
            adapters.append(Adapter(name, pieces=3, adapted=(0, 2)))
        elif layer_type in QUERY_AND_VALUE:
            adapters.append(Adapter(name))
    return adapters


def add_adapters(
    model: nn.Module, adapters: Iterable[Adapter], rank: int, alpha: float, residual: bool = False
) -> None:
    """Add low-rank adapters (alpha / r) B A to a model in place; A is drawn from torch's global generator, B is 0.

    Args:
        model: the model.
        adapters: the layers to adapt.
        rank: rank r of A and B.
        alpha: numerator of the scale alpha / r.
        residual: whether the layers get a buffer that keeps averages of adapters exact.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> add_adapters(model, [Adapter("0")], rank=2, alpha=4)
    >>> [name for name, _ in model.named_parameters()]
    ['0.weight', '0.bias', '0.lora_a_weight', '0.lora_b_weight', '2.weight', '2.bias']
    """
    for adapter in adapters:
        base = model.get_submodule(adapter.layer)
        assert isinstance(base, nn.Linear)
        layer = LowRankLinear(base, rank, alpha, adapter.pieces, adapter.adapted, residual)
        model.set_submodule(adapter.layer, layer)


def merge_adapters(model: nn.Module) -> nn.Module:
    """Merge every low-rank adapter into its layer in place, and return the model; of ``peft``, return the base model.

    Other adapters of ``peft``, such as prompts, cannot be merged and stay.
    """
    merge = getattr(model, "merge_and_unload", None) if is_peft_model(model) else None
    if callable(merge):
        base: nn.Module = merge()
        return base
    for name, module in list(model.named_modules()):
        if isinstance(module, LowRankLinear):
            model.set_submodule(name, module.to_linear())
    return model


def adapter_parameters(model: nn.Module, only_b: bool = False) -> set[str]:
    """Return the parameter names of all adapter matrices A and B in a model, or with ``only_b`` of B only."""
    matrices = {"lora_b_weight"} if only_b else {"lora_a_weight", "lora_b_weight"}
    return {name for name, _ in model.named_parameters() if name.rpartition(".")[2] in matrices}
