"""What the papers say of each named algorithm: where it comes from, the values they used, and where published code differs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """A place where published code and published formula disagree, and what fedflat does."""

    number: str
    """Its number on the page of differences in the documentation."""
    where: str
    fault: str
    here: str


@dataclass(frozen=True)
class Card:
    """One algorithm's origin, the papers' values, and known differences by number."""

    title: str
    paper: str
    values: str = ""
    differences: tuple[str, ...] = ()


CARDS: dict[str, Card] = {
    "fedavg": Card(
        "Federated averaging",
        "McMahan et al., AISTATS 2017",
        "rate 0.01, batch 64, 1 epoch (Caldarola et al. 2022); rate 0.1, batch 50, 5 epochs, decay 0.998 (FedWMSAM)",
    ),
    "fedavgm": Card(
        "FedAvg with server momentum",
        "Hsu et al., 2019",
        "beta 0.9; 0.4 in FedACG's code; diverges at alpha=0 in most cells",
    ),
    "fedprox": Card(
        "FedAvg with a proximal term",
        "Li et al., MLSys 2020",
        "mu 0.1 (Caldarola et al.); 0.1, 0.01, 0.001 (WiMA)",
        ("D21",),
    ),
    "fedadam": Card(
        "Adam on the server",
        "Reddi et al., ICLR 2021",
        "server_lr 0.1 best on CIFAR-100 (Caldarola et al., Table 13)",
        ("D15",),
    ),
    "fedyogi": Card("Yogi on the server", "Reddi et al., ICLR 2021", "beta1 0.9, beta2 0.99, tau 1e-3", ("D15",)),
    "fedadagrad": Card(
        "Adagrad on the server",
        "Reddi et al., ICLR 2021",
        "server_lr 0.01 best on CIFAR-100 (Caldarola et al.)",
        ("D15",),
    ),
    "scaffold": Card("Control variates", "Karimireddy et al., ICML 2020", "option II, server_lr 1", ("D1", "D20")),
    "feddyn": Card(
        "Dynamic regularisation",
        "Acar et al., ICLR 2021",
        "alpha 0.01; 0.1 in FL-Simulator; needs clipping",
        ("D2", "D21"),
    ),
    "adabest": Card(
        "Adaptive bias estimates", "Varno et al., ECCV 2022", "mu 0.02, beta 0.9 (CIFAR-10) or 0.8 (CIFAR-100)"
    ),
    "mime": Card("MIME with SGD", "Karimireddy et al., NeurIPS 2021", "server_lr 0.1 or 1 (WiMA)"),
    "mime-sgdm": Card(
        "MIME with momentum", "Karimireddy et al., NeurIPS 2021", "beta 0.9, form fedjax (WiMA)", ("D27",)
    ),
    "mimelite": Card("MIMELite with SGD, which is FedAvg", "Karimireddy et al., NeurIPS 2021"),
    "mimelite-sgdm": Card(
        "MIMELite with momentum", "Karimireddy et al., NeurIPS 2021", "beta 0.9, form fedjax (WiMA)", ("D27",)
    ),
    "fedcm": Card("Client-level momentum", "Xu et al., 2021", "alpha 0.1; 0.05, 0.1, 0.5 (WiMA)"),
    "fedacg": Card("Accelerated client gradients", "Kim et al., CVPR 2024", "lam 0.85, beta 0.002", ("D19",)),
    "fedsam": Card(
        "FedAvg with SAM clients",
        "Caldarola et al., ECCV 2022; Qu et al., ICML 2022",
        "rho 0.1 at alpha=0, 0.02 at alpha=100 (CIFAR-10); 0.01 (Cityscapes, IDDA); 0.05 (FedSWA); 0.1 (FedWMSAM)",
        ("D5",),
    ),
    "fedasam": Card(
        "FedAvg with ASAM clients",
        "Caldarola et al., ECCV 2022",
        "rho 0.7 (CIFAR-10, alpha=0), 0.5 (CIFAR-100, IDDA), 0.1 (Cityscapes); eta 0.2",
    ),
    "mofedsam": Card(
        "FedCM with SAM clients",
        "Qu et al., ICML 2022",
        "alpha 0.1, rho 0.1; best at 0.01 in FedWMSAM's Table 6",
        ("D5", "D11"),
    ),
    "fedgamma": Card("SCAFFOLD with SAM clients", "Dai et al., TNNLS 2023", "rho 0.1"),
    "fedspeed": Card(
        "Prox-correction with SAM clients", "Sun et al., ICLR 2023", "lambda 10 (alpha 0.1), rho 0.1, share 1", ("D12",)
    ),
    "fedsmoo": Card("FedDyn with a regularised perturbation", "Sun et al., ICML 2023", "alpha 0.1, rho 0.1", ("D13",)),
    "fedlesam": Card(
        "Locally estimated global perturbation",
        "Fan et al., ICML 2024",
        "rho 0.1; does not transfer from released code",
        ("D3", "D14"),
    ),
    "fedlesam-s": Card(
        "FedLESAM on SCAFFOLD",
        "Fan et al., ICML 2024",
        "rho 0.1; does not transfer from released code",
        ("D3", "D10", "D14"),
    ),
    "fedlesam-d": Card(
        "FedLESAM on FedDyn", "Fan et al., ICML 2024", "rho 0.1, alpha 0.1; rho does not transfer", ("D3", "D14")
    ),
    "fedswa": Card(
        "Falling local rate and server over-relaxation",
        "Liu et al., ICML 2025",
        "final_lr (rho) 0.1, server_lr (alpha) 1.5, decay 0.998, weight decay 1e-3, gradient clip 10",
        ("D4", "D26", "D28"),
    ),
    "fedmo": Card("Momentum-based stochastic control", "Liu et al., ICML 2025", "gamma 0.2", ("D4", "D6", "D23")),
    "fedmoswa": Card(
        "FedSWA with momentum-based stochastic control",
        "Liu et al., ICML 2025",
        "gamma 0.2, final_lr (rho) 0.1, server_lr (alpha) 1.5, option II",
        ("D4", "D6", "D23", "D26", "D28"),
    ),
    "fedwmsam": Card(
        "Weighted momentum with a guided perturbation",
        "FedWMSAM, NeurIPS 2025",
        "alpha0 0.1, lam 0.01, rho 0.01 (of the released form: re-tune, 0.05 to 0.5), decay 0.998, clip 10",
        ("D3", "D8", "D9", "D22"),
    ),
}

DIFFERENCES: dict[str, Difference] = {
    d.number: d
    for d in (
        Difference(
            "D1",
            "FedSWA main.py:2669-2672 (May 2025)",
            "SCAFFOLD's correction has no gradient: it runs FedAvg",
            "correct",
        ),
        Difference(
            "D2",
            "FedSWA main.py:2263-2270, 1770-1776",
            "FedDyn's local terms have no gradient, the server's scale is wrong",
            "correct",
        ),
        Difference(
            "D3",
            "FedLESAM optimizer/LESAM*.py:32,48; FedWMSAM optimizer/{LESAM*,WMSAM}.py",
            "a flat vector is indexed by tensor number: one scalar shift per tensor, divided by a sum of norms",
            "correct; indexing=tensor, or variant=released",
        ),
        Difference(
            "D4",
            "FedSWA main_FedSWA.py (2026)",
            "runs other algorithms than the paper: no alpha, rho=0, rate x2, cosine",
            "the paper",
        ),
        Difference(
            "D5",
            "FedSWA main.py:2299,2382 vs 1964",
            "SAM baselines run without weight decay and clipping",
            "the same settings for all",
        ),
        Difference(
            "D6",
            "FedSWA main.py:1846,1854-1856,2218-2222",
            "gamma 0.1, gamma 1 in the first round, trapezoid normaliser",
            "the paper; gamma, gamma_first_round, normaliser, or variant=released",
        ),
        Difference(
            "D7",
            "ECCV paper Algorithm 1 vs main.py:177-180",
            "SWA's weight n=t/c leaves 75 % on one snapshot",
            "the code; swa(weighting, capture_phase)",
        ),
        Difference(
            "D8",
            "FedWMSAM slide vs server/FedWMSAM.py:49,84",
            "C3 printed as agreement, coded as disagreement",
            "the code; alpha_signal",
        ),
        Difference("D9", "FedWMSAM slide vs WMSAM.py:51", "C1's sign", "the slide; perturb_sign, or variant=released"),
        Difference(
            "D10", "FedLESAM client/fedlesam_s.py:6", "control variate times 0.1", "1; cv_weight, or variant=released"
        ),
        Difference("D11", "FedLESAM optimizer/ESAM.py:61-62", "MoFedSAM ignores alpha", "correct"),
        Difference(
            "D12",
            "FL-Simulator server/FedSpeed.py:37 vs paper",
            "dual mean over all or active clients",
            "all, which converges; dual_scope",
        ),
        Difference(
            "D13",
            "FL-Simulator server/FedSMOO.py:56-60",
            "s from mu_i alone",
            "the paper, mu_i - sh; s_source, or variant=released",
        ),
        Difference(
            "D14",
            "FedLESAM paper vs server/FedLESAM.py:29",
            "last received model, or last global step",
            "the paper; direction, or variant=released",
        ),
        Difference(
            "D15",
            "google-research yogi.py:129; fedsam fedopt_server.py:105-107",
            "bias correction and v_0",
            "the algorithm; bias_correction, v_init",
        ),
        Difference(
            "D16",
            "FL-Simulator dataset.py:218-220; FedSWA dirichlet_data.py:148",
            "the partition re-uses images",
            "a true partition; partition dirichlet-reuse",
        ),
        Difference(
            "D17",
            "FL-Simulator server.py:71-73",
            "each client sampled with a probability",
            "fixed size; federation.sampling=bernoulli",
        ),
        Difference(
            "D18",
            "fedsam cifar100/dataloader.py:50",
            "Cutout 16 instead of 8 on CIFAR-100",
            "as asked; cutout(size=8) is the paper's",
        ),
        Difference(
            "D19",
            "FedSWA main.py:3024-3032; FedACG base_client.py:204",
            "FedACG's proximal term absent, or un-halved",
            "beta in the usual halved form",
        ),
        Difference(
            "D20", "FedDyn utils_methods.py:229", "c_i divided by the undecayed rate", "by the sum of the rates used"
        ),
        Difference("D21", "FedSim fedprox.py:91, feddyn.py:114", "factors of 0.5", "the standard form"),
        Difference("D22", "FedWMSAM server/FedWMSAM.py:57", "one decay factor 0.998 too many", "without it"),
        Difference(
            "D23", "FedSWA main.py:1938-1944", "client state per Ray actor: stale or foreign c_i", "each client's own"
        ),
        Difference("D24", "ECCV paper eq. 7 at c=1; Table 12; Table 5", "misprints", "the constant rate at c=1"),
        Difference("D25", "WiMA paper eq. 4", "t >= W, W - 1 steps", "the first complete window is after W rounds"),
        Difference(
            "D26",
            "FedSWA paper Algorithm 1; Tables 2, 3, 6",
            "K + 1 steps, T + 1 rounds, unused lambda, tables disagree",
            "K steps, T rounds",
        ),
        Difference(
            "D27",
            "MIME paper vs FedJAX mime.py:92-100",
            "momentum as an exponential average",
            "FedJAX, as in WiMA; form=ema",
        ),
        Difference(
            "D28",
            "FedSWA paper vs main.py:3301",
            "the rate decays before the first round already",
            "the paper; early_decay, or variant=released (fedswa, fedmoswa)",
        ),
        Difference(
            "D29",
            "papers and code of most methods but FedAvg, FedSAM, MIME",
            "clients' displacements count alike, whatever their number of samples",
            "by samples, for all methods alike; federation.weighting=uniform",
        ),
    )
}
