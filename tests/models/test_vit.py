"""Vision transformers against torch's own layers, and weights under the names of timm and of Hugging Face."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedflat.api import make_config
from fedflat.errors import UserError
from fedflat.experiment.run import Run
from fedflat.models import build
from fedflat.models.vit import VisionTransformer
from fedflat.models.vit_weights import convert_weights, resize_positions

SMALL = "vit-tiny(depth=2,width=12)"
IMAGE = (3, 8, 12)


def small(seed: int = 0, image: tuple[int, ...] = IMAGE, classes: int = 5) -> VisionTransformer:
    torch.manual_seed(seed)
    model = build(SMALL, image, classes)
    assert isinstance(model, VisionTransformer)
    return model


# The lists are those of timm's vit_*_patch16_224 and of transformers' ViTForImageClassification, written out by hand.

OUTSIDE = {
    "cls_token": "vit.embeddings.cls_token",
    "pos_embed": "vit.embeddings.position_embeddings",
    "patch_embed.proj.weight": "vit.embeddings.patch_embeddings.projection.weight",
    "patch_embed.proj.bias": "vit.embeddings.patch_embeddings.projection.bias",
    "norm.weight": "vit.layernorm.weight",
    "norm.bias": "vit.layernorm.bias",
    "head.weight": "classifier.weight",
    "head.bias": "classifier.bias",
}
IN_BLOCK = {
    "norm1": "layernorm_before",
    "attn.qkv": None,
    "attn.proj": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}


def timm_keys(depth: int) -> set[str]:
    inside = {
        f"blocks.{block}.{layer}.{kind}" for block in range(depth) for layer in IN_BLOCK for kind in ("weight", "bias")
    }
    return {*OUTSIDE, *inside}


def as_hugging_face(tensors: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    found = {theirs: tensors[timm] for timm, theirs in OUTSIDE.items()}
    for block in range(depth):
        for timm, theirs in IN_BLOCK.items():
            for kind in ("weight", "bias"):
                tensor = tensors[f"blocks.{block}.{timm}.{kind}"]
                prefix = f"vit.encoder.layer.{block}"
                if theirs is None:
                    for name, third in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                        found[f"{prefix}.attention.attention.{name}.{kind}"] = third.clone()
                else:
                    found[f"{prefix}.{theirs}.{kind}"] = tensor
    return found


# --- the network ---


@pytest.mark.parametrize(
    ("text", "side", "depth"), [("vit-b16", 224, 12), ("vit-s16", 224, 12), ("vit-tiny(depth=3)", 32, 3)]
)
def test_tensors_have_timm_names(text: str, side: int, depth: int) -> None:
    with torch.device("meta"):
        model = build(text, (3, side, side), 1000)
    assert set(model.state_dict()) == timm_keys(depth)


def test_shapes_of_the_base_model() -> None:
    with torch.device("meta"):
        shapes = {
            name: tuple(tensor.shape) for name, tensor in build("vit-b16", (3, 224, 224), 200).state_dict().items()
        }
    assert shapes["pos_embed"] == (1, 197, 768) and shapes["cls_token"] == (1, 1, 768)
    assert shapes["patch_embed.proj.weight"] == (768, 3, 16, 16) and shapes["blocks.11.attn.qkv.weight"] == (2304, 768)
    assert shapes["blocks.0.mlp.fc1.weight"] == (3072, 768) and shapes["head.weight"] == (200, 768)


def reference(model: VisionTransformer, images: Tensor, heads: int) -> Tensor:
    """The same network of torch's own layers: linear patches cut by unfold, nn.MultiheadAttention, nn.LayerNorm."""
    w = dict(model.named_parameters())
    width, patch = w["cls_token"].shape[-1], w["patch_embed.proj.weight"].shape[-1]
    cut = F.unfold(images, patch, stride=patch).transpose(1, 2)
    x = cut @ w["patch_embed.proj.weight"].flatten(1).T + w["patch_embed.proj.bias"]
    x = torch.cat([w["cls_token"].expand(len(x), -1, -1), x], 1) + w["pos_embed"]
    for block in range(len(model.blocks)):
        p = {name.removeprefix(f"blocks.{block}."): t for name, t in w.items() if name.startswith(f"blocks.{block}.")}
        attention = nn.MultiheadAttention(width, heads, batch_first=True, dtype=x.dtype)
        attention.in_proj_weight, attention.in_proj_bias = (
            nn.Parameter(p["attn.qkv.weight"]),
            nn.Parameter(p["attn.qkv.bias"]),
        )
        attention.out_proj.weight, attention.out_proj.bias = (
            nn.Parameter(p["attn.proj.weight"]),
            nn.Parameter(p["attn.proj.bias"]),
        )
        y = F.layer_norm(x, (width,), p["norm1.weight"], p["norm1.bias"], 1e-6)
        x = x + attention(y, y, y, need_weights=True)[0]
        y = F.layer_norm(x, (width,), p["norm2.weight"], p["norm2.bias"], 1e-6)
        hidden = y @ p["mlp.fc1.weight"].T + p["mlp.fc1.bias"]
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
        x = x + hidden @ p["mlp.fc2.weight"].T + p["mlp.fc2.bias"]
    return F.layer_norm(x, (width,), w["norm.weight"], w["norm.bias"], 1e-6)[:, 0] @ w["head.weight"].T + w["head.bias"]


