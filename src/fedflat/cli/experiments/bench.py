"""fedflat bench: seconds per round, compared with a bound and other simulators."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.shared.completion import complete_algorithm, complete_dataset, complete_model, complete_partition
from fedflat.cli.shared.flags import JSON, QUIET, no_default
from fedflat.cli.shared.screen import key_values, print_json, screen, shown_bytes, shown_count, shown_seconds, table
from fedflat.errors import UserError, one_of

if TYPE_CHECKING:
    from fedflat.cli.shared.screen_table import ScreenTable

_round_option = partial(typer.Option, rich_help_panel="The federation")
_measure_option = partial(typer.Option, rich_help_panel="Measurement")


def bench(
    context: typer.Context,
    setup: str | None = _round_option(
        None,
        "--setup",
        metavar="NAME",
        help="published set-up of another simulator: pfl, blazefl or nvflare; other options override it",
        show_default=False,
    ),
    model: str = _round_option("cnn", "--model", help="model, as name(parameter=value)", autocompletion=complete_model),
    dataset: str = _round_option(
        "random",
        "--dataset",
        help="random (CIFAR-shaped images, no download) or a dataset",
        autocompletion=complete_dataset,
    ),
    data_dir: Path | None = _round_option(None, "--data-dir", help="dataset folder", show_default=False),
    partition: str = _round_option(
        "iid", "--partition", help="partition over clients", autocompletion=complete_partition
    ),
    clients: str = _round_option("100", "--clients", metavar="N,...", help="comma-separated numbers of clients"),
    clients_per_round: int = _round_option(10, "--clients-per-round", min=1, help="clients per round"),
    local_steps: int = _round_option(50, "--local-steps", min=1, help="local steps per client"),
    batch_size: int = _round_option(50, "--batch-size", min=1, help="batch size"),
    lr: float = _round_option(0.01, "--lr", help="local learning rate"),
    augmentation: str = _round_option("none", "--augmentation", help="for example crop-flip"),
    algorithms: str = _measure_option(
        "fedavg",
        "--algorithm",
        metavar="NAME,...",
        help="comma-separated algorithms",
        autocompletion=complete_algorithm,
    ),
    precision: str = _measure_option(
        "auto",
        "--precision",
        metavar="NAME,...",
        help="comma-separated: float32, tf32, bf16; auto: as in a run, but float32 next to other simulators",
    ),
    engine: str = _measure_option(
        "auto", "--engine", metavar="NAME,...", help="comma-separated: auto, loop, lanes, ray"
    ),
    compile: str = _measure_option("auto", "--compile", metavar="WORD", help="on, off, or auto (as in a long run)"),
    device: str = _measure_option("auto", "--device", help="auto, cpu or cuda"),
    workers: int | None = _measure_option(
        None, "--workers", min=1, help="worker processes of the loop and ray engines", show_default=False
    ),
    rounds: int = _measure_option(10, "--rounds", min=1, help="number of measured rounds"),
    warm_up: int = _measure_option(
        2, "--warm-up", min=0, help="warm-up rounds after the first one, which counts as set-up"
    ),
    together: int = _measure_option(
        1,
        "--together",
        min=1,
        help="contenders that set up concurrently on a GPU; faster, but set-up times become less meaningful",
    ),
    against: str = _measure_option(
        "plain",
        "--against",
        metavar="NAME,...",
        help="comma-separated: plain (a PyTorch loop), flower, pfl, fedjax, blazefl, nvflare, fluke; or none",
    ),
    peer_dir: Path | None = _measure_option(
        None,
        "--peer-dir",
        help="folder for the simulators' environments, installed on first use with pip "
        "[default: fedflat/peers in the user's cache]",
        show_default=False,
    ),
    out: Path | None = no_default("--out", "also write all values to this file", metavar="FILE.json"),
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Measure seconds per round, and compare with a lower bound, a plain PyTorch loop and other simulators.

    The bound is the time of the gradient steps alone, on the batches of all clients of a round at once.

    Example: fedflat bench --model lenet5 --local-steps 10 --algorithm fedavg,fedsam --out bench.json
    """
    from fedflat.bench.benchmark import benchmark
    from fedflat.bench.request import Request
    from fedflat.bench.setting import BenchmarkSetting
    from fedflat.bench.setups import SETUPS
    from fedflat.experiment.store.files import create_folder, write_atomically

    values: dict[str, Any] = {"model": model, "clients": clients, "clients_per_round": clients_per_round}
    values |= {"local_steps": local_steps, "batch_size": batch_size, "lr": lr}
    if setup is not None:
        if setup not in SETUPS:
            raise one_of("setup", setup, tuple(SETUPS))
        given = {name for name in values if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"}
        values |= {name: value for name, value in SETUPS[setup].items() if name not in given}
    client_counts = split_counts(str(values.pop("clients")))
    setting = BenchmarkSetting(
        **values,
        dataset=dataset,
        data_dir=data_dir,
        partition=partition,
        augmentation=augmentation,
        device=device,
        compile=compile,
        workers=workers,
    )
    optional = {} if peer_dir is None else {"peer_dir": peer_dir}
    request = Request(
        setting,
        algorithms=split_names(algorithms),
        precisions=split_names(precision),
        engines=split_names(engine),
        clients=client_counts,
        against=split_names(against),
        rounds=rounds,
        warm_up=warm_up,
        concurrent_setups=together,
        **optional,
    )

    def print_progress(line: str) -> None:
        if not (quiet or as_json):
            print(line, file=sys.stderr, flush=True)

    if out is not None:
        create_folder(out.parent)  # fail early if the folder cannot be created
    command_line = shlex.join(["fedflat", *sys.argv[1:]])  # stored with the results
    document = benchmark(request, command_line, print_progress)
    if out is not None:
        write_atomically(out, json.dumps(document, indent=2) + "\n")
    if as_json:
        print_json(document)
    else:
        print_benchmark(document)


def split_names(text: str) -> list[str]:
    """Split at commas outside parentheses; repeated names are dropped.

    >>> split_names("fedavg,fedavg+wima(window=3,start=1), fedsam")
    ['fedavg', 'fedavg+wima(window=3,start=1)', 'fedsam']
    """
    parts, depth = [""], 0
    for character in text:
        if character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    names = [part.strip() for part in parts if part.strip()]
    if not names:
        raise UserError("empty list; expected comma-separated names, e.g. fedavg,fedsam")
    return list(dict.fromkeys(names))


def split_counts(text: str) -> list[int]:
    """Parse ``--clients``: comma-separated positive integers.

    >>> split_counts("100,1_000_000")
    [100, 1000000]
    """
    try:
        counts = [int(word) for word in split_names(text)]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UserError(f"cannot read --clients '{text}'; expected comma-separated numbers of at least 1")
    return counts


def print_benchmark(document: dict[str, Any]) -> None:
    """Print the table of a benchmark, and below it the hardware, versions and notes."""
    console, setting, hardware = screen(), document["setting"], document["hardware"]
    work = "{clients_per_round} clients x {local_steps} steps x batch {batch_size}".format(**setting)
    title = f"{setting['model']} on {setting['dataset']}, {work}, augmentation {setting['augmentation']}"
    console.print()
    console.print(title, style="bold")
    console.print(_benchmark_table(document["rows"]))
    console.print()
    environment = {
        "measured": f"{document['rounds']} rounds after one set-up and {document['warm_up']} warm-up rounds; medians",
        "on": f"{', '.join(hardware['gpus']) or hardware['processor']}, {hardware['cores']} cores",
        "with": _shown_versions(document["versions"]),
    }
    for row in document["rows"]:
        if row["versions"]:
            environment[row["contender"]] = _shown_versions(row["versions"])
    if document["notes"]:
        environment["notes"] = "\n".join(document["notes"])
    console.print(key_values(environment))


def _shown_versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _benchmark_table(rows: list[dict[str, Any]]) -> ScreenTable:
    """Return a table with one row per contender.

    A contender is an engine of fedflat, the plain loop, another simulator, or the lower bound on the time of a round.

    The number of clients has a column only if it varies, CPU time only if it is known, and GPU memory only if any was
    used.
    """

    def column(key: str, shown: Callable[[Any], object]) -> list[object]:
        """Return the cells of a column; None stays None."""
        return [None if row[key] is None else shown(row[key]) for row in rows]

    texts = {"": "contender", "algorithm": "algorithm", "precision": "precision", "engine": "engine"}
    columns = {title: [row[key] for row in rows] for title, key in texts.items()}
    if len({row["clients"] for row in rows}) > 1:
        columns["clients"] = column("clients", shown_count)
    columns["s/round"] = column("seconds_per_round", "{:.4g}".format)
    if any(row["cpu_seconds_per_round"] is not None for row in rows):
        columns["CPU\ns/round"] = column("cpu_seconds_per_round", "{:.4g}".format)
    columns["samples/s"] = column("samples_per_second", shown_count)
    # Both are times divided by that of the row: the time of the bound, and the time of the plain loop.
    columns["share of\nbound"] = column("share_of_bound", lambda share: f"{100 * share:.0f} %")
    columns["speed-up over\nplain loop"] = column("times_plain", "{:.2f}".format)
    columns["loss"] = column("loss", "{:.4f}".format)
    columns["set-up"] = column("set_up_seconds", shown_seconds)
    if any(row["peak_device_bytes"] for row in rows):
        columns["GPU memory"] = column("peak_device_bytes", shown_bytes)
    columns["memory"] = column("peak_host_bytes", shown_bytes)
    return table(columns, zip(*columns.values(), strict=True), numeric=columns.keys() - texts.keys())
