"""Measure tokens per second and GPU memory of federated GPT-2, full and LoRA, against a plain transformers loop.

    python studies/gpt2_speed.py OUT                    # GPT-2 with 124 M parameters, 512 tokens, 10 clients
    python studies/gpt2_speed.py OUT --checkpointing    # recompute activations in the backward pass
    python studies/gpt2_speed.py OUT --small            # a tiny model, in seconds on a CPU

fedflat and the plain loop both run local AdamW on every client, on the same batches, and average the models. fedflat's
``precision=bf16`` computes forward and backward passes in bfloat16 and keeps float32 weights. The plain loop uses
autocast, as is common; ``plain-bf16`` casts the whole model, like fedflat. LoRA needs ``peft``; without it, only full
training is measured. Tokens are random, because the cost does not depend on them. Only the last round is timed; earlier
rounds are warm-up. OUT/gpt2_speed.json holds the results.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel
from vit_round import RoundClock

from fedflat.data import Dataset, from_arrays
from fedflat.engines.round.plan import Plan
from fedflat.experiment.make_config import prepare
from fedflat.experiment.run import Run
from fedflat.experiment.store.files import create_folder, write_atomically
from fedflat.papers.document import markdown

WEIGHT_DECAY, LR, SEED = 0.01, 1e-4, 0
CONTENDERS = ("fedflat", "fedflat-1-lane", "plain", "plain-bf16")


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", type=Path, help="directory of the numbers")
    add("--length", type=int, default=512, help="tokens per sequence (default: %(default)s)")
    add("--clients", type=int, default=10, help="clients per round (default: %(default)s)")
    add("--local-steps", type=int, default=4, help="local steps per round (default: %(default)s)")
    add("--batch-size", type=int, default=8, help="sequences per step (default: %(default)s)")
    add("--rounds", type=int, default=3, help="rounds; the last is timed (default: %(default)s)")
    add("--lanes", type=int, default=10, help="clients that fedflat trains at once (default: %(default)s)")
    add("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS, metavar="NAME", help=", ".join(CONTENDERS))
    add("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    add("--small", action="store_true", help="a tiny model and short sequences")
    options = parser.parse_args(words)
    if options.small:
        options.length, options.clients, options.local_steps, options.batch_size = 32, 2, 2, 2
    return options


def gpt2(options: argparse.Namespace, lora: bool) -> nn.Module:
    """GPT-2 with random weights and no dropout, with or without LoRA."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 2} if options.small else {}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **tokens, n_positions=max(options.length, 32)))
    if options.checkpointing:
        # CUDA graphs cannot save the state of the random number generator, which only dropout needs.
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["c_attn"]))
    return model.train()


def random_tokens(options: argparse.Namespace, vocabulary: int) -> Dataset:
    """Random sequences: for each client, those of one round."""
    count = options.clients * options.local_steps * options.batch_size
    rows = torch.randint(vocabulary, (count, options.length + 1), generator=torch.Generator().manual_seed(0))
    parts = [rows[:, :-1].clone(), rows[:, 1:].clone()]
    names = [str(number) for number in range(vocabulary)]
    clients = torch.arange(count) // (options.local_steps * options.batch_size)
    test = [part[: options.batch_size] for part in parts]
    return from_arrays(*parts, *test, name="random tokens", classes=names, train_groups=clients)


def peak_memory() -> float | None:
    """Largest memory that torch has reserved on the GPU since the last call, in GB."""
    if not torch.cuda.is_available():
        return None
    peak = torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return round(peak / 1e9, 2)


class SpeedClock(RoundClock):
    """Times every round, and measures its memory."""

    memory: float | None = None

    def round_done(self, run: Run) -> None:
        super().round_done(run)
        self.memory = peak_memory()


def with_fedflat(options: argparse.Namespace, data: Dataset, lora: bool, lanes: int) -> dict[str, Any]:
    """The last round of fedflat's local AdamW."""
    on_gpu, clock = torch.cuda.is_available(), SpeedClock()
    settings: dict[str, Any] = {
        "partition": "natural",
        "clients": None,
        "clients_per_round": options.clients,
        "rounds": options.rounds,
        "seed": SEED,
        "local_steps": options.local_steps,
        "batch_size": options.batch_size,
        "lr": LR,
        "training__weight_decay": WEIGHT_DECAY,
        "eval_every": options.rounds,
        "evaluation__batch_size": 2,
        "evaluation__examples": 2,
        "workers": 1,
        "engine__lanes": lanes,
        "engine__compile": "off",
        "engine__precision": "bf16" if on_gpu else "float32",
    }
    config, user_objects = prepare("fedavg+adamw", None, data, gpt2(options, lora), "perplexity", settings)
    run = Run(config, **user_objects, callbacks=(clock,))
    record = run.execute()
    lanes_used = len(getattr(run.engine, "lanes", ())) or 1
    return {
        "seconds": clock.times[-1] - clock.times[-2],
        "memory_gb": clock.memory,
        "trained": run.problem.layout.size,
        "loss": record.history[-1]["train_loss"],
        "clients_at_once": lanes_used,
    }


