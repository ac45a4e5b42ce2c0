"""What every model must do: the right output shape, gradients everywhere, and the same values however it is called."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F

from fedflat.models import build, names

# Small samples keep this quick; the sizes are the least that each model takes, or near it.
CASES = {
    "mlp(hidden=8,layers=2)": (2, 3, 4),
    "lenet5": (1, 28, 28),
    "cnn": (3, 16, 16),
    "vgg11": (3, 32, 32),
    "resnet18": (3, 8, 8),
    "resnet20": (1, 8, 8),
    "resnet20(norm=batch)": (3, 8, 8),
    "mobilenetv2(stem=small,width=0.25)": (3, 8, 8),
    "vit-b16(depth=1,width=16,heads=2)": (3, 32, 16),
    "vit-s16(depth=1,width=16,heads=2)": (1, 16, 16),
    "vit-tiny(depth=2,width=12)": (3, 8, 12),
    "femnist-cnn(dropout=false)": (1, 12, 12),
    "char-lstm(hidden=16)": (7,),
    "char-lstm(hidden=16,layers=1,tanh=true)": (7,),
    "bisenetv2(norm=batch,width=0.25,auxiliary=false)": (3, 32, 32),
}
CLASSES = 5
every_model = pytest.mark.parametrize("text", CASES)


def model_of(text, seed=0):
    torch.manual_seed(seed)
    return build(text, CASES[text], CLASSES)


def samples(text, count=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    if text.startswith("char-lstm"):
        return torch.randint(0, CLASSES, (count, *CASES[text]), generator=generator)
    return torch.randn(count, *CASES[text], generator=generator)


def loss_of(logits):
    logits = logits.movedim(1, -1) if logits.ndim == 4 else logits  # a class for each pixel
    wanted = torch.arange(logits[..., 0].numel(), device=logits.device) % CLASSES
    return F.cross_entropy(logits.reshape(-1, CLASSES), wanted)


def test_every_model_is_tested():
    assert {text.split("(")[0] for text in CASES} == set(names())


@every_model
def test_output_shape_and_gradient_of_every_parameter(text):
    expected = (3, *CASES[text], CLASSES) if text.startswith("char-lstm") else (3, CLASSES)
    expected = (*expected, *CASES[text][1:]) if text.startswith("bisenetv2") else expected
    model = model_of(text)
    logits = model(samples(text))
    assert logits.shape == expected
    assert torch.isfinite(logits).all()
    loss_of(logits).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name


@every_model
def test_seed_and_state_determine_the_model(text):
    model, again, other = (model_of(text, seed).eval() for seed in (0, 0, 1))
    first, state = dict(model.named_parameters()), other.state_dict()
    assert all(torch.equal(first[name], parameter) for name, parameter in again.named_parameters())
    assert any(not torch.equal(first[name], parameter) for name, parameter in other.named_parameters())
    torch.testing.assert_close(functional_call(model, state, (samples(text),)), other(samples(text)))


@every_model
def test_vmap_over_clients_equals_a_loop(text):
    # In double precision, because BatchNorm over three single pixels magnifies rounding.
    model, *clients = (model_of(text, seed).double() for seed in (0, 3, 4))
    batches = torch.stack([samples(text, seed=seed) for seed in (5, 6)])
    batches = batches.double() if batches.is_floating_point() else batches

    def loss(parameters, buffers, x):
        return loss_of(functional_call(model, (parameters, buffers), (x,))), buffers

    step = grad(loss, has_aux=True)
    parameters = [{name: p.detach() for name, p in client.named_parameters()} for client in clients]
    # As the engines do: only floating-point buffers travel.
    buffers = [{name: b.clone() for name, b in client.named_buffers() if b.is_floating_point()} for client in clients]
    stacked = [{name: torch.stack([one[name] for one in many]) for name in many[0]} for many in (parameters, buffers)]
    gradients, statistics = vmap(step)(*stacked, batches)
    for index, x in enumerate(batches):
        loss_of(clients[index](x)).backward()
        for name, parameter in clients[index].named_parameters():
            torch.testing.assert_close(gradients[name][index], parameter.grad, rtol=1e-6, atol=1e-10)
        for name in statistics:
            torch.testing.assert_close(statistics[name][index], clients[index].get_buffer(name))


CURVED = [
    "lenet5",
    "resnet20",
    "mobilenetv2(stem=small,width=0.25)",
    "femnist-cnn(dropout=false)",
    "char-lstm(hidden=16)",
]


@pytest.mark.parametrize("text", CURVED)
def test_forward_over_reverse_curvature(text):
    model, x = model_of(text).double(), samples(text, count=2)
    x = x.double() if x.is_floating_point() else x
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(7)
    direction = {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in parameters.items()}

    def gradient(p):
        return grad(lambda q: loss_of(functional_call(model, q, (x,))))(p)

    _, forward = jvp(gradient, (parameters,), (direction,))
    reverse = grad(lambda p: sum((g * direction[name]).sum() for name, g in gradient(p).items()))(parameters)
    for name in parameters:
        torch.testing.assert_close(forward[name], reverse[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("text", [text for text, shape in CASES.items() if len(shape) == 3])
def test_channels_last_gives_the_same(text):
    model, x = model_of(text).eval(), samples(text)
    plain = model(x)
    again = model.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(again, plain, rtol=1e-4, atol=1e-5)


@every_model
def test_nothing_works_in_place_and_only_batch_norm_has_buffers(text):
    with torch.device("meta"):
        model = model_of(text)
    assert not any(getattr(module, "inplace", False) for module in model.modules())
    assert bool(list(model.buffers())) == ("norm=batch" in text)


def test_dropout_only_in_training_and_only_if_enabled():
    torch.manual_seed(0)
    model, x = build("femnist-cnn", (1, 12, 12), CLASSES), samples("femnist-cnn(dropout=false)")
    assert not torch.equal(model(x), model(x))
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.25, 0.5]
    without = build("femnist-cnn(dropout=false)", (1, 12, 12), CLASSES)
    without.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(x), without.train()(x))
