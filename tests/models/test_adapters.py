"""Low-rank adapters, and the text that says which part of a model is trained."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from fedflat.algorithms import algorithm
from fedflat.errors import UserError
from fedflat.models import build, describe_trained, freeze, merge_adapters, trained_parts
from fedflat.models.low_rank import (
    Adapter,
    LowRankLinear,
    adaptable_layers,
    adapter_parameters,
    add_adapters,
    attention_adapters,
)

VIT = "vit-tiny(depth=2,width=12)"


def transformer(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build(VIT, (3, 8, 8), 5)


def trained(model: nn.Module, text: str) -> dict[str, tuple[int, ...]]:
    """The shapes of what a model trains once a text has been applied to it."""
    parts = trained_parts(text)
    for part in parts:
        model = part.extend(model)
    freeze(model, parts)
    return {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}


def shaken(model: nn.Module) -> nn.Module:
    """The model with every adapter away from zero."""
    for name, parameter in model.named_parameters():
        if name in adapter_parameters(model):
            nn.init.normal_(parameter)
    return model


class Apart(nn.Module):
    """Attention whose query, key and value are three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.head = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 4, bias=False),
            nn.Linear(4, 2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.softmax(self.q_proj(x) * self.k_proj(x), -1) * self.v_proj(x))
        return logits


# --- one layer ---


def test_an_adapted_layer_starts_as_the_original() -> None:
    base, x = nn.Linear(6, 9), torch.randn(5, 6)
    before = base(x)
    layer = LowRankLinear(base, rank=2, alpha=16, pieces=3, adapted=(0, 2))
    assert torch.equal(layer(x), before) and layer.weight is base.weight
    assert layer.lora_a_weight.shape == (4, 6) and layer.lora_b_weight.shape == (2, 3, 2)
    assert bool(layer.lora_a_weight.all()) and not layer.lora_b_weight.any()


def test_the_change_is_alpha_over_r_times_b_a_by_hand() -> None:
    base = nn.Linear(2, 2)
    nn.init.zeros_(base.weight)
    nn.init.zeros_(base.bias)
    layer = LowRankLinear(base, rank=1, alpha=3.0)
    with torch.no_grad():
        layer.lora_a_weight.copy_(torch.tensor([[1.0, 2.0]]))
        layer.lora_b_weight.copy_(torch.tensor([[[10.0], [100.0]]]))
    assert layer(torch.tensor([[1.0, 1.0]])).tolist() == [[3 * 10 * 3, 3 * 100 * 3]]
    assert layer.to_linear().weight.tolist() == [[30.0, 60.0], [300.0, 600.0]]


def test_only_the_chosen_pieces_change() -> None:
    """Of query, key and value in one layer, the keys stay as they are."""
    base, x = nn.Linear(4, 12), torch.randn(3, 4)
    before = base(x)
    layer = LowRankLinear(base, 2, 2.0, 3, (0, 2))
    nn.init.normal_(layer.lora_b_weight)
    q, k, v = (layer(x) - before).chunk(3, -1)
    assert not k.any() and bool(q.any()) and bool(v.any())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("pieces", "adapted"), [(1, (0,)), (3, (0, 2)), (3, (1,))])
def test_merged_is_the_same_function(bias: bool, pieces: int, adapted: tuple[int, ...]) -> None:
    layer = LowRankLinear(nn.Linear(5, 6, bias=bias).double(), 3, 7.0, pieces, adapted, residual=bias)
    nn.init.normal_(layer.lora_b_weight)
    if layer.residual_weight is not None:
        nn.init.normal_(layer.residual_weight)
    plain, x = layer.to_linear(), torch.randn(4, 2, 5, dtype=torch.float64)
    assert type(plain) is nn.Linear and set(plain.state_dict()) == ({"weight", "bias"} if bias else {"weight"})
    torch.testing.assert_close(plain(x), layer(x))


# --- models ---


def test_queries_and_values_of_a_transformer() -> None:
    model, x = transformer(), torch.randn(2, 3, 8, 8)
    names, before = set(model.state_dict()), model(x)
    add_adapters(model, attention_adapters(model), rank=2, alpha=4)
    assert set(model.state_dict()) - names == {f"blocks.{i}.attn.qkv.lora_{k}_weight" for i in (0, 1) for k in "ab"}
    assert names < set(model.state_dict()), "weights keep their names"
    torch.testing.assert_close(model(x), before)
    changed = shaken(model)(x)
    assert not torch.allclose(changed, before, atol=1e-3)
    merged = merge_adapters(copy.deepcopy(model))
    assert set(merged.state_dict()) == names and not any(isinstance(m, LowRankLinear) for m in merged.modules())
    torch.testing.assert_close(merged(x), changed, rtol=1e-4, atol=1e-5)
    plain = transformer(1)
    plain.load_state_dict(merged.state_dict())
    assert torch.equal(plain(x), merged(x))


def test_separate_query_and_value_layers() -> None:
    assert attention_adapters(Apart()) == [Adapter("q_proj"), Adapter("v_proj")]
    model = Apart()
    assert trained(model, "lora(rank=3,head=false)") == {
        "q_proj.lora_a_weight": (3, 4),
        "q_proj.lora_b_weight": (1, 4, 3),
        "v_proj.lora_a_weight": (3, 4),
        "v_proj.lora_b_weight": (1, 4, 3),
    }
    shaken(model)(torch.randn(2, 4)).sum().backward()
    assert model.q_proj.weight.grad is None and model.q_proj.lora_b_weight.grad.abs().max() > 0


