"""Where every named algorithm comes from, in a few words."""

from __future__ import annotations

CITATIONS = {
    "fedavg": "McMahan et al. 2017",
    "fedavgm": "Hsu et al. 2019",
    "fedprox": "Li et al. 2020",
    "fedadam": "Reddi et al. 2021",
    "fedyogi": "Reddi et al. 2021",
    "fedadagrad": "Reddi et al. 2021",
    "scaffold": "Karimireddy et al. 2020",
    "feddyn": "Acar et al. 2021",
    "adabest": "Varno et al. 2022",
    "mime": "Karimireddy et al. 2021",
    "mime-sgdm": "Karimireddy et al. 2021",
    "mimelite": "Karimireddy et al. 2021",
    "mimelite-sgdm": "Karimireddy et al. 2021",
    "fedcm": "Xu et al. 2021",
    "fedacg": "Kim et al. 2024",
    "fedsam": "Qu; Caldarola et al. 2022",
    "fedasam": "Caldarola et al. 2022",
    "mofedsam": "Qu et al. 2022",
    "fedgamma": "Dai et al. 2023",
    "fedspeed": "Sun et al. 2023 (ICLR)",
    "fedsmoo": "Sun et al. 2023 (ICML)",
    "fedlesam": "Fan et al. 2024",
    "fedlesam-s": "Fan et al. 2024",
    "fedlesam-d": "Fan et al. 2024",
    "fedswa": "Liu et al. 2025",
    "fedmo": "Liu et al. 2025",
    "fedmoswa": "Liu et al. 2025",
    "fedwmsam": "NeurIPS 2025",
}
