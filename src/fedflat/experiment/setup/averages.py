"""Averages of the server model (SWA, WiMA, EMA), as a run begins them."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import Tensor

from fedflat.algorithms import Algorithm
from fedflat.averaging import AverageState, Ring, RunInfo, average_name
from fedflat.engines.problem.problem import Problem
from fedflat.experiment.config import Config
from fedflat.models import classifier_parameters


def begin_averages(
    algorithm: Algorithm, problem: Problem, config: Config, flat_model: Tensor, open_rows: Callable[[str], Ring]
) -> dict[str, AverageState]:
    """The initial state of every average of an algorithm, by name; warns of averages that the run is too short for.

    Args:
        algorithm: the algorithm.
        problem: the problem that it solves.
        config: the experiment.
        flat_model: weights and floating-point buffers of the initial model, as one vector.
        open_rows: opens a named store of past models, which some averages need.
    """
    # Finding the classifier can fail, so it is looked for only if an average distinguishes it from the other layers.
    needs_classifier = any(getattr(average, "part", "all") != "all" for average in algorithm.averages)
    classifier = classifier_parameters(problem.model) if needs_classifier else set()
    info = RunInfo(
        config.training.rounds,
        algorithm.lr_schedule.cycle,
        classifier=problem.whole_layout.indicator(classifier.__contains__, flat_model),
        ring=lambda name, _: open_rows(name),  # a store grows, so it needs no number of models
        first=config.init_rounds,
    )
    for average in algorithm.averages:
        warning = average.warning(info)
        if warning:
            warnings.warn(warning, stacklevel=2)
    return {average_name(average): average.begin(info, flat_model) for average in algorithm.averages}
