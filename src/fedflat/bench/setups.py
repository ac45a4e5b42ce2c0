"""The set-ups of benchmarks that other simulators have published."""

from __future__ import annotations

from typing import Any

SETUPS: dict[str, dict[str, Any]] = {
    # Clients of 50 images, one local epoch; with dropout, as in pfl's own network.
    "pfl": {
        "model": "femnist-cnn",
        "clients": "1000",
        "clients_per_round": 50,
        "local_steps": 5,
        "batch_size": 10,
        "lr": 0.1,
    },
    # Clients of 500 images, 5 local epochs; the network of PyTorch's CIFAR-10 tutorial.
    "blazefl": {
        "model": "lenet5",
        "clients": "100",
        "clients_per_round": 100,
        "local_steps": 50,
        "batch_size": 50,
        "lr": 0.1,
    },
    # Clients of 6,250 images, 4 local epochs of 98 steps; a simpler network with NVFlare's 3.5 million parameters.
    "nvflare": {
        "model": "mlp(hidden=1135)",
        "clients": "8",
        "clients_per_round": 8,
        "local_steps": 392,
        "batch_size": 64,
        "lr": 0.05,
    },
}
"""Values of options of ``fedflat bench``, by name; the data is CIFAR-10 or has its shape and size."""
