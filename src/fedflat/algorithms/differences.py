"""Differences between papers and their published code, and which one fedflat follows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """One difference between a paper and published code."""

    number: str
    """Its number in the documentation, D1, D2, ..."""
    where: str
    """Paper, file and lines."""
    fault: str
    """What differs."""
    here: str
    """What fedflat does, and the parameter that selects the other form."""


DIFFERENCES: dict[str, Difference] = {
    number: Difference(number, where, fault, here)
    for number, where, fault, here in (
        (
            "D1",
            "FedSWA main.py:2669-2672 (May 2025)",
            "SCAFFOLD's correction has no gradient, so the code runs FedAvg",
            "correct",
        ),
        (
            "D2",
            "FedSWA main.py:2263-2270, 1770-1776",
            "FedDyn's local terms have no gradient, and the server's scale is wrong",
            "correct",
        ),
        (
            "D3",
            "FedLESAM optimizer/LESAM*.py:32,48; FedWMSAM optimizer/{LESAM*,WMSAM}.py",
            "a flat vector is indexed by tensor number: one scalar shift per tensor, divided by a sum of norms",
            "correct; indexing=tensor, or variant=released",
        ),
        (
            "D4",
            "FedSWA main_FedSWA.py (2026)",
            "runs other algorithms than the paper: no alpha, rho=0, doubled lr, cosine schedule",
            "the paper",
        ),
        (
            "D5",
            "FedSWA main.py:2299,2382 vs 1964",
            "SAM baselines run without weight decay and clipping",
            "the same settings for all algorithms",
        ),
        (
            "D6",
            "FedSWA main.py:1846,1854-1856,2218-2222",
            "gamma 0.1, gamma 1 in the first round, trapezoid normaliser",
            "the paper; gamma, gamma_first_round, normaliser, or variant=released",
        ),
        (
            "D7",
            "Caldarola et al. 2022, Algorithm 1 vs main.py:177-180",
            "SWA's weight n=t/c leaves 75 % on one snapshot",
            "the code; swa(weighting, capture_phase)",
        ),
        (
            "D8",
            "FedWMSAM slide vs server/FedWMSAM.py:49,84",
            "C3 is printed as agreement and coded as disagreement",
            "the code; alpha_signal",
        ),
        ("D9", "FedWMSAM slide vs WMSAM.py:51", "sign of C1", "the slide; perturb_sign, or variant=released"),
        (
            "D10",
            "FedLESAM client/fedlesam_s.py:6",
            "control variate multiplied by 0.1",
            "1; cv_weight, or variant=released",
        ),
        ("D11", "FedLESAM optimizer/ESAM.py:61-62", "MoFedSAM ignores alpha", "correct"),
        (
            "D12",
            "FL-Simulator server/FedSpeed.py:37 vs paper",
            "mean of the duals over all or active clients",
            "all clients, which converges; dual_scope",
        ),
        (
            "D13",
            "FL-Simulator server/FedSMOO.py:56-60",
            "s is computed from mu_i alone",
            "the paper, mu_i - sh; s_source, or variant=released",
        ),
        (
            "D14",
            "FedLESAM paper vs server/FedLESAM.py:29",
            "previously received model vs last global step",
            "the paper; direction, or variant=released",
        ),
        (
            "D15",
            "google-research yogi.py:129; fedsam fedopt_server.py:105-107",
            "bias correction and initial v",
            "the paper's algorithm; bias_correction, v_init",
        ),
        (
            "D16",
            "FL-Simulator dataset.py:218-220; FedSWA dirichlet_data.py:148",
            "the partition assigns some images to several clients",
            "a true partition; partition dirichlet-reuse",
        ),
        (
            "D17",
            "FL-Simulator server.py:71-73",
            "each client is sampled independently with a fixed probability",
            "fixed cohort size; federation.sampling=bernoulli",
        ),
        (
            "D18",
            "fedsam cifar100/dataloader.py:50",
            "Cutout size 16 instead of 8 on CIFAR-100",
            "the size given; the paper's is cutout(size=8)",
        ),
        (
            "D19",
            "FedSWA main.py:3024-3032; FedACG base_client.py:204",
            "FedACG's proximal term is missing, or lacks the factor 1/2",
            "beta with the usual factor 1/2",
        ),
        (
            "D20",
            "FedDyn utils_methods.py:229",
            "c_i is divided by the undecayed learning rate",
            "divided by the sum of the learning rates used",
        ),
        ("D21", "FedSim fedprox.py:91, feddyn.py:114", "additional factors of 0.5", "the standard form"),
        ("D22", "FedWMSAM server/FedWMSAM.py:57", "one additional decay factor 0.998", "no additional factor"),
        (
            "D23",
            "FedSWA main.py:1938-1944",
            "client state is kept per Ray actor: c_i may be stale or another client's",
            "each client's own state",
        ),
        (
            "D24",
            "Caldarola et al. 2022, eq. 7 at c=1; Tables 5 and 12",
            "misprints",
            "a constant learning rate at c=1",
        ),
        ("D25", "WiMA paper, eq. 4", "t >= W, W - 1 steps", "the first complete window ends after W rounds"),
        (
            "D26",
            "FedSWA paper, Algorithm 1; Tables 2, 3, 6",
            "K + 1 steps, T + 1 rounds, unused lambda, contradictory tables",
            "K steps, T rounds",
        ),
        (
            "D27",
            "MIME paper vs FedJAX mime.py:92-100",
            "momentum as an exponential moving average",
            "FedJAX, as in WiMA; form=ema",
        ),
        (
            "D28",
            "FedSWA paper vs main.py:3301",
            "the learning rate decays before the first round",
            "the paper; early_decay, or variant=released (fedswa, fedmoswa)",
        ),
        (
            "D29",
            "papers and code of most methods except FedAvg, FedSAM, MIME",
            "displacements are averaged uniformly, whatever the sample counts",
            "weighted by samples for all methods; federation.weighting=uniform",
        ),
    )
}
"""Differences by number."""
