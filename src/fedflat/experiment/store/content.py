"""Checks of the JSON files of a run: each has the values that readers rely on, and all belong to the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Any

from fedflat.data import canonical_partition
from fedflat.errors import UserError
from fedflat.experiment.config import Config
from fedflat.experiment.stopping import ENDED_STATUSES
from fedflat.experiment.store.files import DamagedFile

NUMBER = int | float
STATUSES = ("running", "paused", *ENDED_STATUSES)
_STATUS: dict[str, type | UnionType] = {
    "status": str, "rounds": int, "reason": str, "metric": str, "lower_is_better": bool, "averages": list,
}  # fmt: skip
"""Types of the values in status.json; only ``status`` is always present."""
_PARTITION: dict[str, type | UnionType] = {
    "partitioner": str, "seed": int, "hash": str, "clients": int, "unseen": int, "sizes": dict, "coverage": NUMBER,
    "duplicates": int, "classes_per_client": NUMBER, "heterogeneity": NUMBER, "histogram": list,
}  # fmt: skip
"""Types of the values in partition.json that readers rely on."""


def check_status(path: Path, status: Mapping[str, Any], repair: str) -> None:
    """Raise ``DamagedFile`` unless status.json has a known status and values of the right types.

    Args:
        path: the file.
        status: its content.
        repair: the command that writes it again.
    """
    if status.get("status") not in STATUSES:
        raise DamagedFile(f"{path} has no status; expected one of {', '.join(STATUSES)}; {repair} repairs it")
    for key, value in status.items():
        if not isinstance(value, _STATUS.get(key, object)):
            raise DamagedFile(f"{path} has an invalid value of {key}: {value!r}; {repair} repairs it")


def check_metrics(path: Path, lines: Sequence[dict[str, Any] | None], remedy: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; raises ``DamagedFile`` unless each has scores of the server and a later round.

    Args:
        path: the file.
        lines: one evaluation per line; None for a line that is not one.
        remedy: the end of the error message.
    """
    evaluations: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        problem = ""
        if line is None or not isinstance(line["test"].get("server"), dict):
            problem = "has no round and test"
        elif not all(isinstance(scores, dict) for scores in line["test"].values()):
            problem = "has no scores of a model"
        elif evaluations and line["round"] <= evaluations[-1]["round"]:
            problem = f"is of round {line['round']}, after one of round {evaluations[-1]['round']}"
        if line is None or problem:
            raise DamagedFile(f"{path} is damaged: line {number} {problem}; restore it, {remedy}")
        evaluations.append(line)
    return evaluations


def check_partition(path: Path, partition: Mapping[str, Any], config: Config, remedy: str) -> None:
    """Raise ``DamagedFile`` unless partition.json is complete and describes the partition of the config.

    Args:
        path: the file.
        partition: its content.
        config: the run's config.
        remedy: the end of the error message.
    """
    missing = [key for key, kind in _PARTITION.items() if not isinstance(partition.get(key), kind)]
    sizes, histogram = partition.get("sizes", {}), partition.get("histogram")
    if not missing and not all(isinstance(sizes.get(key), NUMBER) for key in ("min", "max", "median")):
        missing = ["sizes"]
    if not missing and not (histogram and all(isinstance(row, list) and row for row in histogram)):
        missing = ["histogram"]
    if missing:
        raise DamagedFile(f"{path} is incomplete: it has no valid {missing[0]}; restore it, {remedy}")
    data = config.data
    expected: dict[str, Any] = {"seed": config.seed if data.partition_seed is None else data.partition_seed}
    with suppress(UserError):  # the partitioner of a plugin need not be registered in this process
        expected["partitioner"] = canonical_partition(data.partition)
    for key, value in expected.items():
        if partition[key] != value:
            raise DamagedFile(
                f"{path} is of another run: its {key} is {partition[key]}, but that of config.yaml is {value}; "
                f"restore it, {remedy}"
            )


def check_first_round(path: Path, config: Config, history: Sequence[dict[str, Any]], remedy: str) -> None:
    """Raise ``DamagedFile`` if the evaluations begin later than the run, as after deleting metrics.jsonl meanwhile.

    Args:
        path: the file.
        config: the run's config.
        history: the evaluations.
        remedy: the end of the error message.
    """
    if history and history[0]["round"] > config.init_rounds:
        raise DamagedFile(
            f"{path} has lost lines: it begins at round {history[0]['round']}, but the run began at round "
            f"{config.init_rounds}; restore it, {remedy}"
        )


def check_rounds(
    path: Path, config: Config, status: Mapping[str, Any], history: Sequence[dict[str, Any]], remedy: str
) -> None:
    """Raise ``DamagedFile`` if config, status and metrics disagree on the rounds or the metric, as in different runs.

    Args:
        path: the run folder.
        config: the run's config.
        status: content of status.json.
        history: the evaluations.
        remedy: the end of the error message.
    """
    last, limit = history[-1]["round"] if history else config.init_rounds, config.training.rounds
    check_first_round(path / "metrics.jsonl", config, history, remedy)
    if last > limit or (history and history[0]["round"] < config.init_rounds):
        raise DamagedFile(
            f"{path / 'metrics.jsonl'} is of another run: it has round {last}, but config.yaml has rounds "
            f"{config.init_rounds} to {limit}; restore it, {remedy}"
        )
    # The status of a paused run stays as it was while the run is continued.
    if status["status"] in ENDED_STATUSES and "rounds" in status:
        rounds = status["rounds"]
        if status["status"] == "finished" and rounds < limit and rounds == last:
            raise DamagedFile(
                f"{path / 'config.yaml'} was changed: it has {limit} rounds, but the run finished after {rounds}; "
                f"restore training.rounds={rounds}; to train longer, use fedflat branch {path} ALGORITHM --rounds N"
            )
        if not (limit if status["status"] == "finished" else last) <= rounds <= limit:
            raise DamagedFile(
                f"{path / 'status.json'} does not fit the other files: {status['status']} after {rounds} rounds, but "
                f"metrics.jsonl ends at round {last} and config.yaml has {limit} rounds; restore the changed file, or "
                f"delete status.json and use fedflat resume {path}"
            )
        # The round of divergence is not evaluated.
        completed = rounds - 1 if status["status"] == "diverged" else rounds
        if last < config.last_evaluation(completed) or (not history and status["status"] == "finished"):
            raise DamagedFile(
                f"{path / 'metrics.jsonl'} has lost lines: it ends at round {last}, but the run {status['status']} "
                f"after {rounds} rounds; restore it, or copy the run again"
            )
    if history and "metric" in status and status["metric"] not in history[-1]["test"]["server"]:
        raise DamagedFile(
            f"{path / 'metrics.jsonl'} and status.json are of different runs: the metric is {status['metric']}, but "
            f"the test scores are {', '.join(history[-1]['test']['server'])}; restore them, {remedy}"
        )
