"""Drift corrections, by name."""

from fedflat.algorithms.drift.acg import Acg
from fedflat.algorithms.drift.adabest import AdaBest
from fedflat.algorithms.drift.base import Drift
from fedflat.algorithms.drift.cm import Cm
from fedflat.algorithms.drift.dyn import Dyn
from fedflat.algorithms.drift.mime import Mime, MimeLite
from fedflat.algorithms.drift.mo import Mo
from fedflat.algorithms.drift.prox import Prox
from fedflat.algorithms.drift.scaffold import Scaffold
from fedflat.algorithms.drift.wmsam import Wmsam

DRIFTS: dict[str, type[Drift]] = {
    "prox": Prox,
    "scaffold": Scaffold,
    "dyn": Dyn,
    "adabest": AdaBest,
    "mime": Mime,
    "mimelite": MimeLite,
    "cm": Cm,
    "acg": Acg,
    "mo": Mo,
    "wmsam": Wmsam,
}
"""Drift corrections, by name."""

__all__ = ["DRIFTS", "Acg", "AdaBest", "Cm", "Drift", "Dyn", "Mime", "MimeLite", "Mo", "Prox", "Scaffold", "Wmsam"]
