"""Algorithms other than those of the four papers and their baselines."""

from __future__ import annotations

from fedflat.algorithms.algorithm import Algorithm
from fedflat.algorithms.cards.card import Card
from fedflat.algorithms.drift import (
    Acg,
    Dc,
    Ghbm,
    Gloss,
    Gmt,
    Hbm,
    LocalGhbm,
    MemorylessAcg,
    Nova,
)
from fedflat.algorithms.local_optimiser import AdamW, FedAdamW, FedMuon, Muon
from fedflat.algorithms.perturbation import Lesam, RampedSam, Sam, Scam, Sol
from fedflat.algorithms.server import Extrapolation
from fedflat.algorithms.start import Relaxed
from fedflat.algorithms.weights import Aligned, Awa, Disco

LATER_METHODS: dict[str, Card] = {
    "fedexp": Card(
        "FedExP",
        "FedAvg with a server learning rate that grows with the clients' disagreement",
        Algorithm(server=Extrapolation()),
        "Jhunjhunwala et al., ICLR 2023",
        "eps is 1e-3 on CIFAR and 0.1 on EMNIST. lr is 0.01, lr decay is 0.998 and weight decay is 1e-4; gradients are "
        "clipped at 10. The paper evaluates fedexp+wima(window=2)",
        ("D35",),
        released={"eps_scale": "cohort", "eps_decay": 0.996004},
    ),
    "fedinit": Card(
        "FedInit",
        "FedAvg with a relaxed initialisation of clients",
        Algorithm(start=Relaxed()),
        "Sun et al., NeurIPS 2023",
        "beta is 0.1. In FL-Simulator, this start is an option of every method. In fedflat, it is a part that can be "
        "added to other algorithms, as in feddyn+relaxed(server=average)",
        ("D34",),
    ),
    "fedgloss": Card(
        "FedGloSS",
        "SAM on the server and on clients, with FedDyn's dual",
        Algorithm(Gloss(alpha=0.1), RampedSam(0.15)),
        "Caldarola et al., CVPR 2025",
        "on CIFAR-10, alpha is 0.1 (beta = 10 in the paper), server_rho is 0.15 (rho in the paper), rho is 0.15 (rho_l "
        "in the paper) and both ramps are 2000. On CIFAR-100, alpha is 0.01 (beta = 100), server_rho is 0.01, rho is "
        "0.2 and both ramps are 15000. On both datasets, both values of start_rho are 0.001, lr is 0.01 and weight "
        "decay is 4e-4, with batch size 64 and 1 local epoch",
        ("D32", "D33"),
        released={"ramp_rho": 0.15, "dual_divisor": "cohort"},
    ),
    "fednsam": Card(
        "FedNSAM",
        "Nesterov look-ahead with a perturbation along the last global update",
        Algorithm(Acg(beta=0.0), Lesam(0.05, direction="global")),
        "Liu et al., MM 2025",
        "lam is 0.85 (gamma in the paper), rho is 0.05 in the paper and 0.01 in the published command, lr is 0.1 and "
        "weight decay is 1e-3. variant=released is the script of 2026, which is another method",
        ("D30", "D31", "D44"),
        released=Algorithm(MemorylessAcg(beta=0.0), Sam(0.05)),
    ),
    "ghbm": Card(
        "GHBM",
        "Heavy-ball momentum over several rounds, applied in local steps",
        Algorithm(Ghbm()),
        "Zaccone et al., TMLR 2025",
        "beta is 0.9, lr is 0.01 and weight decay is 1e-5. tau is 10, for 10 of 100 clients per round",
    ),
    "localghbm": Card(
        "LocalGHBM",
        "GHBM's momentum, estimated from the models that a client received",
        Algorithm(LocalGhbm()),
        "Zaccone et al., TMLR 2025",
        "beta is 0.9, lr is 0.01 and weight decay is 1e-5. Set participation to the share of clients that participate "
        "in a round",
    ),
    "fedhbm": Card(
        "FedHBM",
        "Heavy-ball momentum that each client computes from its own last model",
        Algorithm(Hbm(beta=1.0)),
        "Zaccone et al., TMLR 2025",
        "beta is 1, lr is 0.01 and weight decay is 1e-5. Set participation to the share of clients that participate "
        "in a round",
    ),
    "feddc": Card(
        "FedDC",
        "FedDyn's dual with SCAFFOLD's control variates",
        Algorithm(Dc()),
        "Gao et al., CVPR 2022",
        "on CIFAR-10, alpha is 0.01, lr is 0.1, lr decay is 0.998 and weight decay is 1e-3, with batch size 50 and 5 "
        "local epochs; gradients are clipped at 10. The equations of the control variates are those of the published "
        "code",
        ("D40",),
    ),
    "fednova": Card(
        "FedNova",
        "Displacements normalised by effective local steps",
        Algorithm(Nova()),
        "Wang et al., NeurIPS 2020",
        "mu is 0, local momentum is 0 or 0.9, lr is 0.02 and weight decay is 1e-4. FedNova differs from FedAvg only if "
        "clients take different numbers of local steps",
        ("D36",),
    ),
    "feddisco": Card(
        "FedDisco",
        "FedAvg with client weights that depend on label distributions",
        Algorithm(weights=Disco()),
        "Ye et al., ICML 2023",
        "a is 0.5, b is 0.1 and metric is kl",
        ("D43",),
    ),
    "fedscam": Card(
        "FedSCAM",
        "SAM with a radius and a client weight that depend on the client's heterogeneity",
        Algorithm(perturbation=Scam(), weights=Aligned()),
        "Rahil et al., arXiv 2601.00853",
        "rho is 0.05, beta is 0.8, batches is 3, and alpha, gamma and kappa are 1",
        ("D38",),
    ),
    "fedawa": Card(
        "FedAWA",
        "FedAvg with weights that the server learns",
        Algorithm(weights=Awa()),
        "Shi et al., CVPR 2025",
        "server_steps is 1 and weights_lr is 1e-3",
        ("D39",),
    ),
    "local-adamw": Card(
        "Local AdamW",
        "FedAvg with AdamW on clients",
        Algorithm(local_optimiser=AdamW()),
        "Loshchilov and Hutter, ICLR 2019",
        "in the FedAdamW paper, lr is 3e-4 and weight decay is 0.01",
    ),
    "fedadamw": Card(
        "FedAdamW",
        "AdamW on clients with a global second moment and the last global update",
        Algorithm(local_optimiser=FedAdamW()),
        "Liu et al., AAAI 2026",
        "lr is 3e-4 (1e-3 with LoRA), gamma is 0.5 and weight decay is 0.01, with 50 local steps; gradients are "
        "clipped at 10. In the paper, clients send one number per parameter tensor for v; in fedflat, they send a "
        "vector of P values that repeats this number for every entry of the tensor",
        ("D37",),
        released={"second_moment": "weight", "m_steps": "run"},
    ),
    "local-muon": Card(
        "Local Muon",
        "FedAvg with Muon on clients",
        Algorithm(local_optimiser=Muon()),
        "Jordan et al., 2024",
        "beta is 0.95",
    ),
    "fedmuon": Card(
        "FedMuon",
        "Muon on clients with a global momentum and the last global update",
        Algorithm(local_optimiser=FedMuon()),
        "Liu et al., 2025",
        "beta is 0.98, gamma is 0.5 and weight decay is 0.01, with 50 local steps; gradients are clipped at 10. For "
        "ResNet-18, lr is 3e-2 and alpha is 0.5; for DeiT-Tiny, lr is 3e-4 and alpha is 10. The equations are those of "
        "the published code. In the paper, u is M and is orthogonalised exactly, O has no factor, and there is no "
        "weight decay",
        ("D41", "D45"),
        released={"shape_factor": "kernel"},
    ),
    "fedgmt": Card(
        "FedGMT",
        "Distillation from a moving average of server models, with FedDyn's dual",
        Algorithm(Gmt()),
        "Li et al., ICML 2025",
        "gamma is 1 (0.5 to 2), tau is 3, beta is 10, and alpha is 0.95, 0.995 or 0.998. lr is 0.01, lr "
        "decay is 0.998, local momentum is 0.9 and weight decay is 1e-5, with batch size 50 and 5 local epochs. The "
        "equations are those of the published code",
    ),
    "fedsol": Card(
        "FedSOL",
        "Perturbation along the gradient of a distillation loss",
        Algorithm(perturbation=Sol()),
        "Lee et al., CVPR 2024",
        "rho is 1, with and without adaptive scaling, and tau is 3. lr is 0.01, lr decay is 0.99, local momentum is "
        "0.9 and weight decay is 1e-5, with batch size 50 and 5 local epochs. The equations are those of the published "
        "code",
    ),
}
"""Cards of these algorithms, by name."""
