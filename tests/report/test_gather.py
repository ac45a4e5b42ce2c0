"""Gathered runs: complete, partly copied, and unpaired ones."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import fedflat
from fedflat.errors import UserError
from fedflat.experiment.store.cleanup import find_runs
from fedflat.experiment.store.files import write_atomically
from fedflat.experiment.store.run_collection import forget_order, runs_below, save_order
from fedflat.reporting.comparison import Comparison
from fedflat.reporting.page.document import report_document
from fedflat.reporting.page.gather import gather, group_runs


def test_every_run_below_a_folder_is_found_once(compared):
    gathered = gather([compared, compared / "fedavg", compared / "fedavg" / "seed-0"])
    assert len(gathered.records) == 9
    assert not gathered.left_out
    (group,) = group_runs(gathered.records)
    assert [label for label, _, _ in group.rows] == ["fedavg", "fedmoswa", "fedsam"]
    assert sorted(group.partitions) == [0, 1, 2]
    save_order(compared, [compared / "fedsam" / "seed-0"])
    save_order(compared, [compared / "fedmoswa" / "seed-0"])  # a later comparison in the same folder
    (group,) = group_runs(gather([compared.parent]).records)
    assert [label for label, _, _ in group.rows] == ["fedmoswa", "fedsam", "fedavg"]


def test_links_to_runs_are_followed_but_not_cleaned(compared, tmp_path):
    links = tmp_path / "links"
    links.mkdir()
    (links / "run").symlink_to(compared / "fedavg" / "seed-0")
    (links / "loop").symlink_to(links)
    assert runs_below(links) == [links / "run"]
    with pytest.raises(UserError, match="there are no runs"):
        list(find_runs([links]))


@pytest.mark.parametrize("missing", ["partition.json", "status.json"])
def test_a_half_copied_run_is_left_out_or_refused(compared, missing):
    (compared / "fedsam" / "seed-1" / missing).unlink()
    gathered = gather([compared])
    assert len(gathered.records) == 8
    assert missing in gathered.left_out[0][1]
    with pytest.raises(UserError, match=missing):
        gather([compared / "fedsam" / "seed-1"])
    assert len(gather([compared / "fedsam" / "seed-1", compared / "fedavg"]).records) == 3


def test_incomplete_metrics_are_detected(compared):
    run = compared / "fedsam" / "seed-1"
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text()[:-60])
    for read in (lambda: gather([run]), lambda: fedflat.load(run)):
        with pytest.raises(UserError, match=r"it ends at round 2, but the run finished after 3 rounds"):
            read()
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="it ends at round 0"):
        fedflat.load(run)


def test_a_diverged_run_is_complete(tmp_path):
    run = tmp_path / "run"
    fedflat.run("fedavg(server_lr=1e6)", rounds=4, lr=3, workers=1, device="cpu", out=run)
    status = json.loads((run / "status.json").read_text())
    assert status["status"] == "diverged"
    gathered = gather([run])
    notes = " ".join(note["text"] for note in report_document(gathered)["sections"][0]["notes"])
    assert f"diverged at round {status['rounds']} (the " in notes
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(UserError, match="has lost lines"):
        gather([run])


def test_a_run_without_its_config_is_reported(compared):
    (compared / "fedsam" / "seed-1" / "config.yaml").unlink()
    ((folder, why),) = gather([compared]).left_out
    assert folder.endswith("seed-1")
    assert "no config.yaml" in why


def test_a_partition_without_its_histogram_is_refused(compared):
    run = compared / "fedsam" / "seed-1"
    (run / "partition.json").write_text(json.dumps({"hash": "00"}))
    with pytest.raises(UserError, match="incomplete"):
        gather([run])


def test_a_copied_run_is_counted_once(compared):
    shutil.copytree(compared / "fedavg" / "seed-0", compared / "again")
    gathered = gather([compared])
    assert len(gathered.records) == 9
    assert "repeats" in gathered.left_out[0][1]
    status = compared / "again" / "status.json"
    status.write_text(status.read_text().replace("finished", "paused"))
    gathered = gather([compared / "again", compared])
    assert gathered.left_out[0][0].endswith("again"), "a finished run is preferred to an unfinished one"
    assert "paused" not in [record.status for record in gathered.records]


def test_of_repeated_runs_one_with_flatness_remains(clone):
    plain, saved = (clone("fedavg", 0, [0.1, 0.5], name=name) for name in ("plain", "saved"))
    for repeat in (saved, plain):
        (repeat / "flatness" / "spectrum").mkdir(parents=True)
        assert [record.folder.path for record in gather([plain, saved]).records] == [repeat]
    metrics = (saved / "metrics.jsonl").read_text().splitlines()
    measured = json.dumps(json.loads(metrics[-1]) | {"flatness": {"server": {"lambda_max": 1.0}}})
    (saved / "metrics.jsonl").write_text(f"{metrics[0]}\n{measured}\n")
    gathered = gather([plain, saved])
    assert [record.folder.path for record in gathered.records] == [saved] and "plain" in gathered.left_out[0][0]


def test_missing_runs_and_folders_are_reported(tmp_path):
    with pytest.raises(UserError, match="no runs to report on"):
        gather([tmp_path])
    with pytest.raises(UserError, match="does not exist"):
        gather([tmp_path / "nowhere"])
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"metrics\.jsonl is not a folder; expected a run folder"):
        gather([tmp_path / "metrics.jsonl"])


def test_different_partitions_are_not_paired(clone, compared):
    clone("fedavg", 0, [0.1, 0.2], name="other", data={"partition": "iid"})
    records = gather([compared]).records
    with pytest.raises(UserError, match=r"2 different partitions .*dirichlet.*iid.*--apart"):
        group_runs(records)
    assert len(group_runs(records, apart=True)) == 2


def test_a_title_states_the_share_of_validation_data(clone, compared):
    clone("fedavg", 0, [0.1, 0.2], name="other", data={"validation": 0.1})
    assert any(group.name.endswith("10 % validation") for group in group_runs(gather([compared]).records, apart=True))


@pytest.mark.parametrize("apart", [False, True])
def test_different_partition_hashes_are_not_paired(clone, compared, apart):
    clone("scaffold", 1, [0.1, 0.5, 0.6, 0.7], hash="f" * 64)
    with pytest.raises(UserError, match=r"have seed 1 but different partitions \(hash 00000000 and ffffffff\)"):
        group_runs(gather([compared]).records, apart)


def test_row_labels_show_differing_settings(clone, compared):
    clone("fedavg", 0, [0.1, 0.5, 0.6, 0.7], name="slow", training={"lr": 0.01})
    (group,) = group_runs(gather([compared]).records)
    assert {label for label, _, _ in group.rows} == {
        "fedavg, lr=0.1",
        "fedavg, lr=0.01",
        "fedsam, lr=0.1",
        "fedmoswa, lr=0.1",
    }
    comparison = fedflat.Comparison.load(compared)
    frame = comparison.to_pandas()
    assert frame.groupby(["algorithm", "training.lr"])["seed"].nunique()["fedavg", 0.01] == 1
    assert {row["settings"]["training.lr"] for row in comparison.table()} == {0.1, 0.01}
    assert len(comparison) == 10 and {run.config.training.lr for run in comparison} == {0.1, 0.01}


def test_runs_without_results_do_not_hide_those_of_the_same_server_model(clone, tmp_path):
    begun = clone("fedavg+swa", 0, [0.1, 0.2], status="running", training={"rounds": 3})
    for seed in range(2):
        clone("fedavg", seed, [0.1, 0.5, 0.6, 0.7])
    save_order(tmp_path / "runs", [begun])
    records = gather([tmp_path / "runs"]).records
    (group,) = group_runs(records)
    for (row,) in ([labelled.row for labelled in group.rows], Comparison(records).rows()):
        assert (row.algorithm, len(row.averaged)) == ("fedavg", 2)


def test_execution_settings_do_not_split_rows(clone, compared):
    run = clone("fedavg", 9, [0.1, 0.5, 0.6, 0.7])
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("workers: 1", "workers: 2"))
    (group,) = group_runs(gather([compared]).records)
    assert [len(row.records) for label, row, _ in group.rows if label == "fedavg"] == [4]


def test_comparisons_in_one_folder_that_start_together_keep_both_orders(tmp_path):
    names = [f"algorithm-{number}" for number in range(12)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda name: save_order(tmp_path, [tmp_path / name]), names))
    assert sorted(json.loads((tmp_path / "comparison.json").read_text())["runs"]) == sorted(names)


def test_writers_of_one_file_do_not_mix_their_content(tmp_path):
    """Each reader sees what one of them wrote, and no writer fails."""
    file, contents = tmp_path / "file", [letter * 200_000 for letter in "ab"]
    with ThreadPoolExecutor() as pool:
        writes = [pool.submit(write_atomically, file, content) for content in contents * 20]
        while not all(write.done() for write in writes):
            assert not file.exists() or file.read_text() in contents
        for write in writes:
            write.result()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_comparison_that_did_not_begin_is_forgotten_and_others_are_kept(tmp_path: Path) -> None:
    mine, others = [tmp_path / "out" / "mine"], [tmp_path / "out" / "others"]
    for runs in (mine, others):
        save_order(tmp_path / "out", runs)
    # ``save_order`` keeps only earlier runs that have begun, so ``mine`` is listed again.
    begin(others[0])
    save_order(tmp_path / "out", mine)
    forget_order(tmp_path / "out", mine)
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["runs"] == ["others"]
    begin(mine[0])
    save_order(tmp_path / "out", mine)
    forget_order(tmp_path / "out", mine)
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["runs"] == ["mine", "others"]
    save_order(tmp_path / "new", [tmp_path / "new" / "run"])
    forget_order(tmp_path / "new", [tmp_path / "new" / "run"])
    assert not (tmp_path / "new").exists()


def begin(run: Path) -> None:
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
