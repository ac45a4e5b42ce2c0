"""Download progress, and the download of missing datasets."""

from __future__ import annotations

from fedflat.cli.shared.screen import Downloads, fetch_if_missing
from fedflat.experiment.config import Config


def test_one_line_per_file_when_piped(capsys):
    with Downloads() as downloads:
        for done in (10, 20):
            downloads.progress("a.gz", done, 2000)
        downloads.progress("b.gz", 5, None)
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("a.gz (2 kB)") and second.endswith("b.gz")


def test_bars_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Downloads() as downloads:
        for done in (10, 2000):
            downloads.progress("a.gz", done, 2000)
    assert "a.gz" in capsys.readouterr().err


def test_silent_downloads_print_nothing(capsys):
    with Downloads(silent=True) as downloads:
        assert downloads.progress is None


def test_a_run_downloads_a_missing_dataset(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("fedflat.data.fetch", lambda *arguments: asked.append(arguments[:2]))
    fetch_if_missing(Config(data={"dataset": "cifar10", "dir": tmp_path}), silent=True)
    fetch_if_missing(Config(), silent=True)
    fetch_if_missing(Config(data={"dataset": "custom:mine"}), silent=True)
    assert asked == [("cifar10", tmp_path)]
