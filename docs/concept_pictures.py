"""Draw the pictures of the pages on concepts, each from runs that are made on the spot.

python docs/concept_pictures.py [drift flat averaging]      about two minutes on one core; all of them unless some are named
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

import fedflat
from fedflat.algorithms.descent import Descent
from fedflat.algorithms.lr_schedule import Schedule
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.round.aggregation import Aggregation
from fedflat.engines.round.contract import Client, ModelState, Training
from fedflat.engines.round.plan import Plan
from fedflat.experiment.analysis.landscapes import landscapes, plane
from fedflat.experiment.analysis.measured import Measured
from fedflat.flatness import Ends, Operator, lanczos
from fedflat.reporting.figures.landscape_scale import Scale, common_line, shown_tick
from fedflat.reporting.figures.landscapes import COLOUR_MAP, FAINT, INK, draw_contours
from fedflat.testing.quadratics import Quadratics

IMAGES = Path(__file__).parent / "images" / "concepts"
ONE, TWO, GLOBAL, BEST = "#1b6ca8", "#d1495b", "#22303c", "#2a9d5c"
"""Client one, client two, the server, and what everybody looks for."""


# --- client drift ----------------------------------------------------------------------------------------------------------------


def two_clients() -> Quadratics:
    """Two long valleys that cross: f_i(x) = 0.5 (x - b_i)^T A_i (x - b_i)."""
    quadratics = Quadratics(clients=2, size=2)
    quadratics.matrices = torch.tensor([[[2.0, 0.0], [0.0, 0.25]], [[0.3, -0.1], [-0.1, 1.6]]], dtype=torch.float64)
    quadratics.centres = torch.tensor([[-1.5, 1.6], [1.9, -0.9]], dtype=torch.float64)
    quadratics.start = torch.tensor([2.5, 2.3], dtype=torch.float64)
    return quadratics


def walks(method: str, quadratics: Quadratics, rounds: int, steps: int, lr: float) -> tuple[np.ndarray, list[list[np.ndarray]]]:
    """The server's path, and every client's path within every round, through the engine that runs experiments."""
    algorithm, problem = fedflat.algorithm(method), quadratics.problem()
    engine = LoopEngine(problem, workers=1)

    def training(k: int) -> Training:
        return Training(algorithm, Descent(), Schedule(lr, 1.0, rounds), Plan(1, steps=k), 0, 2, Aggregation("uniform"))

    weights, buffers, integers = problem.initial()
    model, server = ModelState(weights, buffers, integers), algorithm.new_server(weights)
    states = [algorithm.new_client(weights) for _ in range(2)]
    path, local = [weights.numpy().copy()], []
    for round in range(rounds):
        members = [Client(number, np.array([number]), states[number]) for number in range(2)]
        alone = [
            [engine.train(training(k), round, model, server, [one]).returned.displacement for k in range(1, steps + 1)] for one in members
        ]
        local.append([np.stack([path[-1], *(path[-1] + moved.numpy() for moved in moves)]) for moves in alone])
        outcome = engine.train(training(steps), round, model, server, members)
        weights, server = algorithm.aggregate(outcome.returned, outcome.means, server)
        model = ModelState(weights, outcome.buffers, outcome.integers)
        states = [client.state for client in outcome.clients]
        path.append(weights.numpy().copy())
    return np.stack(path), local


def drift() -> Figure:
    """FedAvg and SCAFFOLD on the same two clients."""
    quadratics, shown = two_clients(), 5
    optimum = quadratics.optimum().numpy()
    figure = Figure(figsize=(8.8, 4.5), layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.08))
    for axes, (method, title) in zip(figure.subplots(1, 2), {"fedavg": "FedAvg", "scaffold": "SCAFFOLD"}.items(), strict=True):
        path, local = walks(method, quadratics, 60, 12, 0.12)
        _ground(axes, quadratics)
        for round in local[:shown]:
            for walk, colour in zip(round, (ONE, TWO), strict=True):
                axes.plot(*walk.T, color=colour, lw=1.3, alpha=0.85, zorder=3)
                axes.plot(*walk[1:].T, ".", color=colour, ms=3.5, zorder=3)
        axes.plot(*path.T, "-", color=GLOBAL, lw=1.1, alpha=0.8, zorder=4)
        axes.plot(*path[: shown + 1].T, "o", color=GLOBAL, ms=6, markeredgecolor="white", markeredgewidth=1, zorder=5)
        axes.plot(*path[-1], "s", color=GLOBAL, ms=8, markeredgecolor="white", markeredgewidth=1.2, zorder=6)
        axes.plot(*optimum, "*", color=BEST, ms=17, markeredgecolor="white", markeredgewidth=1.2, zorder=7 if method == "fedavg" else 5.5)
        for centre, colour, name in zip(quadratics.centres.numpy(), (ONE, TWO), ("client 1", "client 2"), strict=True):
            axes.plot(*centre, "X", color=colour, ms=10, markeredgecolor="white", markeredgewidth=1, zorder=5)
            axes.annotate(name, centre, (0, -15), textcoords="offset points", color=colour, fontsize=9, ha="center", fontweight="bold")
        axes.annotate("start", path[0], (7, 4), textcoords="offset points", color=GLOBAL, fontsize=9)
        off = float(np.linalg.norm(path[-1] - optimum))
        end = "stops at the joint minimum" if off < 1e-2 else f"stops {off:.2f} away from the joint minimum"
        axes.set_title(title, loc="left", fontsize=12.5, fontweight="bold", color=INK)
        axes.set_title(end, loc="right", fontsize=10, color=BEST if off < 1e-2 else TWO)
    handles = [
        axes.plot([], [], sign, color=colour, ms=size, lw=1.3, markeredgecolor="white" if sign in "*sXo" else None)[0]
        for sign, colour, size in (("o", GLOBAL, 7), ("-", ONE, 0), ("-", TWO, 0), ("s", GLOBAL, 8), ("*", BEST, 14), ("X", "#777777", 9))
    ]
    words = (
        "server, by round",
        "client 1, by step",
        "client 2, by step",
        "server after 60 rounds",
        "minimum of the mean",
        "minima of the clients",
    )
    figure.legend(
        handles,
        words,
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=8.5,
        columnspacing=1.4,
        handletextpad=0.5,
        labelcolor=INK,
    )
    return figure


def _ground(axes: Any, quadratics: Quadratics) -> None:
    xs, ys = np.linspace(-2.6, 3.2, 161), np.linspace(-2.0, 2.9, 141)
    points = torch.from_numpy(np.stack(np.meshgrid(xs, ys, indexing="ij"), -1))
    off = points[..., None, :] - quadratics.centres
    each = 0.5 * torch.einsum("xynp,npq,xynq->xyn", off, quadratics.matrices, off).numpy()
    axes.contourf(xs, ys, np.log(each.mean(-1)).T, levels=24, cmap=COLOUR_MAP, alpha=0.45, antialiased=True)
    for number, colour in enumerate((ONE, TWO)):
        axes.contour(xs, ys, each[..., number].T, levels=[0.08, 0.35], colors=colour, linewidths=0.9, linestyles="dashed", alpha=0.75)
    axes.set(xlim=(xs[0], xs[-1]), ylim=(ys[0], ys[-1]), xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(False)


# --- flat minima -----------------------------------------------------------------------------------------------------------------

LARGEST = r"$\lambda_{\max}$"
DIGITS: dict[str, Any] = {"rounds": 80, "eval_every": 5, "partition": "dirichlet(alpha=0.1)", "workers": 1, "device": "cpu"}


def flat() -> Figure:
    """FedAvg and FedASAM on digits: the loss along the direction of largest curvature, and around the model."""
    models = {"FedAvg": "fedavg", "FedASAM": "fedasam(rho=2)"}
    found = {name: fedflat.run(text, **DIGITS).flatness() for name, text in models.items()}
    figure = Figure(figsize=(9.2, 3.7), layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.08))
    left, *right = figure.subplots(1, 3)
    tops = {}
    for (name, model), colour in zip(found.items(), (TWO, ONE), strict=True):
        tops[name] = _worst_direction(left, model, name, colour)
    left.set(ylim=(0, 0.6), xlim=(-1.2, 1.6), xlabel="distance along its steepest direction", ylabel="training loss")
    left.set_title("across the valley", loc="left", fontsize=12, fontweight="bold", color=INK)
    left.set_box_aspect(1)
    left.spines[["top", "right"]].set_visible(False)
    left.tick_params(colors=FAINT, labelsize=9)
    around = landscapes(list(found.values()), radius=0.8, points=25, names=list(found))
    scale = Scale.over(list(around.values()), "train_loss")
    line = common_line(list(around.values()), scale)
    for axes, (name, landscape) in zip(right, around.items(), strict=True):
        draw_contours(axes, landscape, scale, line)
        axes.plot(0, 0, "+", color=TWO, ms=9, markeredgewidth=1.6)
        axes.set(xticks=[], yticks=[])
        axes.set_title(name, loc="left", fontsize=12, fontweight="bold", color=INK)
        axes.set_xlabel(f"{LARGEST} = {tops[name]:.1f},   test accuracy {_accuracy(found[name]):.1f} %", fontsize=10, color=INK)
    if line is not None:
        figure.supxlabel(
            f"bold line: the same training loss, {shown_tick(float(f'{line:.2g}'), 'train_loss')}, in both",
            fontsize=8.5,
            color=FAINT,
            x=0.72,
        )
    return figure


def _worst_direction(axes: Any, model: Measured, name: str, colour: str) -> float:
    objective = model.objective()
    pairs = lanczos(Operator.of_hessian(objective), Ends(1))
    top, direction = float(pairs.values[0]), pairs.vectors[0]
    slope = float(objective.gradient() @ direction)
    steps = np.linspace(-1.5, 1.5, 61)
    losses = np.array([float(objective.loss(objective.weights + t * direction)) for t in steps])
    axes.plot(steps, losses, color=colour, lw=2.2)
    axes.plot(steps, losses[30] + slope * steps + 0.5 * top * steps**2, color=colour, lw=1, ls=(0, (4, 3)), alpha=0.8)
    place = {"xy": (float(steps[losses < 0.5].mean()), 0.5), "ha": "center"} if name == "FedAvg" else {"xy": (0.95, 0.17), "ha": "left"}
    axes.annotate(name, color=colour, fontsize=10, fontweight="bold", **place)
    return top


def _accuracy(model: Measured) -> float:
    return 100 * model.record.history[-1]["test"]["server"]["accuracy"]


# --- why averaging helps ---------------------------------------------------------------------------------------------------------


def averaging() -> Figure:
    """The last global models of FedAvg on the plane through three of them, with their average; and both curves."""
    import tempfile

    window, rounds = 20, 60
    settings = DIGITS | {"rounds": rounds, "eval_every": 1, "partition": "dirichlet(alpha=0)", "save_every": 1}
    with tempfile.TemporaryDirectory() as folder:
        result = fedflat.run(f"fedavg+wima(window={window})", out=folder, **settings)
        named = {f"x{t}": result.flatness("server", rounds=t) for t in (rounds - 18, rounds - 9, rounds)}
        named["average"] = result.flatness(f"wima(window={window})")
        others = {f"x{t}": result.flatness("server", rounds=t) for t in range(rounds - window + 1, rounds + 1) if f"x{t}" not in named}
        found = plane([*named.values(), *others.values()], points=31, margin=0.3, names=[*named, *others])
        frame = result.frame()
    return _average_picture(found, frame, window)


def _average_picture(found: Any, frame: Any, window: int) -> Figure:
    figure = Figure(figsize=(9.2, 3.7), layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.08))
    left, right = figure.subplots(1, 2)
    width, height = (axis[-1] - axis[0] for axis in found.axes)
    right.set_box_aspect(height / width)
    scale = Scale.over([found], "test_error")
    draw_contours(left, found, scale)
    marks = {mark.name: mark for mark in found.marks}
    order = sorted((name for name in marks if name != "average"), key=lambda name: int(name[1:]))
    left.plot(
        *np.array([marks[name].at for name in order]).T,
        "-o",
        color=GLOBAL,
        lw=0.7,
        ms=4,
        alpha=0.75,
        markeredgecolor="white",
        markeredgewidth=0.5,
    )
    left.plot(*marks["average"].at, "*", color="#edae49", ms=19, markeredgecolor=INK, markeredgewidth=0.9, zorder=6)
    left.set(xticks=[], yticks=[])
    left.set_title(f"the last {window} global models", loc="left", fontsize=12, fontweight="bold", color=INK)
    left.set_xlabel("test error on the plane through three of them; star: their average", fontsize=9, color=FAINT)
    server, wima = (100 * frame[f"test.{name}.accuracy"] for name in ("server", f"wima(window={window})"))
    right.plot(frame["round"], server, color=GLOBAL, lw=1.1, label="the server's model of each round")
    right.plot(frame["round"], wima, color="#e08e0b", lw=2.4, label=f"average of the last {window} (WiMA)")
    right.set(xlabel="communication round", ylabel="test accuracy (%)", ylim=(40, 100))
    right.grid(alpha=0.25)
    right.spines[["top", "right"]].set_visible(False)
    right.tick_params(colors=FAINT, labelsize=9)
    right.legend(frameon=False, fontsize=9.5, loc="lower right")
    right.set_title("and their accuracy", loc="left", fontsize=12, fontweight="bold", color=INK)
    return figure


PICTURES = {"drift": drift, "flat": flat, "averaging": averaging}

if __name__ == "__main__":
    torch.set_num_threads(1)
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]().savefig(IMAGES / f"{name}.png", dpi=125, bbox_inches="tight", pad_inches=0.12)
