"""Sites with their own data and model, which the server never sees."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from fedflat.data import Dataset, Examples, load, standardise
from fedflat.deploy import client_app
from fedflat.deploy.server.app import serve
from fedflat.deploy.trust.identity import normalisation_hash
from fedflat.experiment.store.run_folder import RunFolder

from .direct import SMALL, DirectGrid, node

SIZES = (40, 70, 20)


def data_of(number: int, size: int) -> Dataset:
    """Two separable clouds, shifted at every site."""
    draws = torch.Generator().manual_seed(number)
    targets = torch.arange(size + 10) % 2
    inputs = torch.randn(size + 10, 5, generator=draws) + 2.0 * targets[:, None] - 1.0 + 0.05 * number
    return Dataset(
        f"site {number}",
        Examples(inputs[10:], targets[10:]),
        Examples(inputs[:10], targets[:10]),
        ("a", "b"),
        kind="vector",
    )


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 2)


def settings_of(folder: Path) -> dict[str, Any]:
    return {
        **SMALL,
        "data.clients": 3,
        "data.partition": "iid",
        "deploy.out": str(folder / "run"),
        "training.rounds": 1,
    }


def test_a_site_with_another_class_order_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = settings_of(tmp_path)
    app = client_app(
        lambda number: replace(data_of(number, 40), classes=("b", "a") if number == 1 else ("a", "b")), network
    )
    serve(
        DirectGrid([node(tmp_path, settings, number) for number in range(3)], app), settings, data_of(9, 30), network()
    )
    assert re.search(r"classes is b, a \(\w+\) at the node but a, b \(\w+\) at the server", caplog.text)
    assert '"accepted": [0, 2]' in (tmp_path / "run" / "participation.jsonl").read_text()


def test_a_site_that_standardises_by_its_own_statistics_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {
        **SMALL,
        "data.clients": 2,
        "data.partition": "iid",
        "federation.clients_per_round": 2,
        "deploy.out": str(tmp_path / "run"),
        "training.rounds": 1,
    }
    constants = {"mean": [0.1] * 5, "std": [2.0] * 5}
    in_float32 = {name: np.float32(values).tolist() for name, values in constants.items()}
    app = client_app(lambda number: standardise(data_of(number, 40), **(constants if number else {})), network)
    grid = DirectGrid([node(tmp_path, settings, number) for number in range(2)], app)
    serve(grid, settings, standardise(data_of(9, 30), **in_float32), network())
    assert "site 0 is standardised by the mean and standard deviation of its own training examples" in caplog.text
    assert re.search(r"rejected client 0: normalisation is \w+ at the node but \w+ at the server", caplog.text)
    assert '"accepted": [1]' in (tmp_path / "run" / "participation.jsonl").read_text()


def test_every_constant_of_the_normalisation_counts() -> None:
    data = data_of(0, 40)
    names = ("mean", "std", "target_mean", "target_std")
    hashes = {normalisation_hash(replace(data, **{name: (1.0,) * 5})) for name in names}
    assert len(hashes) == len(names) and "none" not in hashes and normalisation_hash(data) == "none"


def test_sites_train_on_their_own_data(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        **SMALL,
        "algorithm": "scaffold",
        "data.clients": 3,
        "data.partition": "iid",
        "deploy.out": str(tmp_path / "run"),
        "deploy.score": True,
        "training.rounds": 4,
    }
    app = client_app(lambda number: data_of(number, SIZES[number]), network)
    grid = DirectGrid([node(tmp_path, settings, number) for number in range(3)], app)
    record = serve(grid, settings, data_of(9, 30), network())
    assert record.status == "finished"
    assert record.history[-1]["test"]["server"]["accuracy"] >= 0.8
    assert record.config.data.dataset == "custom:site 9"
    hello = [reply.content.config_records["header"] for reply in grid.came if "header" in reply.content]
    assert sorted(header["examples"] for header in hello) == sorted(SIZES)
    scores = (tmp_path / "run" / "sites.json").read_text()
    assert '"examples": 10.0' in scores
    assert not any(
        array.numpy().size > 12
        for m in grid.came
        for record in m.content.array_records.values()
        for array in record.values()
    )


def test_data_of_a_site_may_depend_on_its_node_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of an error, the server learns at most the type but no text, which may contain paths or data."""
    settings = {**settings_of(tmp_path), "data.clients": 4}

    def site_data(number: int, node_config: dict[str, Any]) -> Dataset:
        if number == 3:
            return load(f"arrays(path={tmp_path}/wards.csv)")
        return data_of(number, node_config["size"])

    contexts = [node(tmp_path, settings, number) for number in range(4)]
    for context, size in zip(contexts, SIZES[:2], strict=False):
        context.node_config["size"] = size
    grid = DirectGrid(contexts, client_app(site_data, network))
    serve(grid, settings, data_of(9, 30), network())
    headers = [reply.content.config_records["header"] for reply in grid.came if "header" in reply.content]
    assert {header["examples"] for header in headers if "examples" in header} == set(SIZES[:2])
    assert "rejected client 2: KeyError at the site, whose SuperNode has the details in its log" in caplog.text
    reason = "it cannot load its data; the log of its SuperNode says why"
    assert RunFolder(tmp_path / "run").status()["rejected_nodes"]["client 3"] == reason
    assert f"client 3 cannot load its data (site_data in hooks.py): {tmp_path}/wards.csv does not exist" in caplog.text