def test_it_is_the_network_of_torchs_own_layers() -> None:
    model = small().double()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, so that none can be forgotten
            parameter.add_(0.3 * torch.randn_like(parameter))
    images = torch.randn(4, *IMAGE, dtype=torch.float64)
    torch.testing.assert_close(model(images), reference(model, images, heads=3))


def test_init_is_that_of_timm() -> None:
    torch.manual_seed(0)
    model = build("vit-tiny(depth=1)", (3, 32, 32), 10)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and "patch_embed" not in name:
            assert not parameter.any()
        elif "norm" in name:
            assert bool((parameter == 1).all())
        elif name == "cls_token":
            assert parameter.abs().max() < 1e-5
        elif "patch_embed" not in name:
            assert abs(float(parameter.detach().std()) - 0.02) < 0.001, name


def test_products_with_the_hessian_by_the_plain_kernel() -> None:
    """Both ways agree with each other and with a difference of gradients."""
    model, images = small().double(), torch.randn(3, *IMAGE, dtype=torch.float64)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    direction = {name: torch.randn_like(p) for name, p in weights.items()}
    wanted = torch.arange(3)

    def gradient(at: dict[str, Tensor]) -> dict[str, Tensor]:
        return grad(lambda p: F.cross_entropy(functional_call(model, p, (images,)), wanted))(at)  # type: ignore[no-any-return]

    with sdpa_kernel(SDPBackend.MATH):
        reverse = grad(lambda p: sum((g * direction[name]).sum() for name, g in gradient(p).items()))(weights)
        _, forward = jvp(gradient, (weights,), (direction,))
    step = 1e-5
    ahead, back = (
        gradient({name: p + sign * step * direction[name] for name, p in weights.items()}) for sign in (1, -1)
    )
    for name in weights:
        torch.testing.assert_close(reverse[name], forward[name], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(reverse[name], (ahead[name] - back[name]) / (2 * step), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "image", "said"),
    [
        ("vit-b16", (3, 28, 28), r"patch=16 .*28x28.*vit-b16\(patch=14\)"),
        ("vit-b16", (3, 8, 8), "vit-b16 needs images of at least 16x16 pixels"),
        ("vit-tiny(heads=5)", (3, 32, 32), "vit-tiny: heads=5 does not divide width=192; expected a divisor"),
        ("vit-tiny", (80,), "vit-tiny takes images.*use mlp"),
        ("vit-tiny", (28, 32), r"channel axis, \[n, 1, 28, 32\]: inputs\[:, None\]"),
        ("vit-tiny(patch=0)", (3, 32, 32), "at least 1"),
    ],
)
def test_invalid_patches_are_rejected(text: str, image: tuple[int, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        build(text, image, 10)


# --- weights of others ---


def test_weights_of_hugging_face_become_timms() -> None:
    model, other, images = small(0), small(1), torch.randn(2, *IMAGE)
    theirs = as_hugging_face(dict(model.state_dict()), depth=2)
    assert len(theirs) == 8 + 2 * (2 * 5 + 6) and not theirs.keys() & timm_keys(2)
    found = other.convert_weights(theirs)
    assert found.keys() == timm_keys(2)
    assert not torch.allclose(other(images), model(images), atol=1e-4)
    other.load_state_dict(found)
    assert torch.equal(other(images), model(images))


def test_the_bare_encoder_of_hugging_face_has_no_prefix() -> None:
    theirs = {
        name.removeprefix("vit."): tensor for name, tensor in as_hugging_face(dict(small().state_dict()), 2).items()
    }
    theirs = {name: tensor for name, tensor in theirs.items() if not name.startswith("classifier.")}
    assert small().convert_weights(theirs | {"pooler.dense.bias": torch.zeros(12)}).keys() == (
        timm_keys(2) - {"head.weight", "head.bias"} | {"pooler.dense.bias"}
    )


def test_incomplete_query_key_value_stay_separate() -> None:
    theirs = as_hugging_face(dict(small().state_dict()), 2)
    del theirs["vit.encoder.layer.1.attention.attention.key.weight"]
    found = convert_weights(theirs, (2, 3))
    assert "blocks.1.attn.qkv.weight" not in found
    assert {"blocks.1.attn.query.weight", "blocks.1.attn.value.weight", "blocks.1.attn.qkv.bias"} <= found.keys()


def test_unknown_names_are_left_unchanged() -> None:
    strange = {"decoder.layer.0.weight": torch.zeros(1), "fc_norm.weight": torch.zeros(1)}
    assert convert_weights(strange, (2, 2)).keys() == strange.keys()


def test_a_run_starts_from_a_file_of_hugging_face_or_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    theirs = as_hugging_face(dict(small(image=(1, 16, 16), classes=10).state_dict()), 2)
    settings = {
        "model": SMALL,
        "partition": "iid",
        "workers": 1,
        "device": "cpu",
        "init": tmp_path / "theirs.safetensors",
    }
    save_file(theirs, tmp_path / "theirs.safetensors")
    run = Run(make_config(None, settings))
    found = run.problem.state_dict(*run.server.model)
    assert torch.equal(
        found["blocks.1.attn.qkv.weight"][12:24], theirs["vit.encoder.layer.1.attention.attention.key.weight"]
    )
    assert found["pos_embed"].shape == (1, 1 + 4, 12) and theirs["vit.embeddings.position_embeddings"].shape == (
        1,
        1 + 16,
        12,
    )
    damaged = {name: tensor for name, tensor in theirs.items() if "layer.1" not in name} | {
        "vit.mask_token": torch.zeros(1)
    }
    save_file(damaged, tmp_path / "theirs.safetensors")
    with pytest.raises(UserError) as told:
        Run(make_config(None, settings))
    lacking = "blocks.1.norm1.weight, blocks.1.norm1.bias, blocks.1.attn.qkv.weight, blocks.1.attn.qkv.bias and 8 more"
    for words in (str(tmp_path / "theirs.safetensors"), lacking, "vit.mask_token", SMALL):
        assert words in str(told.value)


def ramp(rows: int, columns: int) -> Tensor:
    """Positions that say how far from the left and from the top the middle of each patch is, each from 0 to 1."""
    down, right = ((torch.arange(count) + 0.5) / count for count in (rows, columns))
    patches = torch.stack(torch.meshgrid(down, right, indexing="ij"), -1).reshape(1, -1, 2)
    return torch.cat([torch.full((1, 1, 2), 7.0), patches], 1)


@pytest.mark.parametrize("grid", [(8, 8), (8, 12), (7, 6), (4, 4)])
def test_positions_keep_their_places_on_another_grid(grid: tuple[int, int]) -> None:
    """A ramp stays a ramp, whatever the grid, but for the rim, where there is nothing to interpolate with."""
    resized = resize_positions(ramp(8, 8), grid)
    rows, columns = grid
    assert resized.shape == (1, 1 + rows * columns, 2) and resized[0, 0].tolist() == [7.0, 7.0]
    inner = (slice(rows // 4, rows - rows // 4), slice(columns // 4, columns - columns // 4))
    found, wanted = (p[0, 1:].unflatten(0, grid)[inner] for p in (resized, ramp(*grid)))
    torch.testing.assert_close(found, wanted, rtol=0, atol=6e-3)


def test_positions_resized_are_torchs_bicubic_interpolation_with_antialiasing() -> None:
    torch.manual_seed(0)
    positions = torch.randn(1, 1 + 36, 5)
    image = positions[0, 1:].T.reshape(1, 5, 6, 6)
    wanted = F.interpolate(image, (3, 4), mode="bicubic", antialias=True)[0].flatten(1).T
    torch.testing.assert_close(resize_positions(positions, (3, 4))[0, 1:], wanted)
    assert resize_positions(positions.bfloat16(), (3, 4)).dtype == torch.bfloat16


@pytest.mark.parametrize(("count", "grid"), [(1 + 36, (6, 6)), (1 + 36, (4, 9)), (1 + 35, (6, 6)), (1, (2, 2))])
def test_positions_that_are_not_resized(count: int, grid: tuple[int, int]) -> None:
    """The same number of patches, or no square grid to start from: the check of shapes says what is wrong."""
    positions = torch.randn(1, count, 3)
    assert torch.equal(resize_positions(positions, grid), positions)
