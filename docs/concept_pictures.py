"""Draw the figures of the concept pages from runs that this script trains.

python docs/concept_pictures.py [drift] [flat] [averaging]      about two minutes on one core; default: all of them
"""

from __future__ import annotations

import sys
import tempfile
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
from fedflat.experiment.analysis.run_model import RunModel
from fedflat.flatness import Ends, Operator, lanczos
from fedflat.reporting.figures.landscape_panels import COLOUR_MAP, FAINT, INK
from fedflat.reporting.figures.landscape_scale import LandscapeScale, common_line, shown_tick
from fedflat.reporting.figures.landscapes import draw_contours
from fedflat.testing.quadratics import Quadratics

IMAGES = Path(__file__).parent / "images" / "concepts"
ONE, TWO, GLOBAL, BEST = "#1b6ca8", "#d1495b", "#22303c", "#2a9d5c"
"""Colours of client 1, client 2, the server and the joint minimum."""


def two_clients() -> Quadratics:
    """Two crossing elongated valleys: f_i(x) = 0.5 (x - b_i)^T A_i (x - b_i)."""
    quadratics = Quadratics(clients=2, size=2)
    quadratics.matrices = torch.tensor([[[2.0, 0.0], [0.0, 0.25]], [[0.3, -0.1], [-0.1, 1.6]]], dtype=torch.float64)
    quadratics.centres = torch.tensor([[-1.5, 1.6], [1.9, -0.9]], dtype=torch.float64)
    quadratics.start = torch.tensor([2.5, 2.3], dtype=torch.float64)
    return quadratics


def trajectories(
    method: str, quadratics: Quadratics, rounds: int, steps: int, lr: float
) -> tuple[np.ndarray, list[list[np.ndarray]]]:
    """The server's path ``[rounds + 1, 2]`` and each client's path ``[steps + 1, 2]`` in every round."""
    algorithm, problem = fedflat.algorithm(method), quadratics.problem()
    engine = LoopEngine(problem, workers=1)

    def training(k: int) -> Training:
        schedule = Schedule(lr, 1.0, rounds)
        return Training(algorithm, Descent(), schedule, Plan(1, steps=k), 0, 2, Aggregation("uniform"))

    weights, buffers, integer_buffers = problem.initial_state()
    model, server = ModelState(weights, buffers, integer_buffers), algorithm.new_server(weights)
    states = [algorithm.new_client(weights) for _ in range(2)]
    path, local_paths = [weights.numpy().copy()], []
    for round in range(rounds):
        cohort = [Client(number, np.array([number]), states[number]) for number in range(2)]
        local_paths.append([])
        for client in cohort:
            outcomes = [engine.train(training(k), round, model, server, [client]) for k in range(1, steps + 1)]
            points = [path[-1] + outcome.cohort_means.displacement.numpy() for outcome in outcomes]
            local_paths[-1].append(np.stack([path[-1], *points]))
        outcome = engine.train(training(steps), round, model, server, cohort)
        weights, server = algorithm.aggregate(outcome.cohort_means, outcome.message_means, server)
        model = ModelState(weights, outcome.buffers, outcome.integer_buffers)
        states = [client.state for client in outcome.clients]
        path.append(weights.numpy().copy())
    return np.stack(path), local_paths


