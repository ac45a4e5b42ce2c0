"""fedflat bench: seconds per round, against a bound and other simulators."""

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
        help="random (CIFAR-shaped images, no download) or a dataset",
        rich_help_panel=FEDERATION,
    ),
    data_dir: Path | None = typer.Option(
        None, "--data-dir", help="where its files are", show_default=False, rich_help_panel=FEDERATION
    ),
    partition: str = typer.Option("iid", "--partition", help="partition over clients", rich_help_panel=FEDERATION),
    clients: str = typer.Option(
        "100", "--clients", metavar="N,...", help="how many clients there are", rich_help_panel=FEDERATION
    ),
    clients_per_round: int = typer.Option(
        10, "--clients-per-round", min=1, help="clients per round", rich_help_panel=FEDERATION
    ),
    local_steps: int = typer.Option(
        50, "--local-steps", min=1, help="local steps per client", rich_help_panel=FEDERATION
    ),
    batch_size: int = typer.Option(50, "--batch-size", min=1, help="batch size", rich_help_panel=FEDERATION),
    lr: float = typer.Option(0.01, "--lr", help="local learning rate", rich_help_panel=FEDERATION),
    augmentation: str = typer.Option(
        "none", "--augmentation", help="for example crop-flip", rich_help_panel=FEDERATION
    ),
    algorithms: str = typer.Option(
        "fedavg", "--algorithms", metavar="NAME,...", help="comma-separated algorithms", rich_help_panel=MEASURING
    ),
    precision: str = typer.Option(
        "float32",
        "--precision",
        metavar="NAME,...",
        help="comma-separated: float32, tf32, bf16",
        rich_help_panel=MEASURING,
    ),
    engine: str = typer.Option(
        "auto",
        "--engine",
        metavar="NAME,...",
        help="comma-separated: auto, loop, lanes, ray",
        rich_help_panel=MEASURING,
    ),
    compiling: str = typer.Option(
        "auto", "--compile", metavar="WORD", help="on, off, or auto (as in a long run)", rich_help_panel=MEASURING
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
        help="warm-up rounds after the first one, which counts as set-up",
        rich_help_panel=MEASURING,
    ),
    together: int = typer.Option(
        1,
        "--together",
        min=1,
        help="contenders that set up concurrently on a GPU; faster, but set-up times become less meaningful",
        rich_help_panel=MEASURING,
    ),
    against: str = typer.Option(
        "plain,flower,pfl",
        "--against",
        metavar="NAME,...",
        help="comma-separated: plain (a PyTorch loop), flower, pfl; or none",
        rich_help_panel=MEASURING,
    ),
    json_file: Path | None = typer.Option(
        None,
        "--json",
        metavar="FILE.json",
        help="output file for all values; - prints them instead of the table",
        show_default=False,
    ),
    quiet: bool = QUIET,
) -> None:
    """Measure seconds per round against a bound, a plain PyTorch loop and other installed simulators.

    Example: fedflat bench --model lenet5 --local-steps 10 --algorithms fedavg,fedsam --json bench.json
    """
    from fedflat.bench.benchmark import Request, benchmark
    from fedflat.bench.setting import BenchmarkSetting
    from fedflat.experiment.store.files import create_folder, write_whole

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
        create_folder(json_file.parent)  # fail early if the folder cannot be created
    command = shlex.join(["fedflat", *sys.argv[1:]])
    found = benchmark(request, command, lambda line: None if quiet else print(line, file=sys.stderr, flush=True))
    if printed:
        print_json(found)
        return
    print_benchmark(found)
    if json_file is not None:
        write_whole(json_file, json.dumps(found, indent=2) + "\n")


def listed(text: str) -> list[str]:
    """Split at commas outside parentheses.

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
        raise UserError("empty list; expected comma-separated names, e.g. fedavg,fedsam")
    return list(dict.fromkeys(found))


def numbers(text: str) -> list[int]:
    """Parse comma-separated integers.

    >>> numbers("100,1_000_000")
    [100, 1000000]
    """
    try:
        found = [int(word) for word in listed(text)]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UserError(f"cannot read --clients '{text}'; expected comma-separated numbers of at least 1")
    return found


def print_benchmark(found: dict[str, Any]) -> None:
    """Print the table of a benchmark and its environment."""
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
                "measured": f"{found['rounds']} rounds after one set-up and {found['warm_up']} warm-up rounds; medians",
                "on": where,
                "with": ", ".join(f"{name} {version}" for name, version in versions.items()),
                **({"notes": "\n".join(found["notes"])} if found["notes"] else {}),
            }
        )
    )


def _title(found: dict[str, Any]) -> str:
    s = found["setting"]
    work = f"{s['clients_per_round']} clients x {s['local_steps']} steps x batch {s['batch_size']}"
    return f"{s['model']} on {s['dataset']}, {work}, augmentation {s['augmentation']}"


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
