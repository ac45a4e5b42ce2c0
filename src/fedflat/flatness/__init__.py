"""How flat a loss is around a model: curvature, sharpness, landscape. Pure mathematics: any torch module, any loss, any data."""

from __future__ import annotations

from fedflat.flatness.objective import Objective as Objective
