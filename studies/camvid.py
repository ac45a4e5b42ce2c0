"""Segment CamVid with ten clients: FedAvg, FedASAM, FedAvg with SWA, and SiLoBN; IoU per class and example predictions.

Examples:
    python studies/camvid.py --data-dir DATA --out results/camvid --device cuda --precision bf16
    python studies/camvid.py --out results/camvid --draw docs/images/camvid.png --page docs/segmentation.md

``numbers.json`` grows by one entry per run. Runs it contains are not repeated, unless the settings differ. Predictions
are saved next to it as arrays, so that the figure can be drawn on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from study import replace_section

import fedflat
from fedflat.data import IGNORED, load
from fedflat.experiment.setup.problem import build_problem
from fedflat.experiment.store.files import write_atomically

BEGIN, END = "<!-- camvid: made by studies/camvid.py -->", "<!-- camvid: end -->"
"""``--page`` replaces the text between these lines of a page."""
SHOWN = 4
"""Frames in the figure."""
COLOURS = (
    "#9ecae8", "#9a6b4f", "#f2b134", "#6d6478", "#c9b6e4", "#3f8f4f",
    "#e4572e", "#8c8c46", "#2f5bb7", "#d81e5b", "#12b5a6",
)  # fmt: skip
"""For sky, building, pole, road, pavement, tree, sign, fence, car, pedestrian, bicyclist. Ignored pixels are black."""


def methods(lr: float, rounds: int) -> dict[str, dict[str, Any]]:
    """Algorithm, extra settings and evaluated model by name (Caldarola et al. 2022, Tables 8, 11, 12).

    SWA captures a model at the end of each of the five cycles in the second half of training.
    """
    cycle = f"cyclic(low={lr / 100:g},length={max(rounds // 10, 1)},start=0.5)"
    swa = f"fedavg+{cycle}+swa(start=0.5,capture_phase=cycle_end)"
    return {
        "FedAvg": {"algorithm": "fedavg+poly", "model": "server", "settings": {}},
        "FedASAM": {"algorithm": "fedasam(rho=0.1,eta=0.2)+poly", "model": "server", "settings": {}},
        "FedAvg + SWA": {"algorithm": swa, "model": "swa", "settings": {"evaluation__statistics": "estimated"}},
        "SiLoBN": {"algorithm": "fedavg+poly", "model": "server", "settings": {"training__statistics": "own"}},
    }


def result_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that all runs share and that determine their results."""
    size = "" if options.size is None else f"(size={options.size})"
    return {
        "dataset": f"camvid{size}",
        "model": f"bisenetv2(width={options.width:g})" if options.width != 1 else "bisenetv2",
        "partition": "iid",
        "clients": options.clients,
        "clients_per_round": options.clients_per_round,
        "rounds": options.rounds,
        "local_epochs": options.local_epochs,
        "batch_size": options.batch_size,
        "lr": options.lr,
        "clip": 10.0,  # without clipping, lr 0.05 diverges within twenty rounds
        "seed": options.seed,
        "augmentation": f"scale-crop(low={options.low:g},high=1.5)+flip",
        "weight_decay": 5e-4,
        "training__momentum": 0.9,
        "eval_every": max(1, options.rounds // 5),
        "evaluation__batch_size": options.eval_batch_size,
    }


def engine_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Where and how runs take place."""
    workers = {} if options.workers is None else {"workers": options.workers}
    precision = {"engine__precision": options.precision}
    return {"data_dir": options.data_dir, "device": options.device, **precision, **workers}


def train(
    name: str, method: dict[str, Any], shared: dict[str, Any], engine: dict[str, Any], out: Path
) -> dict[str, Any]:
    """Train one method, score it per class, and save its predictions for the figure."""
    start = time.monotonic()
    result = fedflat.run(method["algorithm"], **shared, **engine, **method["settings"])
    seconds = time.monotonic() - start
    model = next(name for name in result.record.models if name.startswith(method["model"]))
    scores = result.evaluate(average=model, on=("test", "classes"))
    np.save(out / f"{file_name(name)}.npy", predictions(result, model))
    tests = [(line["round"], line["test"]) for line in result.history]
    return {
        "algorithm": result.config.algorithm,
        "model": model,
        "status": result.status,
        "seconds": round(seconds, 1),
        "test": scores["test"],
        "classes": {label: values["miou"] for label, values in scores["classes"]["each"].items()},
        "curve": [(at, test.get(model, test["server"])["miou"]) for at, test in tests],
    }


def predictions(result: fedflat.Result, name: str) -> np.ndarray:
    """Predicted classes of the figure's frames, uint8 (frames, height, width).

    The forward pass takes a batch spread over the test set, since SiLoBN normalises by the statistics of the batch.
    """
    problem, _ = build_problem(result.config)
    model, test = result.record.models[name], problem.evaluation_sets["test"]
    rows = spread_over(len(test), result.config.evaluation.batch_size)
    buffers = {**problem.buffer_layout.views(model.buffers), **model.integer_buffers}
    logits = problem.predict(model.weights, buffers, test.inputs[rows.to(test.inputs.device)])
    return logits.argmax(1)[shown_rows(len(rows))].to(torch.uint8).cpu().numpy()


def frames(data: fedflat.data.Dataset, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The figure's frames and their masks."""
    rows = spread_over(len(data.test), batch_size)
    examples = data.test.take(rows[shown_rows(len(rows))])
    return examples.inputs.numpy(), examples.targets.numpy()


def spread_over(count: int, batch_size: int) -> torch.Tensor:
    """Evenly spaced rows, at most one batch."""
    return torch.linspace(0, count - 1, min(count, batch_size)).round().long()


def shown_rows(count: int) -> torch.Tensor:
    """The figure's rows of a batch: evenly spaced, without the first and the last."""
    return torch.linspace(0, count - 1, SHOWN + 2).round().long()[1:-1]


def file_name(name: str) -> str:
    """A method's name in lower-case letters and digits."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def table(numbers: dict[str, Any]) -> str:
    """A Markdown table of IoU in per cent."""
    runs = numbers["runs"]
    classes = list(next(iter(runs.values()))["classes"])
    lines = ["| | mIoU | " + " | ".join(classes) + " |", "|---" * (2 + len(classes)) + "|"]
    for name, run in runs.items():
        cells = " | ".join(f"{100 * run['classes'].get(label, float('nan')):.1f}" for label in classes)
        lines.append(f"| {name} | **{100 * run['test']['miou']:.1f}** | {cells} |")
    return "\n".join(lines) + "\n"


def draw(out: Path, path: Path) -> None:
    """Draw frames, masks and the predictions of every method from saved arrays."""
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    numbers = json.loads((out / "numbers.json").read_text())
    images, truth = np.load(out / "images.npy"), np.load(out / "truth.npy")
    palette = np.zeros((256, 3))
    palette[: len(COLOURS)] = [to_rgb(colour) for colour in COLOURS]
    columns: dict[str, np.ndarray] = {"image": images.transpose(0, 2, 3, 1), "truth": palette[truth]}
    for name, run in numbers["runs"].items():
        predicted = np.where(truth == IGNORED, IGNORED, np.load(out / f"{file_name(name)}.npy"))
        columns[f"{name}   {100 * run['test']['miou']:.1f}"] = palette[predicted]
    height, width = truth.shape[1:]
    figure = Figure(figsize=(2.3 * len(columns), 2.3 * len(truth) * height / width + 0.9), layout="constrained")
    panels: Any = figure.subplots(len(truth), len(columns), squeeze=False)
    for row, line in enumerate(panels):
        for axes, (title, pictures) in zip(line, columns.items(), strict=True):
            axes.imshow(pictures[row], interpolation="nearest")
            axes.set_axis_off()
            if row == 0:
                axes.set_title(title, fontsize=10)
    labels = [Patch(color=colour, label=label) for colour, label in zip(COLOURS, numbers["classes"], strict=True)]
    style = {"frameon": False, "fontsize": 8, "handlelength": 1, "columnspacing": 1.2}
    figure.legend(handles=labels, loc="outside lower center", ncols=len(labels), **style)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def section(numbers: dict[str, Any], figure: str) -> str:
    """The part of a page about the runs: settings, table and figure."""
    s = numbers["settings"]
    seconds = sum(run["seconds"] for run in numbers["runs"].values())
    settings = (
        f"All methods train `{s['model']}` on `{s['dataset']}` with {s['clients']} clients of equal size, "
        f"{s['clients_per_round']} per round, for {s['rounds']} rounds of {s['local_epochs']} local epochs. The other "
        f"settings are batch size {s['batch_size']}, learning rate {s['lr']:g}, momentum {s['training__momentum']:g}, "
        f"weight decay {s['weight_decay']:g}, gradients clipped at {s['clip']:g}, augmentation "
        f"`{s['augmentation']}`, seed {s['seed']} and {numbers['precision']}. The runs took {seconds:.0f} s in total, "
        "three at a time. The table shows IoU in percent on the 233 test frames after the last round."
    )
    algorithms = "\n".join(f"- {name}: `{run['algorithm']}`" for name, run in numbers["runs"].items())
    notes = (
        "SiLoBN is FedAvg with `training.statistics=own`: in evaluation it "
        "normalises each test batch with the mean and variance of that batch. For SWA, BatchNorm statistics are "
        "re-estimated for the averaged model."
    )
    image = f"![Frame, truth and prediction of each method]({figure})"
    return f"{settings}\n\n{table(numbers)}\n{algorithms}\n\n{notes}\n\n{image}"


def train_missing(options: argparse.Namespace, path: Path) -> None:
    """Train the methods without numbers, and save each when it has finished."""
    shared, engine = result_settings(options), engine_settings(options)
    numbers = json.loads(path.read_text()) if path.exists() else {}
    if (numbers.get("settings"), numbers.get("precision")) != (shared, options.precision):
        data = load(shared["dataset"], options.data_dir)
        numbers = {"settings": shared, "precision": options.precision, "classes": list(data.classes), "runs": {}}
        for name, array in zip(("images", "truth"), frames(data, options.eval_batch_size), strict=True):
            np.save(options.out / f"{name}.npy", array)
    for name, method in methods(options.lr, options.rounds).items():
        if name not in numbers["runs"] and (not options.only or name in options.only):
            run = numbers["runs"][name] = train(name, method, shared, engine, options.out)
            write_atomically(path, json.dumps(numbers, indent=1) + "\n")
            score = f"mIoU {100 * run['test']['miou']:5.1f}"
            print(f"{name:14} {score}   {run['seconds']:.0f} s   {run['status']}", flush=True)


def main(words: list[str] | None = None) -> None:
    """Run the study, or draw its figure."""
    options = parse_arguments(words)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    path = out / "numbers.json"
    if options.draw is None:
        train_missing(options, path)
    numbers = json.loads(path.read_text())
    write_atomically(out / "table.md", table(numbers))
    figure: Path = options.draw or out / "camvid.png"
    draw(out, figure)
    if options.page is not None:
        text = section(numbers, os.path.relpath(figure, options.page.parent))
        replace_section(options.page, BEGIN, END, text)


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("results/camvid"), help="directory of the numbers (default: %(default)s)")
    add("--data-dir", type=Path)
    add("--rounds", type=int, default=50)
    add("--clients", type=int, default=10)
    add("--clients-per-round", type=int, default=5)
    add("--local-epochs", type=int, default=3)
    add("--batch-size", type=int, default=8)
    add("--lr", type=float, default=0.02)
    add("--seed", type=int, default=0)
    add("--size", type=int, help="height of frames in pixels (default: as stored)")
    add("--width", type=float, default=1.0, help="factor on the network's channels")
    add("--low", type=float, default=0.5, help="smallest scale of the augmentation")
    add("--eval-batch-size", type=int, default=64)
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--precision", default="float32", choices=("float32", "tf32", "bf16"))
    add("--workers", type=int)
    add("--only", nargs="*", help="run only these methods")
    add("--draw", type=Path, metavar="FIGURE", help="only draw this figure, from saved numbers")
    add("--page", type=Path, help="also write table and figure to this page")
    return parser.parse_args(words)


if __name__ == "__main__":
    try:
        main()
    except fedflat.UserError as error:
        raise SystemExit(f"camvid.py: {error}") from None
