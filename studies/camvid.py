"""CamVid among ten clients: FedAvg, FedASAM, FedAvg with SWA, and SiLoBN, with IoU per class and a picture of what they see.

python studies/camvid.py --data-dir DATA --out results/camvid --device cuda --precision bf16
python studies/camvid.py --out results/camvid --draw docs/images/camvid.png --page docs/segmentation.md    from what was saved

``numbers.json`` grows by one entry after each run; what it has already is not run again, unless settings differ. Predictions are kept
beside it as arrays, so that the picture can be drawn anywhere.
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

import fedflat
from fedflat.data import IGNORED, load
from fedflat.experiment.setup.problem import federation
from fedflat.experiment.store.atomic_files import write_whole

BEGIN, END = "<!-- camvid: made by studies/camvid.py -->", "<!-- camvid: end -->"
"""Between these lines of a page stands what ``--page`` writes."""
SHOWN = 4
"""Frames in the picture."""
COLOURS = (
    "#9ecae8", "#9a6b4f", "#f2b134", "#6d6478", "#c9b6e4", "#3f8f4f", "#e4572e", "#8c8c46", "#2f5bb7", "#d81e5b", "#12b5a6",
)  # fmt: skip
"""Of sky, building, pole, road, pavement, tree, sign, fence, car, pedestrian, bicyclist; what does not count is black."""


def contestants(lr: float, rounds: int) -> dict[str, dict[str, Any]]:
    """What is run, by name: the algorithm, other settings, and which of its models is meant (Caldarola et al. 2022, tables 8, 11, 12).

    Fifty rounds are few for an average: it takes in a model at the end of each of the second half's five cycles.
    """
    swa = f"fedavg+cyclic(low={lr / 100:g},length={max(rounds // 10, 1)},start=0.5)+swa(start=0.5,capture_phase=cycle_end)"
    return {
        "FedAvg": {"algorithm": "fedavg+poly", "model": "server", "settings": {}},
        "FedASAM": {"algorithm": "fedasam(rho=0.1,eta=0.2)+poly", "model": "server", "settings": {}},
        "FedAvg + SWA": {"algorithm": swa, "model": "swa", "settings": {"evaluation__statistics": "estimated"}},
        "SiLoBN": {"algorithm": "fedavg+poly", "model": "server", "settings": {"training__statistics": "own"}},
    }


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What all runs have in common."""
    size = "" if options.size is None else f"(size={options.size})"
    return {
        "dataset": f"camvid{size}",
        "model": f"bisenetv2(width={options.width:g})" if options.width != 1 else "bisenetv2",
        "partition": "iid",
        "clients": options.clients,
        "clients_per_round": options.clients_per_round,
        "rounds": options.rounds,
        "local_epochs": options.epochs,
        "batch_size": options.batch,
        "lr": options.lr,
        "clip": 10.0,  # without it a rate of 0.05 diverges within twenty rounds
        "seed": options.seed,
        "augmentation": f"scale-crop(low={options.low:g},high=1.5)+flip",
        "weight_decay": 5e-4,
        "training__momentum": 0.9,
        "eval_every": max(1, options.rounds // 5),
        "evaluation__batch_size": options.evaluation_batch,
    }


def where(options: argparse.Namespace) -> dict[str, Any]:
    """What changes nothing but the time that runs take."""
    workers = {} if options.workers is None else {"workers": options.workers}
    return {
        "data_folder": options.data_dir,
        "device": options.device,
        "engine__precision": options.precision,
        **workers,
    }


def run(name: str, what: dict[str, Any], shared: dict[str, Any], here: dict[str, Any], out: Path) -> dict[str, Any]:
    """Train, score by class, and keep what the model sees in some frames."""
    began = time.monotonic()
    result = fedflat.run(what["algorithm"], **shared, **here, **what["settings"])
    model = next(name for name in result.record.models if name.startswith(what["model"]))
    seconds = time.monotonic() - began
    found = result.evaluate(model=model, on=("test", "classes"))
    np.save(out / f"{slug(name)}.npy", predictions(result, model))
    return {
        "algorithm": result.config.algorithm,
        "model": model,
        "status": result.status,
        "seconds": round(seconds, 1),
        "test": found["test"],
        "classes": {label: scores["miou"] for label, scores in found["classes"]["each"].items()},
        "curve": [
            (record["round"], record["test"].get(model, record["test"]["server"])["miou"]) for record in result.history
        ],
    }


def predictions(result: fedflat.Result, name: str) -> np.ndarray:
    """The classes that a model gives to the pixels of the picture's frames, which lie in a batch of frames from all over the test set."""
    problem, _ = federation(result.config)
    model, test = result.record.models[name], problem.held_out["test"]
    rows = torch.linspace(0, len(test) - 1, min(len(test), result.config.evaluation.batch)).round().long()
    buffers = {**problem.buffers.views(model.buffers), **model.integers}
    logits = problem.predicted(model.weights, buffers, test.inputs[rows.to(test.inputs.device)])
    return logits.argmax(1)[shown_of(len(rows))].to(torch.uint8).cpu().numpy()


def frames(data: fedflat.data.Dataset, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """The frames of the picture and their masks."""
    rows = torch.linspace(0, len(data.test) - 1, min(len(data.test), batch)).round().long()
    some = data.test.take(rows[shown_of(len(rows))])
    return some.inputs.numpy(), some.targets.numpy()


def shown_of(count: int) -> torch.Tensor:
    """Which frames of a batch are in the picture: evenly spaced, without the first and the last."""
    return torch.linspace(0, count - 1, SHOWN + 2).round().long()[1:-1]


def slug(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def table(numbers: dict[str, Any]) -> str:
    """The numbers as a table in Markdown, in per cent."""
    runs = numbers["runs"]
    classes = list(next(iter(runs.values()))["classes"])
    lines = ["| | mIoU | " + " | ".join(classes) + " |", "|---" * (2 + len(classes)) + "|"]
    for name, one in runs.items():
        each = " | ".join(f"{100 * one['classes'].get(label, float('nan')):.1f}" for label in classes)
        lines.append(f"| {name} | **{100 * one['test']['miou']:.1f}** | {each} |")
    return "\n".join(lines) + "\n"


def draw(out: Path, picture: Path) -> None:
    """Frame, truth and what each algorithm sees, from what was saved."""
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    numbers = json.loads((out / "numbers.json").read_text())
    images, truth = np.load(out / "images.npy"), np.load(out / "truth.npy")
    palette = np.zeros((256, 3))
    palette[: len(COLOURS)] = [to_rgb(colour) for colour in COLOURS]
    columns: dict[str, np.ndarray] = {"image": images.transpose(0, 2, 3, 1), "truth": palette[truth]}
    for name, one in numbers["runs"].items():
        seen = np.where(truth == IGNORED, IGNORED, np.load(out / f"{slug(name)}.npy"))
        columns[f"{name}   {100 * one['test']['miou']:.1f}"] = palette[seen]
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
    figure.legend(
        handles=labels,
        loc="outside lower center",
        ncols=len(labels),
        frameon=False,
        fontsize=8,
        handlelength=1,
        columnspacing=1.2,
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


def section(numbers: dict[str, Any], picture: str) -> str:
    """What a page says of the runs: how they were made, the table, the picture."""
    s = numbers["settings"]
    seconds = sum(one["seconds"] for one in numbers["runs"].values())
    how = (
        f"`{s['model']}` on `{s['data']}`, {s['clients']} clients of equal size, {s['clients_per_round']} of them in each of {s['rounds']} rounds, "
        f"{s['local_epochs']} epochs of batches of {s['batch_size']}, rate {s['lr']:g}, momentum {s['training__momentum']:g}, weight decay "
        f"{s['weight_decay']:g}, clip {s['clip']:g}, `{s['augmentation']}`, seed {s['seed']}, {numbers['precision']}: "
        f"{seconds:.0f} s for all of them, three of them side by side. "
        "IoU in per cent on the 233 test frames, after the last round."
    )
    texts = "; ".join(f"{name}: `{one['algorithm']}`" for name, one in numbers["runs"].items())
    own = (
        "SiLoBN is FedAvg with `training.statistics=own`, tested by the statistics of each test batch; it trains the weights of FedAvg. "
        "SWA has its BatchNorm statistics estimated anew for the mean of its models."
    )
    return f"{how}\n\n{table(numbers)}\n{texts}. {own}\n\n![Frame, truth and prediction of each algorithm]({picture})"


def put_on(page: Path, text: str) -> None:
    """Replace what stands between the two lines of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{page} has no place for the table; expected the lines {BEGIN} and {END}")
    write_whole(page, f"{before}{BEGIN}\n{text}\n{END}{after}")


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    numbers_file = out / "numbers.json"
    if options.draw is None:
        shared, here = settings_of(options), where(options)
        numbers = json.loads(numbers_file.read_text()) if numbers_file.exists() else {}
        if (numbers.get("settings"), numbers.get("precision")) != (shared, options.precision):
            data = load(shared["data"], options.data_dir)
            numbers = {"settings": shared, "precision": options.precision, "classes": list(data.classes), "runs": {}}
            for name, array in zip(("images", "truth"), frames(data, options.evaluation_batch), strict=True):
                np.save(out / f"{name}.npy", array)
        for name, what in contestants(options.lr, options.rounds).items():
            if name not in numbers["runs"] and (not options.only or name in options.only):
                numbers["runs"][name] = run(name, what, shared, here, out)
                write_whole(numbers_file, json.dumps(numbers, indent=1) + "\n")
                one = numbers["runs"][name]
                print(
                    f"{name:14} mIoU {100 * one['test']['miou']:5.1f}   {one['seconds']:.0f} s   {one['status']}",
                    flush=True,
                )
    numbers = json.loads(numbers_file.read_text())
    write_whole(out / "table.md", table(numbers))
    picture: Path = options.draw or out / "camvid.png"
    draw(out, picture)
    if options.page is not None:
        put_on(options.page, section(numbers, os.path.relpath(picture, options.page.parent)))


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/camvid"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--clients-per-round", type=int, default=5)
    parser.add_argument("--local-epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, help="height of frames in pixels; default: as they are")
    parser.add_argument("--width", type=float, default=1.0, help="factor on the network's channels")
    parser.add_argument("--low", type=float, default=0.5, help="the smallest scale of the augmentation")
    parser.add_argument("--evaluation-batch", type=int, default=64)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--precision", default="float32", choices=("float32", "tf32", "bf16"))
    parser.add_argument("--workers", type=int)
    parser.add_argument("--only", nargs="*", help="some of them, by name")
    parser.add_argument(
        "--draw", type=Path, metavar="PICTURE", help="run nothing; draw this picture from what was saved"
    )
    parser.add_argument("--page", type=Path, help="also put table and picture on this page")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
