"""Drift corrections: one module each, registered by name in ``DRIFTS``.

A new drift is a module here plus a line below. May import ``slot`` and ``server``.
"""

from fedflat.algorithms.drift.acg import Acg
from fedflat.algorithms.drift.adabest import AdaBest
from fedflat.algorithms.drift.cm import Cm
from fedflat.algorithms.drift.dc import Dc
from fedflat.algorithms.drift.dyn import Dyn
from fedflat.algorithms.drift.ghbm import Ghbm
from fedflat.algorithms.drift.gloss import Gloss
from fedflat.algorithms.drift.gmt import Gmt
from fedflat.algorithms.drift.hbm import Hbm
from fedflat.algorithms.drift.localghbm import LocalGhbm
from fedflat.algorithms.drift.memoryless_acg import MemorylessAcg
from fedflat.algorithms.drift.mime import Mime
from fedflat.algorithms.drift.mimelite import MimeLite
from fedflat.algorithms.drift.mo import Mo
from fedflat.algorithms.drift.nova import Nova
from fedflat.algorithms.drift.prox import Prox
from fedflat.algorithms.drift.scaffold import Scaffold
from fedflat.algorithms.drift.wmsam import Wmsam
from fedflat.algorithms.slot import Drift
from fedflat.registry import Registry

DRIFTS: Registry[type[Drift]] = Registry("drift correction", see="fedflat algorithms", namespace="algorithm parts")
"""Drift corrections by name."""
DRIFTS.register("prox", Prox)
DRIFTS.register("scaffold", Scaffold)
DRIFTS.register("dyn", Dyn)
DRIFTS.register("adabest", AdaBest)
DRIFTS.register("mime", Mime)
DRIFTS.register("mimelite", MimeLite)
DRIFTS.register("cm", Cm)
DRIFTS.register("acg", Acg)
DRIFTS.register("mo", Mo)
DRIFTS.register("wmsam", Wmsam)
DRIFTS.register("gmt", Gmt)
DRIFTS.register("gloss", Gloss)
DRIFTS.register("ghbm", Ghbm)
DRIFTS.register("localghbm", LocalGhbm)
DRIFTS.register("hbm", Hbm)
DRIFTS.register("dc", Dc)
DRIFTS.register("nova", Nova)
DRIFTS.register("memoryless-acg", MemorylessAcg)

__all__ = [
    "DRIFTS",
    "Acg",
    "AdaBest",
    "Cm",
    "Dc",
    "Drift",
    "Dyn",
    "Ghbm",
    "Gloss",
    "Gmt",
    "Hbm",
    "LocalGhbm",
    "MemorylessAcg",
    "Mime",
    "MimeLite",
    "Mo",
    "Nova",
    "Prox",
    "Scaffold",
    "Wmsam",
]