def drift() -> Figure:
    """FedAvg and SCAFFOLD on the same two clients."""
    quadratics, shown_rounds = two_clients(), 5
    optimum = quadratics.optimum().numpy()
    figure = Figure(figsize=(8.8, 4.5), layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.08))
    titles = {"fedavg": "FedAvg", "scaffold": "SCAFFOLD"}
    for axes, (method, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        path, local_paths = trajectories(method, quadratics, 60, 12, 0.12)
        _draw_losses(axes, quadratics)
        for client_paths in local_paths[:shown_rounds]:
            for client_path, colour in zip(client_paths, (ONE, TWO), strict=True):
                axes.plot(*client_path.T, color=colour, lw=1.3, alpha=0.85, zorder=3)
                axes.plot(*client_path[1:].T, ".", color=colour, ms=3.5, zorder=3)
        axes.plot(*path.T, "-", color=GLOBAL, lw=1.1, alpha=0.8, zorder=4)
        axes.plot(
            *path[: shown_rounds + 1].T, "o", color=GLOBAL, ms=6, markeredgecolor="white", markeredgewidth=1, zorder=5
        )
        axes.plot(*path[-1], "s", color=GLOBAL, ms=8, markeredgecolor="white", markeredgewidth=1.2, zorder=6)
        star_order = 7 if method == "fedavg" else 5.5  # SCAFFOLD ends at the optimum: draw its marker on top
        axes.plot(*optimum, "*", color=BEST, ms=17, markeredgecolor="white", markeredgewidth=1.2, zorder=star_order)
        for centre, colour, name in zip(quadratics.centres.numpy(), (ONE, TWO), ("client 1", "client 2"), strict=True):
            axes.plot(*centre, "X", color=colour, ms=10, markeredgecolor="white", markeredgewidth=1, zorder=5)
            style = {"color": colour, "fontsize": 9, "ha": "center", "fontweight": "bold"}
            axes.annotate(name, centre, (0, -15), textcoords="offset points", **style)
        axes.annotate("start", path[0], (7, 4), textcoords="offset points", color=GLOBAL, fontsize=9)
        distance = float(np.linalg.norm(path[-1] - optimum))
        converged = distance < 1e-2
        end = "stops at the joint minimum" if converged else f"stops {distance:.2f} away from the joint minimum"
        axes.set_title(title, loc="left", fontsize=12.5, fontweight="bold", color=INK)
        axes.set_title(end, loc="right", fontsize=10, color=BEST if converged else TWO)
    legend = {
        "server, each round": ("o", GLOBAL, 7),
        "client 1, each step": ("-", ONE, 0),
        "client 2, each step": ("-", TWO, 0),
        "server after 60 rounds": ("s", GLOBAL, 8),
        "joint minimum": ("*", BEST, 14),
        "minima of the clients": ("X", "#777777", 9),
    }
    handles = [
        axes.plot([], [], marker, color=colour, ms=size, lw=1.3, markeredgecolor="white" if marker in "*sXo" else None)[
            0
        ]
        for marker, colour, size in legend.values()
    ]
    figure.legend(
        handles,
        legend,
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=8.5,
        columnspacing=1.4,
        handletextpad=0.5,
        labelcolor=INK,
    )
    return figure


def _draw_losses(axes: Any, quadratics: Quadratics) -> None:
    xs, ys = np.linspace(-2.6, 3.2, 161), np.linspace(-2.0, 2.9, 141)
    points = torch.from_numpy(np.stack(np.meshgrid(xs, ys, indexing="ij"), -1))
    offsets = points[..., None, :] - quadratics.centres
    losses = 0.5 * torch.einsum("xynp,npq,xynq->xyn", offsets, quadratics.matrices, offsets).numpy()
    axes.contourf(xs, ys, np.log(losses.mean(-1)).T, levels=24, cmap=COLOUR_MAP, alpha=0.45, antialiased=True)
    style = {"levels": [0.08, 0.35], "linewidths": 0.9, "linestyles": "dashed", "alpha": 0.75}
    for number, colour in enumerate((ONE, TWO)):
        axes.contour(xs, ys, losses[..., number].T, colors=colour, **style)
    axes.set(xlim=(xs[0], xs[-1]), ylim=(ys[0], ys[-1]), xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(False)


LAMBDA_MAX = r"$\lambda_{\max}$"
DIGITS: dict[str, Any] = {
    "rounds": 80,
    "eval_every": 5,
    "partition": "dirichlet(alpha=0.1)",
    "workers": 1,
    "device": "cpu",
}


def flat() -> Figure:
    """FedAvg and FedASAM on digits: the loss along the direction of largest curvature, and around the model."""
    algorithms = {"FedAvg": "fedavg", "FedASAM": "fedasam(rho=2)"}
    models = {name: fedflat.run(text, **DIGITS).flatness() for name, text in algorithms.items()}
    figure = Figure(figsize=(9.2, 3.7), layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.08))
    left, *right = figure.subplots(1, 3)
    lambda_max = {}
    for (name, model), colour in zip(models.items(), (TWO, ONE), strict=True):
        lambda_max[name] = _draw_top_direction(left, model, name, colour)
    left.set(ylim=(0, 0.6), xlim=(-1.2, 1.6), xlabel="distance along the top eigenvector", ylabel="training loss")
    left.set_title("direction of largest curvature", loc="left", fontsize=12, fontweight="bold", color=INK)
    left.set_box_aspect(1)
    left.spines[["top", "right"]].set_visible(False)
    left.tick_params(colors=FAINT, labelsize=9)
    around = landscapes(list(models.values()), radius=0.8, points=25, names=list(models))
    scale = LandscapeScale.over(list(around.values()), "train_loss")
    line = common_line(list(around.values()), scale)
    for axes, (name, landscape) in zip(right, around.items(), strict=True):
        draw_contours(axes, landscape, scale, line)
        axes.plot(0, 0, "+", color=TWO, ms=9, markeredgewidth=1.6)
        axes.set(xticks=[], yticks=[])
        axes.set_title(name, loc="left", fontsize=12, fontweight="bold", color=INK)
        caption = f"{LAMBDA_MAX} = {lambda_max[name]:.1f},   test accuracy {_accuracy(models[name]):.1f} %"
        axes.set_xlabel(caption, fontsize=10, color=INK)
    if line is not None:
        loss = shown_tick(float(f"{line:.2g}"), "train_loss")
        figure.supxlabel(f"bold line: training loss {loss} in both", fontsize=8.5, color=FAINT, x=0.72)
    return figure


def _draw_top_direction(axes: Any, model: RunModel, name: str, colour: str) -> float:
    """Plot the loss and its quadratic model along the top eigenvector; return the eigenvalue."""
    objective = model.objective()
    pairs = lanczos(Operator.of_hessian(objective), Ends(1))
    eigenvalue, direction = float(pairs.values[0]), pairs.vectors[0]
    slope = float(objective.gradient() @ direction)
    steps = np.linspace(-1.5, 1.5, 61)
    losses = np.array([float(objective.loss(objective.weights + t * direction)) for t in steps])
    axes.plot(steps, losses, color=colour, lw=2.2)
    quadratic = losses[30] + slope * steps + 0.5 * eigenvalue * steps**2
    axes.plot(steps, quadratic, color=colour, lw=1, ls=(0, (4, 3)), alpha=0.8)
    centre = float(steps[losses < 0.5].mean())
    position = {"xy": (centre, 0.5), "ha": "center"} if name == "FedAvg" else {"xy": (0.95, 0.17), "ha": "left"}
    axes.annotate(name, color=colour, fontsize=10, fontweight="bold", **position)
    return eigenvalue


def _accuracy(model: RunModel) -> float:
    return 100 * model.record.history[-1]["test"]["server"]["accuracy"]


def averaging() -> Figure:
    """The last global models of FedAvg and their average on the plane through three of them; accuracy curves of both."""
    window, rounds = 20, 60
    settings = DIGITS | {"rounds": rounds, "eval_every": 1, "partition": "dirichlet(alpha=0)", "save_every": 1}
    with tempfile.TemporaryDirectory() as folder:
        result = fedflat.run(f"fedavg+wima(window={window})", out=folder, **settings)
        basis = (rounds - 18, rounds - 9, rounds)
        others = [t for t in range(rounds - window + 1, rounds + 1) if t not in basis]
        models = {f"x{t}": result.flatness("server", rounds=t) for t in basis}
        models["average"] = result.flatness(f"wima(window={window})")
        models |= {f"x{t}": result.flatness("server", rounds=t) for t in others}
        landscape = plane(list(models.values()), points=31, margin=0.3, names=list(models))
        frame = result.to_pandas()
    return _draw_averaging(landscape, frame, window)


def _draw_averaging(landscape: Any, frame: Any, window: int) -> Figure:
    figure = Figure(figsize=(9.2, 3.7), layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.08))
    left, right = figure.subplots(1, 2)
    width, height = (axis[-1] - axis[0] for axis in landscape.axes)
    right.set_box_aspect(height / width)
    draw_contours(left, landscape, LandscapeScale.over([landscape], "test_error"))
    marks = {mark.name: mark for mark in landscape.marks}
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
    left.set_xlabel("test error on the plane through three of them (star: average)", fontsize=9, color=FAINT)
    server, wima = (100 * frame[f"test.{name}.accuracy"] for name in ("server", f"wima(window={window})"))
    right.plot(frame["round"], server, color=GLOBAL, lw=1.1, label="server model of each round")
    right.plot(frame["round"], wima, color="#e08e0b", lw=2.4, label=f"average of the last {window} (WiMA)")
    right.set(xlabel="communication round", ylabel="test accuracy (%)", ylim=(40, 100))
    right.grid(alpha=0.25)
    right.spines[["top", "right"]].set_visible(False)
    right.tick_params(colors=FAINT, labelsize=9)
    right.legend(frameon=False, fontsize=9.5, loc="lower right")
    right.set_title("test accuracy", loc="left", fontsize=12, fontweight="bold", color=INK)
    return figure


PICTURES = {"drift": drift, "flat": flat, "averaging": averaging}

if __name__ == "__main__":
    torch.set_num_threads(1)
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]().savefig(IMAGES / f"{name}.png", dpi=125, bbox_inches="tight", pad_inches=0.12)
