"""Draw docs/images/realworld.png from the runs of docs/realworld.md, and print the accuracies of its table.

python docs/realworld.py FOLDER      FOLDER contains the run folders femnist, shakespeare, pacs-photo, ...
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from fedflat.api import load
from fedflat.data import load as load_data
from fedflat.reporting.figures.style import COLOURS
from fedflat.reporting.tables.summary import series

HERE = Path(__file__).parent
PANELS = {
    "FEMNIST, by writer": ("femnist",),
    "Shakespeare, by character": ("shakespeare",),
    "PACS, held-out domain": ("pacs-art_painting", "pacs-cartoon", "pacs-photo", "pacs-sketch"),
}


def most_frequent(name: str) -> float:
    """Accuracy of always predicting the most frequent class of the test set."""
    data = load_data(name)
    counts = torch.bincount(data.test.targets.flatten(), minlength=data.num_classes)
    return float(counts.max() / counts.sum())


def main(runs: Path) -> None:
    """Draw one panel per dataset and print, per run: name, chance, first and final accuracy (%), examples, rounds."""
    figure = Figure(figsize=(11, 3.7), layout="constrained")
    panels: Any = figure.subplots(1, len(PANELS))
    for axes, (title, names) in zip(panels, PANELS.items(), strict=True):
        for name, colour in zip(names, COLOURS, strict=False):
            result = load(runs / name)
            rounds, values = zip(*series(result.history, "server", "accuracy"), strict=True)
            chance = most_frequent(result.config.data.dataset)
            label = name.partition("-")[2].replace("_", " ") or "fedavg"
            percent = [100 * value for value in values]
            axes.plot(rounds, percent, color=colour, lw=1.8, label=f"{label}   {percent[-1]:.1f}")
            chance_label = f"most frequent class   {100 * chance:.1f}" if name == "femnist" else None
            axes.axhline(100 * chance, color=colour, lw=1, ls=":", label=chance_label)
            test = result.evaluate(on="test")["test"]
            accuracies = f"{100 * chance:6.1f} {percent[0]:6.1f} {100 * test['accuracy']:6.1f}"
            print(f"{name:18} {accuracies} {test['examples']:7} {rounds[-1]:4}")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("communication round")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="center right" if len(names) == 1 else "lower right")
    panels[0].set_ylabel("test accuracy (%)")
    figure.savefig(HERE / "images" / "realworld.png", dpi=150)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
