"""Full citations of the papers that ``Card.paper`` cites in short form; the page shows the short form of all others."""

from __future__ import annotations

CITATIONS = {
    "McMahan et al., AISTATS 2017": (
        "McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "
        "*Communication-Efficient Learning of Deep Networks from Decentralized Data*. AISTATS 2017"
    ),
    "Hsu et al., 2019": (
        "Hsu, Qi, Brown: "
        "*Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification*. 2019"
    ),
    "Li et al., MLSys 2020": (
        "Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: *Federated Optimization in Heterogeneous Networks*. MLSys 2020"
    ),
    "Reddi et al., ICLR 2021": (
        "Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: *Adaptive Federated Optimization*. ICLR 2021"
    ),
    "Karimireddy et al., ICML 2020": (
        "Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "
        "*SCAFFOLD: Stochastic Controlled Averaging for Federated Learning*. ICML 2020"
    ),
    "Acar et al., ICLR 2021": (
        "Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: "
        "*Federated Learning Based on Dynamic Regularization*. ICLR 2021"
    ),
    "Varno et al., ECCV 2022": (
        "Varno, Saghayi, Rafiee Sevyeri, Gupta, Matwin, Havaei: "
        "*AdaBest: Minimizing Client Drift in Federated Learning via Adaptive Bias Estimation*. ECCV 2022"
    ),
    "Karimireddy et al., NeurIPS 2021": (
        "Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh: "
        "*Breaking the Centralized Barrier for Cross-Device Federated Learning* (MIME). NeurIPS 2021"
    ),
    "Xu et al., 2021": "Xu, Wang, Wang, Yao: *FedCM: Federated Learning with Client-level Momentum*. 2021",
    "Kim et al., CVPR 2024": (
        "Kim, Kim, Han: *Communication-Efficient Federated Learning with Accelerated Client Gradient*. CVPR 2024"
    ),
    "Caldarola et al., ECCV 2022": (
        "Caldarola, Caputo, Ciccone: *Improving Generalization in Federated Learning by Seeking Flat Minima*. ECCV 2022"
    ),
    "Qu et al., ICML 2022": (
        "Qu, Li, Duan, Liu, Tang, Lu: *Generalized Federated Learning via Sharpness Aware Minimization*. ICML 2022"
    ),
    "Dai et al., TNNLS 2023": (
        "Dai, Yang, Sun, Liu, Shen, Tao: "
        "*FedGAMMA: Federated Learning with Global Sharpness-Aware Minimization*. IEEE TNNLS 2023"
    ),
    "Sun et al., ICLR 2023": (
        "Sun, Shen, Huang, Ding, Tao: "
        "*FedSpeed: Larger Local Interval, Less Communication Round, and Higher Generalization Accuracy*. ICLR 2023"
    ),
    "Sun et al., ICML 2023": (
        "Sun, Shen, Chen, Ding, Tao: "
        "*Dynamic Regularized Sharpness Aware Minimization in Federated Learning* (FedSMOO). ICML 2023"
    ),
    "Fan et al., ICML 2024": (
        "Fan, Hu, Yao, Tian, Zhang, Sugiyama, Wang: "
        "*Locally Estimated Global Perturbations are Better than Local Perturbations for Federated Sharpness-aware "
        "Minimization*. ICML 2024"
    ),
    "Liu et al., ICML 2025": (
        "Liu et al.: "
        "*Improving Generalization in Federated Learning with Highly Heterogeneous Data via Momentum-Based "
        "Stochastic Controlled Weight Averaging*. ICML 2025"
    ),
    "Loshchilov and Hutter, ICLR 2019": "Loshchilov, Hutter: *Decoupled Weight Decay Regularization*. ICLR 2019",
    "Jordan et al., 2024": "Jordan et al.: *Muon: An Optimizer for Hidden Layers in Neural Networks*. 2024",
    "FedWMSAM, NeurIPS 2025": "FedWMSAM, NeurIPS 2025 (from its slides and published code)",
}


def full_citations(short: str) -> list[str]:
    """The full citation of each paper in ``short``, which separates papers by ``; ``."""
    return [CITATIONS.get(paper, paper) for paper in short.split("; ")]
