"""Forecasts of long runs: time, memory and disk space, estimated after the first rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from fedflat.display import counted, shown_bytes, shown_seconds
from fedflat.experiment.callback import Callback

if TYPE_CHECKING:
    from fedflat.experiment.callback import RunView
    from fedflat.experiment.campaign.estimate import Forecast, GpuForecast

FIRST_TIMED, LAST_TIMED = 1, 3
"""A run is timed from the end of round 1, which includes the set-up, to the end of round 3."""


def describe_forecast(forecast: Forecast) -> str:
    """Return the estimated time, memory and disk space of a run as text."""
    per_round = forecast.seconds_per_round
    shown_per_round = shown_seconds(per_round) if per_round >= 1 else f"{per_round:.2g} s"
    time_needed = f"{forecast.rounds:,} rounds at about {shown_per_round}: {shown_seconds(forecast.seconds)}"
    sizes = {"data": forecast.data, "per model": forecast.model, "per cohort": forecast.cohort}
    memory = ", ".join(f"{shown_bytes(size)} {name}" for name, size in sizes.items())
    if forecast.states:
        memory += f", up to {shown_bytes(forecast.states)} client state for {forecast.clients:,} clients"
    disk = f"; up to {shown_bytes(forecast.disk)} on disk" if forecast.disk else ""
    gpu = f"; GPU: {_describe_gpu(forecast.gpu)}" if forecast.gpu else ""
    return f"plan: {time_needed}; memory: {memory}{disk}{gpu}"


def _describe_gpu(gpu: GpuForecast) -> str:
    """Return how a run uses the GPU: memory, lanes and precision."""
    text = f"{shown_bytes(gpu.reserved)} of {shown_bytes(gpu.total)}"
    if gpu.lanes:
        text += f", {counted(gpu.lanes, 'lane')} of {shown_bytes(gpu.lane)}, {gpu.fitting:,} clients fit at once"
    text += f", precision {gpu.precision}"
    if gpu.bf16_speedup is not None:
        by = f" ({gpu.bf16_speedup} times as fast on an H200)" if gpu.bf16_speedup else ""
        text += f"; bf16 would be faster{by}: --set engine.precision=bf16"
    return text


class ForecastCallback(Callback):
    """Forecasts a run after its first rounds; calls ``report`` once if the rest will take ``min_seconds`` or more."""

    def __init__(self, report: Callable[[Forecast], None], min_seconds: float = 60.0) -> None:
        self._report, self._min_seconds = report, min_seconds
        self._start = 0.0
        self._rounds = 0

    def round_done(self, run: RunView) -> None:
        """Time the rounds after ``FIRST_TIMED`` up to ``LAST_TIMED``, and then forecast the rest."""
        self._rounds += 1
        if self._rounds not in (FIRST_TIMED, LAST_TIMED):
            return
        if run.problem.device.type == "cuda":
            import torch

            torch.cuda.synchronize()
        now = time.monotonic()
        if self._rounds == FIRST_TIMED:
            self._start = now
            return
        from fedflat.experiment.campaign.estimate import forecast

        expected = forecast(run, (now - self._start) / (LAST_TIMED - FIRST_TIMED))
        if expected.seconds >= self._min_seconds:
            self._report(expected)
