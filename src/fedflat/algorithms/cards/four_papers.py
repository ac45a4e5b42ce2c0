"""The algorithms of the four papers that fedflat reproduces, and their baselines."""

from __future__ import annotations

from fedflat.algorithms.algorithm import Algorithm
from fedflat.algorithms.cards.card import Card
from fedflat.algorithms.drift import (
    Acg,
    AdaBest,
    Cm,
    Dyn,
    Mime,
    MimeLite,
    Mo,
    Prox,
    Scaffold,
    Wmsam,
)
from fedflat.algorithms.lr_schedule import Linear
from fedflat.algorithms.perturbation import Asam, Guided, Lesam, Sam, Smoo
from fedflat.algorithms.server import Adagrad, Adam, Momentum, Sgd, Yogi

FOUR_PAPERS: dict[str, Card] = {
    "fedavg": Card(
        "FedAvg",
        "Federated averaging",
        Algorithm(),
        "McMahan et al., AISTATS 2017",
        "Caldarola et al. 2022 use lr 0.01, batch size 64 and 1 local epoch; "
        "the FedWMSAM paper uses lr 0.1, batch size 50, 5 local epochs and lr decay 0.998",
    ),
    "fedavgm": Card(
        "FedAvgM",
        "FedAvg with server momentum",
        Algorithm(server=Momentum()),
        "Hsu et al., 2019",
        "beta is 0.9; in FedACG's code it is 0.4. With one class per client, FedAvgM diverges in most settings",
    ),
    "fedprox": Card(
        "FedProx",
        "FedAvg with a proximal term",
        Algorithm(Prox()),
        "Li et al., MLSys 2020",
        "mu is 0.1 in Caldarola et al. 2022, and 0.1, 0.01 or 0.001 in the WiMA paper",
        ("D21",),
    ),
    "fedadam": Card(
        "FedAdam",
        "FedAvg with Adam on the server",
        Algorithm(server=Adam()),
        "Reddi et al., ICLR 2021",
        "server_lr 0.1 is best on CIFAR-100 (Caldarola et al. 2022, Table 13)",
        ("D15",),
    ),
    "fedyogi": Card(
        "FedYogi",
        "FedAvg with Yogi on the server",
        Algorithm(server=Yogi()),
        "Reddi et al., ICLR 2021",
        "beta1 is 0.9, beta2 is 0.99 and tau is 1e-3",
        ("D15",),
    ),
    "fedadagrad": Card(
        "FedAdagrad",
        "FedAvg with Adagrad on the server",
        Algorithm(server=Adagrad()),
        "Reddi et al., ICLR 2021",
        "server_lr 0.01 is best on CIFAR-100 (Caldarola et al. 2022, Table 13)",
        ("D15",),
    ),
    "scaffold": Card(
        "SCAFFOLD",
        "Control variates",
        Algorithm(Scaffold()),
        "Karimireddy et al., ICML 2020",
        "option is II and server_lr is 1",
        ("D1", "D20"),
    ),
    "feddyn": Card(
        "FedDyn",
        "Dynamic regularisation",
        Algorithm(Dyn()),
        "Acar et al., ICLR 2021",
        "alpha is 0.01; in FL-Simulator's code it is 0.1. FedDyn requires gradient clipping",
        ("D2", "D21"),
    ),
    "adabest": Card(
        "AdaBest",
        "Adaptive bias estimates",
        Algorithm(AdaBest()),
        "Varno et al., ECCV 2022",
        "mu is 0.02; beta is 0.9 on CIFAR-10 and 0.8 on CIFAR-100",
    ),
    "mime": Card(
        "MIME",
        "MIME with SGD",
        Algorithm(Mime()),
        "Karimireddy et al., NeurIPS 2021",
        "server_lr is 0.1 or 1 in the WiMA paper",
    ),
    "mime-sgdm": Card(
        "MIME-SGDM",
        "MIME with momentum",
        Algorithm(Mime(beta=0.9)),
        "Karimireddy et al., NeurIPS 2021",
        "beta is 0.9 and form is fedjax in the WiMA paper",
        ("D27",),
    ),
    "mimelite": Card(
        "MIMELite", "MIMELite with SGD, equivalent to FedAvg", Algorithm(MimeLite()), "Karimireddy et al., NeurIPS 2021"
    ),
    "mimelite-sgdm": Card(
        "MIMELite-SGDM",
        "MIMELite with momentum",
        Algorithm(MimeLite(beta=0.9)),
        "Karimireddy et al., NeurIPS 2021",
        "beta is 0.9 and form is fedjax in the WiMA paper",
        ("D27",),
    ),
    "fedcm": Card(
        "FedCM",
        "Client-level momentum",
        Algorithm(Cm()),
        "Xu et al., 2021",
        "alpha is 0.1; in the WiMA paper it is 0.05, 0.1 or 0.5",
    ),
    "fedacg": Card(
        "FedACG",
        "Accelerated client gradients",
        Algorithm(Acg()),
        "Kim et al., CVPR 2024",
        "lam is 0.85 and beta is 0.002",
        ("D19",),
    ),
    "fedsam": Card(
        "FedSAM",
        "FedAvg with SAM on clients",
        Algorithm(perturbation=Sam(0.05)),
        "Caldarola et al., ECCV 2022; Qu et al., ICML 2022",
        "in Caldarola et al. 2022, rho is 0.1 on CIFAR-10 with Dirichlet alpha 0, 0.02 on CIFAR-10 with alpha 100, and "
        "0.01 on Cityscapes and IDDA. It is 0.05 in the FedSWA paper (Liu et al. 2025) and 0.1 in the FedWMSAM paper",
        ("D5",),
    ),
    "fedasam": Card(
        "FedASAM",
        "FedAvg with ASAM on clients",
        Algorithm(perturbation=Asam(0.5, 0.2)),
        "Caldarola et al., ECCV 2022",
        "in Caldarola et al. 2022, rho is 0.7 on CIFAR-10 with Dirichlet alpha 0, 0.5 on CIFAR-100 and IDDA, and 0.1 "
        "on Cityscapes; eta is 0.2",
    ),
    "mofedsam": Card(
        "MoFedSAM",
        "FedCM with SAM on clients",
        Algorithm(Cm(), Sam(0.1)),
        "Qu et al., ICML 2022",
        "alpha and rho are 0.1; in Table 6 of the FedWMSAM paper, rho 0.01 is best",
        ("D5", "D11"),
    ),
    "fedgamma": Card(
        "FedGAMMA",
        "SCAFFOLD with SAM on clients",
        Algorithm(Scaffold(), Sam(0.1)),
        "Dai et al., TNNLS 2023",
        "rho is 0.1",
    ),
    "fedspeed": Card(
        "FedSpeed",
        "FedDyn's dual with SAM on clients",
        Algorithm(Dyn(alpha=0.1), Sam(0.1)),
        "Sun et al., ICLR 2023",
        "alpha is 0.1 (lambda = 10 in the paper's notation), rho is 0.1 and share is 1",
        ("D12",),
    ),
    "fedsmoo": Card(
        "FedSMOO",
        "FedDyn with a dynamically regularised perturbation",
        Algorithm(Dyn(alpha=0.1), Smoo(0.1)),
        "Sun et al., ICML 2023",
        "alpha and rho are 0.1",
        ("D13",),
        released={"s_source": "dual"},
    ),
    "fedlesam": Card(
        "FedLESAM",
        "Locally estimated global perturbation",
        Algorithm(perturbation=Lesam(0.1)),
        "Fan et al., ICML 2024",
        "rho is 0.1, which was tuned with the published code and its indexing error (D3); fedflat implements the "
        "paper's formula instead, for which rho should be tuned again",
        ("D3", "D14"),
        released={"direction": "global", "indexing": "tensor"},
    ),
    "fedlesam-s": Card(
        "FedLESAM-S",
        "FedLESAM with SCAFFOLD",
        Algorithm(Scaffold(), Lesam(0.1)),
        "Fan et al., ICML 2024",
        "rho is 0.1, which was tuned with the published code and its indexing error (D3); fedflat implements the "
        "paper's formula instead, for which rho should be tuned again",
        ("D3", "D10", "D14"),
        released={"direction": "global", "indexing": "tensor", "cv_weight": 0.1},
    ),
    "fedlesam-d": Card(
        "FedLESAM-D",
        "FedLESAM with FedDyn",
        Algorithm(Dyn(alpha=0.1), Lesam(0.1)),
        "Fan et al., ICML 2024",
        "alpha and rho are 0.1. This rho was tuned with the published code and its indexing error (D3); fedflat "
        "implements the paper's formula instead, for which rho should be tuned again",
        ("D3", "D14"),
        released={"direction": "global", "indexing": "tensor"},
    ),
    "fedswa": Card(
        "FedSWA",
        "Linearly decaying local learning rate with server over-relaxation",
        Algorithm(lr_schedule=Linear(0.1), server=Sgd(1.5)),
        "Liu et al., ICML 2025",
        "final_lr is 0.1 (rho in the paper), server_lr is 1.5 (alpha in the paper), lr decay is 0.998 and weight decay "
        "is 1e-3; gradients are clipped at 10",
        ("D4", "D26", "D28"),
        released={"early_decay": True},
    ),
    "fedmo": Card(
        "FedMo",
        "Momentum-based stochastic control",
        Algorithm(Mo()),
        "Liu et al., ICML 2025",
        "gamma is 0.2. variant=released does not reproduce two details of the published code: the learning-rate decay "
        "before round 0, and the scale of the control variates",
        ("D4", "D6", "D23"),
        released={"gamma": 0.1, "gamma_first_round": 1.0},
    ),
    "fedmoswa": Card(
        "FedMoSWA",
        "FedSWA with momentum-based stochastic control",
        Algorithm(Mo(), lr_schedule=Linear(0.1), server=Sgd(1.5)),
        "Liu et al., ICML 2025",
        "gamma is 0.2, final_lr is 0.1 (rho in the paper), server_lr is 1.5 (alpha in the paper) and option is II",
        ("D4", "D6", "D23", "D26", "D28"),
        released={"gamma": 0.1, "gamma_first_round": 1.0, "normaliser": "trapezoid", "early_decay": True},
    ),
    "fedwmsam": Card(
        "FedWMSAM",
        "Weighted personalised momentum with a momentum-guided perturbation",
        Algorithm(Wmsam(), Guided(0.01)),
        "FedWMSAM, NeurIPS 2025",
        "alpha0 is 0.1, lam is 0.01 and lr decay is 0.998; gradients are clipped at 10. rho is 0.01, which was tuned "
        "with the published code and its indexing error (D3); fedflat implements the paper's formula instead, for "
        "which rho should be tuned again (0.05 to 0.5)",
        ("D3", "D8", "D9", "D22"),
        released={"perturb_sign": -1, "indexing": "tensor"},
    ),
}
"""Cards of these algorithms, by name."""
