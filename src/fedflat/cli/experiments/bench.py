"""fedflat bench: how fast a round is, against the bound and against others."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.shared.flags import QUIET
from fedflat.cli.shared.screen import facts, print_json, screen, shown_bytes, shown_count, shown_seconds, table
from fedflat.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

FEDERATION, MEASURING = "What a round is", "What is measured"


def bench(
    model: str = typer.Option("cnn", "--model", help="model, as name(parameter=value)", rich_help_panel=FEDERATION),
    data: str = typer.Option(
        "random",
        "--dataset",
        help="random (images of CIFAR's shape, no download), or a dataset by name",
        rich_help_panel=FEDERATION,
    ),
    data_dir: Path | None = typer.Option(
        None, "--data-dir", help="where its files are", show_default=False, rich_help_panel=FEDERATION
    ),
    partition: str = typer.Option(
        "iid", "--partition", help="how examples are spread over clients", rich_help_panel=FEDERATION
    ),
    clients: str = typer.Option(
        "100", "--clients", metavar="N,...", help="how many clients there are", rich_help_panel=FEDERATION
    ),
    clients_per_round: int = typer.Option(
        10, "--clients-per-round", min=1, help="clients that train in a round", rich_help_panel=FEDERATION
    ),
    local_steps: int = typer.Option(
        50, "--local-steps", min=1, help="local steps of each of them", rich_help_panel=FEDERATION
    ),
    batch_size: int = typer.Option(50, "--batch-size", min=1, help="batch size", rich_help_panel=FEDERATION),
    lr: float = typer.Option(0.01, "--lr", help="local learning rate", rich_help_panel=FEDERATION),
    augmentation: str = typer.Option(
        "none", "--augmentation", help="for example crop-flip", rich_help_panel=FEDERATION
    ),
    algorithms: str = typer.Option(
        "fedavg", "--algorithms", metavar="NAME,...", help="algorithms, joined by commas", rich_help_panel=MEASURING
    ),
    precision: str = typer.Option(
        "float32",
        "--precision",
        metavar="NAME,...",
        help="float32, tf32, bf16, joined by commas",
        rich_help_panel=MEASURING,
    ),
    engine: str = typer.Option(
        "auto",
        "--engine",
        metavar="NAME,...",
        help="auto, loop, lanes, ray, joined by commas",
        rich_help_panel=MEASURING,
    ),
    compiling: str = typer.Option(
        "auto", "--compile", metavar="WORD", help="on, off, or auto: as in a long run", rich_help_panel=MEASURING
    ),
    device: str = typer.Option("auto", "--device", help="auto, cpu or cuda", rich_help_panel=MEASURING),
    workers: int | None = typer.Option(
        None,
        "--workers",
        min=1,
        help="worker processes of the loop and ray engines",
        show_default=False,
        rich_help_panel=MEASURING,
    ),
    rounds: int = typer.Option(10, "--rounds", min=1, help="rounds that are measured", rich_help_panel=MEASURING),
    warm_up: int = typer.Option(
        2,
        "--warm-up",
        min=0,
        help="rounds before them, beside the first one, which counts as set-up",
        rich_help_panel=MEASURING,
    ),
    together: int = typer.Option(
        1,
        "--together",
        min=1,
        help="contenders that set up at the same time on a GPU, where it has room: sooner done, but set-up times count for less",
        rich_help_panel=MEASURING,
    ),
    against: str = typer.Option(
        "plain,flower,pfl",
        "--against",
        metavar="NAME,...",
        help="plain (a loop in PyTorch), flower, pfl, joined by commas, or none",
        rich_help_panel=MEASURING,
    ),
    json_file: Path | None = typer.Option(
        None,
        "--json",
        metavar="FILE.json",
        help="where all figures go; - prints them instead of the table",
        show_default=False,
    ),
    quiet: bool = QUIET,
) -> None:
    """Measure how long a round takes, against the bound, a plain PyTorch loop, and other simulators that are installed.

    Example: fedflat bench --model lenet5 --local-steps 10 --algorithms fedavg,fedsam --json bench.json
    """
    from fedflat.bench.benchmark import Request, benchmark
    from fedflat.bench.setting import BenchmarkSetting
    from fedflat.experiment.store.atomic_files import create_folder, write_whole

    setting = BenchmarkSetting(
        model,
        data,
        data_dir,
        partition,
        clients_per_round,
        local_steps,
        batch_size,
        lr,
        augmentation,
        device,
        compiling,
        workers,
    )
    request = Request(
        setting,
        listed(algorithms),
        listed(precision),
        listed(engine),
        numbers(clients),
        listed(against),
        rounds,
        warm_up,
        together,
    )
    printed = json_file is not None and str(json_file) == "-"
    if json_file is not None and not printed:
        create_folder(json_file.parent)  # first, so that nobody measures for nothing
    command = shlex.join(["fedflat", *sys.argv[1:]])
    found = benchmark(request, command, lambda line: None if quiet else print(line, file=sys.stderr, flush=True))
    if printed:
        print_json(found)
        return
    print_benchmark(found)
    if json_file is not None:
        write_whole(json_file, json.dumps(found, indent=2) + "\n")


def listed(text: str) -> list[str]:
    """The parts of a text that commas divide, where these are not within parentheses.

    >>> listed("fedavg,fedavg+wima(window=3,start=1), fedsam")
    ['fedavg', 'fedavg+wima(window=3,start=1)', 'fedsam']
    """
    parts, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    found = [part.strip() for part in parts if part.strip()]
    if not found:
        raise UserError("a list is empty; expected names joined by commas, for example fedavg,fedsam")
    return list(dict.fromkeys(found))


def numbers(text: str) -> list[int]:
    """Whole numbers joined by commas.

    >>> numbers("100,1_000_000")
    [100, 1000000]
    """
    try:
        found = [int(word) for word in listed(text)]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UserError(f"cannot read --clients '{text}'; expected numbers of at least 1, joined by commas")
    return found


def print_benchmark(found: dict[str, Any]) -> None:
    """The table of a benchmark, and what it was measured on."""
    console = screen()
    console.print()
    console.print(_title(found), style="bold")
    console.print(_table(found))
    console.print()
    hardware, versions = found["hardware"], found["versions"]
    where = f"{', '.join(hardware['gpus']) or hardware['processor']}, {hardware['cores']} cores"
    console.print(
        facts(
            {
                "measured": f"{found['rounds']} rounds after a first one and {found['warm_up']} to warm up; medians",
                "on": where,
                "with": ", ".join(f"{name} {version}" for name, version in versions.items()),
                **({"notes": "\n".join(found["notes"])} if found["notes"] else {}),
            }
        )
    )


def _title(found: dict[str, Any]) -> str:
    s = found["setting"]
    return f"{s['model']} on {s['dataset']}, {s['clients_per_round']} clients x {s['local_steps']} steps x batch {s['batch_size']}, augmentation {s['augmentation']}"


def _table(found: dict[str, Any]) -> Table:
    rows, on_gpu = found["rows"], any(row["peak_device_bytes"] for row in found["rows"])
    several = len({row["clients"] for row in rows}) > 1
    columns = [
        "",
        "algorithm",
        "precision",
        "engine",
        *(["clients"] if several else []),
        "s/round",
        "samples/s",
        "share of\nbound",
    ]
    columns += ["times\nplain loop", "set-up", *(["GPU memory"] if on_gpu else []), "memory"]
    lines = []
    for row in rows:
        share, times = row["share_of_bound"], row["times_plain"]
        line = [
            row["contender"],
            row["algorithm"],
            row["precision"],
            row["engine"],
            *([shown_count(row["clients"])] if several else []),
        ]
        line += [f"{row['seconds_per_round']:.4g}", shown_count(row["samples_per_second"])]
        line += [None if share is None else f"{100 * share:.0f} %", None if times is None else f"{times:.2f}"]
        line += [shown_seconds(row["set_up_seconds"]), *([shown_bytes(row["peak_device_bytes"])] if on_gpu else [])]
        lines.append([*line, shown_bytes(row["peak_host_bytes"])])
    return table(columns, lines, numbers=columns[4:])