def test_layers_of_torch_attention_are_not_adapted() -> None:
    """torch's attention modules read the weights of their layers directly: an adapter would have no effect."""
    model = nn.Sequential(
        nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8), nn.MultiheadAttention(4, 2), nn.Linear(4, 2)
    )
    assert adaptable_layers(model) == ["0", "3"]


# --- the text ---


@pytest.mark.parametrize(
    ("model", "text", "names"),
    [
        ("mlp(layers=2)", "all", {f"{n}.{k}" for n in (1, 3, 5) for k in ("weight", "bias")}),
        ("mlp(layers=2)", "head", {"5.weight", "5.bias"}),
        ("mlp(layers=2)", "layers(names=3)+head", {"3.weight", "3.bias", "5.weight", "5.bias"}),
        ("mlp(layers=2)", "layers(names=1.bias|5.bias)", {"1.bias", "5.bias"}),
        (
            "mlp(layers=2)",
            "lora(layers=all)",
            {"1.lora_a_weight", "1.lora_b_weight", "3.lora_a_weight", "3.lora_b_weight", "5.weight", "5.bias"},
        ),
        ("mlp(layers=2)", "lora(layers=1,only_b=true,head=false)", {"1.lora_b_weight"}),
        ("resnet20", "norms", None),
        (VIT, "layers(names=blocks.1|head)", None),
        (VIT, "lora(layers=fc1|blocks.1.attn,head=false)", None),
    ],
)
def test_trained_parameters_of_a_text(model: str, text: str, names: set[str] | None) -> None:
    network = build(model, (3, 8, 8), 5)
    found = trained(network, text)
    if names is not None:
        assert set(found) == names
    elif text == "norms":
        assert len(found) == 2 * 19 and all(len(shape) == 1 for shape in found.values())
    elif text.startswith("layers"):
        assert set(found) == {name for name, _ in network.named_parameters() if name.startswith(("blocks.1.", "head."))}
    else:
        adapted = {name.rpartition(".")[0] for name in found}
        assert adapted == {"blocks.0.mlp.fc1", "blocks.1.mlp.fc1", "blocks.1.attn.qkv", "blocks.1.attn.proj"}
        assert found["blocks.1.attn.qkv.lora_b_weight"] == (1, 36, 8), "a layer that is named is adapted whole"


def test_all_respects_parameters_frozen_by_the_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert set(trained(model, "all")) == {"1.weight", "1.bias"}


def test_numbers_in_the_sentence() -> None:
    model = transformer()
    trained(model, "lora(rank=2)")
    adapters = 2 * (4 * 12 + 2 * 12 * 2)
    every = sum(p.numel() for p in model.parameters())
    assert describe_trained(model) == (
        f"trains {adapters + 13 * 5} of {every:,} parameters, in blocks.0.attn.qkv, blocks.1.attn.qkv and head"
    )
    assert describe_trained(transformer()) == ""
    trained(deep := build("mlp(layers=6)", (4,), 2), "layers(names=1|3|5|7|9|11)")
    assert describe_trained(deep).endswith("in 1, 3, 5, 7 and 2 more")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("heads", "'heads'.*head"),
        ("all+head", r"all\+head .*all alone"),
        ("head+head", r"head\+head .*once"),
        ("lora(rank=0)", "rank=0 is out of range; expected a number at least 1"),
        ("lora(ranks=2)", "lora has no parameter 'ranks'.*rank"),
        ("head(", "cannot read"),
    ],
)
def test_invalid_texts_are_rejected(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        trained_parts(text)


@pytest.mark.parametrize(
    ("model", "shape", "text", "said"),
    [
        ("mlp", (4,), "lora", r"qkv.*1 and 3.*lora\(layers=1\)"),
        ("mlp", (4,), "lora(layers=7)", "linear layer '7'.*1, 3"),
        ("resnet20", (3, 8, 8), "lora(layers=all)", "classifier.*only linear layer"),
        ("mlp", (4,), "layers", r"layers\(names=\.\.\.\) is empty"),
        (VIT, (3, 8, 8), "layers(names=block.1)", "'block.1'.*blocks"),
        ("mlp", (4,), "norms", "this model has no normalisation with parameters"),
    ],
)
def test_missing_parts_are_rejected(model: str, shape: tuple[int, ...], text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        trained(build(model, shape, 2), text)


def test_adapters_need_a_linear_layer() -> None:
    with pytest.raises(UserError, match="no linear layer"):
        trained(nn.Sequential(nn.Conv2d(3, 2, 3)), "lora")


# --- the page ---


def test_the_figures_of_the_page() -> None:
    """Parameters, bytes and states in docs/partial-training.md, from the model and FedMoSWA's declarations."""
    page = (Path(__file__).parents[2] / "docs" / "partial-training.md").read_text(encoding="utf-8")
    table = page.partition("| ViT-B/16 for 200 classes, FedMoSWA |")[2].partition("\n\n")[0].splitlines()[2:]
    moswa = algorithm("fedmoswa")
    assert len(table) == 4
    for row in table:
        text, numbers, sent, kept = (cell.strip(" `") for cell in row.strip("|").split("|"))
        with torch.device("meta"):
            shapes = trained(build("vit-b16", (3, 224, 224), 200), text)
        size = sum(math.prod(shape) for shape in shapes.values())
        assert f"{size:,}" == numbers
        assert moswa.floats_up(size) == moswa.floats_down(size) == 2 * size
        assert float(sent.removesuffix(" MB")) == pytest.approx(2 * 4 * size / 1e6, abs=0.5 if size > 10**7 else 0.05)
        assert float(kept.removesuffix(" MB")) == pytest.approx(4 * size / 1e6, abs=0.5 if size > 10**7 else 0.05)
