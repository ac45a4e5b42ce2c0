"""Settings: groups, duplicates, unknown names and synonyms."""

from __future__ import annotations

from typing import Any

import pytest

from fedflat.errors import UserError
from fedflat.experiment.config import Config, parse_config, setting_names
from fedflat.experiment.make_config import make_config
from fedflat.experiment.run import Run
from fedflat.setting_names import SHORT_NAMES, SYNONYMS

SMALL = {"rounds": 6, "clients": 12, "clients_per_round": 4, "local_steps": 3, "workers": 1, "model": "mlp(hidden=8)"}


def test_a_group_of_settings_is_merged_with_existing_ones() -> None:
    for settings in ({"rounds": 2, "training": {"local_epochs": 3}}, {"training": {"local_epochs": 3}, "rounds": 2}):
        assert (make_config(None, settings).training.rounds, make_config(None, settings).training.local_epochs) == (
            2,
            3,
        )
    kept = make_config(make_config(None, {"rounds": 2, "lr": 0.5}), {"training": {"local_epochs": 3}}).training
    assert (kept.rounds, kept.lr, kept.local_epochs) == (2, 0.5, 3)


def test_short_names_of_validation_and_patience() -> None:
    for config in (
        make_config(None, {"validation": 0.2, "patience": 3}),
        make_config(None, {}, ["validation=0.2", "patience=3"]),
    ):
        assert (config.data.validation, config.stop.patience) == (0.2, 3)


def test_one_setting_under_two_names_is_refused() -> None:
    with pytest.raises(UserError, match=r"training\.rounds is given twice, .*rounds=2 .*training__rounds=3"):
        make_config(None, {"rounds": 2, "training__rounds": 3})
    with pytest.raises(UserError, match=r"training\.rounds is given twice, .*rounds=2 .*training\.rounds=3"):
        make_config(None, {"rounds": 2}, ["training.local_epochs=1", "training.rounds=3"])
    assert (
        make_config(make_config(None, {"rounds": 2}), {"rounds": 3}, ["training.local_epochs=1"]).training.rounds == 3
    )


def test_tf32_without_a_gpu_raises_a_warning() -> None:
    with pytest.warns(UserWarning, match="tf32.* CPU"):
        Run(make_config(None, SMALL | {"engine__precision": "tf32", "device": "cpu"}))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("weighting", "federation__weighting"),
        ("momentum", "training__momentum"),
        ("learning_rate", "lr"),
        ("rate", "lr"),
        ("decay", "lr_decay"),
        ("batch", "batch_size"),
        ("epochs", "local_epochs"),
        ("num_rounds", "rounds"),
        ("per_round", "clients_per_round"),
        ("fraction_fit", "clients_per_round"),
        ("split", "partition"),
        ("split_seed", "data__partition_seed"),
        ("data_folder", "data_dir"),
        ("keep_every", "save_every"),
        ("validation_split", "validation"),
        ("early_stopping", "patience"),
        ("ruonds", "rounds"),
    ],
)
def test_an_unknown_setting_suggests_ours(name: str, meant: str) -> None:
    with pytest.raises(UserError, match=rf"setting '{name}'; did you mean {meant}\b"):
        make_config(None, {name: 1})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"training": {"rate": 0.1}}, "training has no setting 'rate'; did you mean lr"),
        ({"training": {"num_clients": 3}}, r"training has no setting 'num_clients'; did you mean data\.clients"),
        ({"learning_rate": 0.1}, r"unknown setting 'learning_rate'; did you mean training\.lr"),
        ({"data": "digits"}, r"data='digits' .*did you mean data\.dataset"),
        ({"training": 3}, "training=3 .*group of settings"),
        ({"rounds": 3}, r"unknown setting 'rounds'; did you mean training\.rounds"),
        ({"trainin": {"lr": 1}}, r"unknown setting 'trainin\.lr'; did you mean training\.lr"),
        ({"training": {"a": {"b": 1}}}, r"training has no setting 'a\.b'"),
        ({"training": {"romentum": 3}}, "training has no setting 'romentum'; did you mean momentum"),
    ],
)
def test_an_unknown_setting_in_a_file_suggests_our_full_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_config(values)


def test_every_synonym_refers_to_a_setting_and_hides_none() -> None:
    known = {*SHORT_NAMES, *setting_names(), "out"}
    assert set(SYNONYMS.values()) <= known
    assert set(SYNONYMS) & {*SHORT_NAMES, *Config.model_fields} == {"data"}


def test_an_overridden_partition_does_not_inherit_an_unsuitable_number_of_clients() -> None:
    iid = make_config(None, {"clients": 20, "partition": "iid"})
    natural = make_config(iid, {"partition": "natural"})
    assert natural.data.clients is None and make_config(natural, {"partition": "iid"}).data.clients == 50
    assert make_config(iid, {}, ["data.partition=natural"]).data.clients is None
    assert make_config(iid, {"partition": "dirichlet(alpha=1.0)"}).data.clients == 20
    for settings in ({"partition": "natural", "clients": 3}, {"data": {"partition": "natural", "clients": 3}}):
        assert make_config(iid, settings | {"clients_per_round": 3}).data.clients == 3