def free_memory() -> float | None:
    """Free what earlier contenders left on the GPU; returns the memory that torch still reserves, in GB.

    torch keeps a cuBLAS workspace for each CUDA stream of a finished run. A workspace of 32 MiB may hold on to a block
    of memory as large as the logits.
    """
    gc.collect()
    if not torch.cuda.is_available():
        return None
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return round(torch.cuda.memory_reserved() / 1e9, 2)


def with_plain_loop(options: argparse.Namespace, data: Dataset, lora: bool, cast: bool) -> dict[str, Any]:
    """The last round of a loop over clients with torch's AdamW; ``cast`` computes in bfloat16 without autocast."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    server = gpt2(options, lora).to(device)
    trained = {name: parameter for name, parameter in server.named_parameters() if parameter.requires_grad}
    client = copy.deepcopy(server)
    own = {name: parameter for name, parameter in client.named_parameters() if parameter.requires_grad}
    computing = copy.deepcopy(client).to(torch.bfloat16) if cast else client
    computed = {name: parameter for name, parameter in computing.named_parameters() if parameter.requires_grad}
    inputs, targets = data.train.inputs.to(device), data.train.targets.to(device)
    plan = Plan(options.batch_size, steps=options.local_steps)
    shard = options.local_steps * options.batch_size  # examples of a client
    seconds, losses = 0.0, []
    for number in range(options.rounds):
        if on_gpu:
            torch.cuda.synchronize()
            peak_memory()
        start, losses = time.monotonic(), []
        total = {name: torch.zeros_like(parameter) for name, parameter in trained.items()}
        for index in range(options.clients):
            with torch.no_grad():
                torch._foreach_copy_(list(own.values()), list(trained.values()))
            optimiser = torch.optim.AdamW(own.values(), LR, weight_decay=WEIGHT_DECAY, fused=on_gpu)
            for positions in plan.batches(SEED, number, index, shard):
                batch = torch.from_numpy(positions + index * shard)
                if cast:
                    with torch.no_grad():
                        torch._foreach_copy_(list(computed.values()), list(own.values()))
                scope = torch.autocast("cuda", torch.bfloat16) if on_gpu and not cast else nullcontext()
                with scope:
                    logits = computing(inputs[batch], use_cache=False).logits
                loss = F.cross_entropy(logits.float().flatten(0, 1), targets[batch].flatten())
                gradients = torch.autograd.grad(loss, list(computed.values()))
                for parameter, gradient in zip(own.values(), gradients, strict=True):
                    parameter.grad = gradient.to(parameter.dtype)
                optimiser.step()
                losses.append(loss.detach())
            with torch.no_grad():
                torch._foreach_add_(list(total.values()), list(own.values()), alpha=1 / options.clients)
        with torch.no_grad():
            torch._foreach_copy_(list(trained.values()), list(total.values()))
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.monotonic() - start
    return {
        "seconds": seconds,
        "memory_gb": peak_memory(),
        "trained": sum(parameter.numel() for parameter in trained.values()),
        "loss": float(torch.stack(losses).mean()),
        "clients_at_once": 1,
    }


def main(words: Sequence[str] | None = None) -> str:
    """Measure every contender, full and with LoRA; returns a table."""
    options = parse_arguments(words)
    create_folder(options.out)
    data = random_tokens(options, 300 if options.small else GPT2Config().vocab_size)
    parts = ("full", "lora") if importlib.util.find_spec("peft") else ("full",)
    functions: dict[str, Callable[[bool], dict[str, Any]]] = {
        "fedflat": lambda lora: with_fedflat(options, data, lora, options.lanes),
        "fedflat-1-lane": lambda lora: with_fedflat(options, data, lora, 1),
        "plain": lambda lora: with_plain_loop(options, data, lora, cast=False),
        "plain-bf16": lambda lora: with_plain_loop(options, data, lora, cast=True),
    }
    about = {name: value for name, value in vars(options).items() if name != "out"}
    about |= {"torch": torch.__version__, "transformers": transformers.__version__}
    about["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    tokens = options.clients * options.local_steps * options.batch_size * options.length
    rows: list[dict[str, Any]] = []
    for part in parts:
        for contender in options.contenders:
            reserved_before = free_memory()
            try:
                measured = functions[contender](part == "lora")
            except Exception as error:  # the others are still worth measuring
                print(f"{contender}, {part}: {type(error).__name__}: {error}", flush=True)
                continue
            row = {"contender": contender, "part": part, "tokens_per_second": tokens / measured["seconds"], **measured}
            row["reserved_before_gb"] = reserved_before
            rows.append(row)
            print(json.dumps(row), flush=True)
            document = {"about": about, "tokens_per_round": tokens, "rows": rows}
            write_atomically(options.out / "gpt2_speed.json", json.dumps(document, indent=1) + "\n")
    heading = ["", "trained part", "trained parameters", "tokens/s", "GPU memory, GB", "clients at once", "loss"]
    cells = []
    for row in rows:
        memory = "–" if row["memory_gb"] is None else f"{row['memory_gb']:.1f}"
        numbers = [f"{row['trained']:,}", f"{row['tokens_per_second']:,.0f}", memory, str(row["clients_at_once"])]
        cells.append([row["contender"], row["part"], *numbers, f"{row['loss']:.3f}"])
    return markdown(heading, cells)


if __name__ == "__main__":
    print(main())
