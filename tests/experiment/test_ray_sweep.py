"""What a sweep asks of the nodes of a Ray cluster; how it runs on one is in tests/cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedflat.data.data_dir import VARIABLE
from fedflat.experiment.campaign.ray_sweep import Needs, Place, Unfit, do_run


@pytest.mark.parametrize(
    ("alive", "resources", "fits"),
    [
        (True, {"CPU": 2.0, "GPU": 1.0}, True),
        (True, {"CPU": 2.0}, False),
        (True, {"CPU": 1.0, "GPU": 4.0}, False),
        (False, {"CPU": 8.0, "GPU": 4.0}, False),
    ],
)
def test_a_node_that_is_alive_and_large_enough_fits(alive: bool, resources: dict[str, float], fits: bool) -> None:
    assert Needs(2, 0.5).fit({"Alive": alive, "Resources": resources}) == fits


def test_a_node_enters_the_folder_that_it_sees_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "marker").write_text("this sweep")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "data"))
    place = Place.here(Path("marker"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv(VARIABLE, "another folder")
    place.enter()
    assert Path.cwd() == tmp_path and os.environ[VARIABLE] == str(tmp_path / "data")
    for wrong in ("another sweep", None):
        (tmp_path / "marker").write_text(wrong) if wrong else (tmp_path / "marker").unlink()
        with pytest.raises(Unfit, match="does not see the sweep's folder"):
            place.enter()


def test_another_version_is_refused_before_anything_of_it_is_read() -> None:
    with pytest.raises(Unfit, match="install the same version on every node"):
        do_run("0.0.0", b"what only that version could read")
