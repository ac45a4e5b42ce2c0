"""The named algorithms: each a point in the space of slots, with the papers' values as defaults."""

from __future__ import annotations

from fedflat.algorithms.algorithm import Algorithm
from fedflat.algorithms.drift import Acg, AdaBest, Cm, Dyn, Mime, MimeLite, Mo, Prox, Scaffold, Wmsam
from fedflat.algorithms.lr_schedule import Linear
from fedflat.algorithms.perturbation import Asam, Guided, Lesam, Sam, Smoo
from fedflat.algorithms.server import Adagrad, Adam, Momentum, Sgd, Yogi
from fedflat.text import Value

NAMED: dict[str, Algorithm] = {
    "fedavg": Algorithm(),
    "fedavgm": Algorithm(server=Momentum()),
    "fedprox": Algorithm(Prox()),
    "fedadam": Algorithm(server=Adam()),
    "fedyogi": Algorithm(server=Yogi()),
    "fedadagrad": Algorithm(server=Adagrad()),
    "scaffold": Algorithm(Scaffold()),
    "feddyn": Algorithm(Dyn()),
    "adabest": Algorithm(AdaBest()),
    "mime": Algorithm(Mime()),
    "mime-sgdm": Algorithm(Mime(beta=0.9)),
    "mimelite": Algorithm(MimeLite()),
    "mimelite-sgdm": Algorithm(MimeLite(beta=0.9)),
    "fedcm": Algorithm(Cm()),
    "fedacg": Algorithm(Acg()),
    "fedsam": Algorithm(perturbation=Sam(0.05)),
    "fedasam": Algorithm(perturbation=Asam(0.5, 0.2)),
    "mofedsam": Algorithm(Cm(), Sam(0.1)),
    "fedgamma": Algorithm(Scaffold(), Sam(0.1)),
    "fedspeed": Algorithm(Dyn(alpha=0.1), Sam(0.1)),
    "fedsmoo": Algorithm(Dyn(alpha=0.1), Smoo(0.1)),
    "fedlesam": Algorithm(perturbation=Lesam(0.1)),
    "fedlesam-s": Algorithm(Scaffold(), Lesam(0.1)),
    "fedlesam-d": Algorithm(Dyn(alpha=0.1), Lesam(0.1)),
    "fedswa": Algorithm(lr_schedule=Linear(0.1), server=Sgd(1.5)),
    "fedmo": Algorithm(Mo()),
    "fedmoswa": Algorithm(Mo(), lr_schedule=Linear(0.1), server=Sgd(1.5)),
    "fedwmsam": Algorithm(Wmsam(), Guided(0.01)),
}

RELEASED: dict[str, dict[str, Value]] = {
    "fedlesam": {"direction": "global", "indexing": "tensor"},
    "fedlesam-s": {"direction": "global", "indexing": "tensor", "cv_weight": 0.1},
    "fedlesam-d": {"direction": "global", "indexing": "tensor"},
    "fedswa": {"early_decay": True},
    "fedmo": {"gamma": 0.1, "gamma_first_round": 1.0},
    "fedmoswa": {"gamma": 0.1, "gamma_first_round": 1.0, "normaliser": "trapezoid", "early_decay": True},
    "fedsmoo": {"s_source": "dual"},
    "fedwmsam": {"perturb_sign": -1, "indexing": "tensor"},
}
"""What ``variant=released`` sets: the published code where it differs from the published formula."""
