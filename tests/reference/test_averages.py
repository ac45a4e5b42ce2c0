"""The averages against the identities of the algorithms' specification (numbers in comments)."""

from typing import Any

import numpy as np

from . import METHODS, bed
from .averages import cyclic_rates, ema, swa, wima, wima_closed_form


def same(left: Any, right: Any) -> None:
    np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=0, atol=1e-9)


def test_windows_and_exponential_means() -> None:
    setting = bed(rounds=40, size=2)
    x = setting.run(METHODS["fedavg"]).x
    models, W = [setting.x0, *x], 7
    window = wima(x, window=W)
    same(wima_closed_form(models, window=W), window[W - 1 :])  # 46
    for t in range(W, 40):
        same(window[t] - window[t - 1], (x[t] - x[t - W]) / W)
    same(window[3], np.mean(x[:4], 0))  # 47
    same(wima(x, window=1), x)  # 28
    same(swa(models, start=1.0), x)
    same(ema(x, decay=0.0), x)
    same(ema(x, decay=0.9)[2], 0.81 * x[0] + 0.09 * x[1] + 0.1 * x[2])


def test_swa() -> None:  # 48
    models = [np.array([float(i)]) for i in range(41)]
    average = swa(models, start=0.5, cycle=5)
    same(average[:20], models[1:21])
    same(average[20:25], [models[20]] * 5)
    same(average[25], models[26])
    same(average[-1], np.mean([models[26], models[31], models[36]], 0))
    same(
        swa(models, start=0.5, cycle=5, capture_phase="cycle_end")[-1],
        np.mean([models[i] for i in (25, 30, 35, 40)], 0),
    )
    same(swa(models[:31], start=0.5, cycle=5, rounds=40), average[:30])
    snapshot = [np.array(float(i == 15000)) for i in range(20001)]
    same(swa(snapshot, cycle=20, weighting="literal")[-1], 0.75)
    same(swa(snapshot, cycle=20)[-1], 0.0)
    same(swa(models, start=0.3, cycle=5)[-1], np.mean([models[i] for i in (18, 23, 28, 33, 38)], 0))
    same(swa(models, start=0.5, cycle=1, capture_phase="cycle_end")[20], models[21])
    same(cyclic_rates(8, high=2.0, low=0.4, cycle=4, start=0.5), [2, 2, 2, 2, 1.6, 1.2, 0.8, 0.4])
    same(cyclic_rates(4, high=2.0, low=0.4, cycle=2, start=0.5), [2, 2, 1.2, 0.4])
    same(cyclic_rates(8, high=2.0, low=0.4, cycle=1, start=0.5), [2] * 8)
