"""The specification's identities as data: pairs of methods that agree, and symmetries that hold or fail."""

from typing import Any, NamedTuple


class Identity(NamedTuple):
    """Identity `number` of the specification: both sides have the same iterates."""

    number: int
    left: str
    left_parameters: dict[str, Any]
    right: str
    right_parameters: dict[str, Any]

    @property
    def sides(self) -> tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]]]:
        return (self.left, self.left_parameters), (self.right, self.right_parameters)

    def __str__(self) -> str:
        left, right = (
            f"{name}({','.join(f'{key}={value}' for key, value in parameters.items())})"
            for name, parameters in self.sides
        )
        return f"{self.number}:{left}={right}"


# For any participation, learning rates that change over rounds, and unequal numbers of local steps.
REDUCTIONS = [
    Identity(1, "fedswa", {"final_lr": 1.0, "server_lr": 1.0}, "fedavg", {}),
    Identity(2, "fedswa", {"final_lr": 1.0, "server_lr": 1.3}, "fedavg", {"server_lr": 1.3}),
    Identity(2, "fedavgm", {"beta": 0.0, "server_lr": 1.3}, "fedavg", {"server_lr": 1.3}),
    Identity(3, "fedsam", {"rho": 0.0}, "fedavg", {}),
    Identity(3, "fedasam", {"rho": 0.0}, "fedavg", {}),
    Identity(4, "fedprox", {"mu": 0.0}, "fedavg", {}),
    Identity(6, "fedacg", {"lam": 0.0, "beta": 0.0}, "fedavg", {}),
    Identity(6, "fedacg", {"lam": 0.0, "beta": 0.3}, "fedprox", {"mu": 0.3}),
    Identity(7, "fedcm", {"alpha": 1.0}, "fedavg", {}),
    Identity(7, "mofedsam", {"alpha": 1.0, "rho": 0.1}, "fedsam", {"rho": 0.1}),
    Identity(9, "mofedsam", {"alpha": 0.2, "rho": 0.0}, "fedcm", {"alpha": 0.2}),
    Identity(9, "fedgamma", {"rho": 0.0}, "scaffold", {}),
    Identity(10, "fedwmsam", {"rho": 0.0, "personal": False, "lam": 0.0, "alpha0": 0.1}, "fedcm", {"alpha": 0.1}),
    Identity(11, "fedwmsam", {"rho": 0.0, "lam": 0.0, "alpha0": 1.0}, "scaffold", {}),
    Identity(11, "fedwmsam", {"rho": 0.0, "lam": 0.0, "alpha0": 1.0, "personal": False}, "fedavg", {}),
    Identity(12, "fedlesam", {"rho": 0.0}, "fedavg", {}),
    Identity(12, "fedlesam_s", {"rho": 0.0}, "scaffold", {}),
    Identity(12, "fedlesam_s", {"rho": 0.0, "cv_weight": 0.1}, "scaffold", {"cv_weight": 0.1}),
    Identity(12, "fedlesam_d", {"rho": 0.0, "alpha": 0.3}, "feddyn", {"alpha": 0.3}),
    Identity(14, "fedsmoo", {"rho": 0.0, "alpha": 0.3}, "feddyn", {"alpha": 0.3}),
    Identity(14, "fedspeed", {"rho": 0.0, "alpha": 0.3}, "feddyn", {"alpha": 0.3}),
    Identity(14, "fedspeed", {"share": 0.0, "rho": 0.2, "alpha": 0.3}, "feddyn", {"alpha": 0.3}),
    Identity(18, "fedmoswa", {"final_lr": 1.0, "server_lr": 1.0}, "fedmo", {}),
    Identity(18, "fedmoswa", {"final_lr": 1.0, "server_lr": 1.0, "normaliser": "trapezoid"}, "fedmo", {}),
    Identity(20, "fedadam", {"beta1": 0.0, "beta2": 1.0, "tau": 0.1, "server_lr": 0.2}, "fedavg", {}),
    Identity(22, "mimelite", {"beta": 0.0}, "fedavg", {}),
    Identity(22, "mimelite", {"beta": 0.0, "form": "ema"}, "fedavg", {}),
    Identity(25, "adabest", {"mu": 0.0, "beta": 0.0}, "fedavg", {}),
    Identity(142, "fedsol", {"rho": 0.0}, "fedavg", {}),
    Identity(101, "fedgloss", {"server_rho": 0.0, "rho": 0.0, "alpha": 0.3}, "feddyn", {"alpha": 0.3}),
    Identity(102, "fedgloss", {"server_rho": 0.0, "rho": 0.2}, "fedspeed", {"rho": 0.2, "alpha": 0.1}),
    Identity(107, "fednsam", {"lam": 0.0, "rho": 0.0}, "fedavg", {}),
    Identity(108, "fednsam", {"lam": 0.6, "rho": 0.0}, "fedacg", {"lam": 0.6, "beta": 0.0}),
    Identity(110, "fednsam", {"lam": 0.0, "rho": 0.3}, "fedlesam", {"rho": 0.3, "direction": "global"}),
    Identity(113, "ghbm", {"beta": 0.0, "tau": 2}, "fedavg", {}),
    Identity(113, "localghbm", {"beta": 0.0, "participation": 0.5}, "fedavg", {}),
    Identity(113, "fedhbm", {"beta": 0.0, "participation": 0.5}, "fedavg", {}),
    Identity(137, "fedinit", {"beta": 0.0}, "fedavg", {}),
    Identity(121, "fedexp", {"eps": 1e12}, "fedavg", {}),
]

# For full participation only; they differ under partial participation.
REDUCTIONS_IF_FULL = [
    Identity(13, "fedlesam", {"rho": 0.2}, "fedlesam", {"rho": 0.2, "direction": "global"}),
    Identity(13, "fedlesam_s", {"rho": 0.2}, "fedlesam_s", {"rho": 0.2, "direction": "global"}),
    Identity(13, "fedlesam_d", {"rho": 0.2}, "fedlesam_d", {"rho": 0.2, "direction": "global"}),
    Identity(15, "fedspeed", {"rho": 0.0, "alpha": 0.1, "dual_scope": "active"}, "feddyn", {"alpha": 0.1}),
    Identity(18, "fedmo", {"gamma": 1.0}, "scaffold", {}),
    Identity(138, "fedinit", {"beta": 0.3}, "fedinit", {"beta": 0.3, "server": "average"}),
    Identity(18, "fedmo", {"gamma": 1.0, "option": "I"}, "scaffold", {"option": "I"}),
    Identity(116, "localghbm", {"beta": 0.5, "participation": 1.0}, "ghbm", {"beta": 0.5, "tau": 1}),
]

# 54: shifting or rotating the problem does not shift or rotate the iterates of these.
NOT_TRANSLATED = ("fedasam", "fedawa")
NOT_ROTATED = (
    "fedasam", "fedadam", "fedyogi", "fedadagrad", "local_adamw", "fedadamw", "local_muon", "fedmuon",
    "fedsol",
)  # fmt: skip

# 55: scaling the loss by s and learning rates by 1/s keeps the iterates if these parameters are scaled by s ...
SCALES_WITH_LOSS = {
    "fedprox": {"mu": 0.2},
    "feddyn": {"alpha": 0.2},
    "fedspeed": {"alpha": 0.2},
    "fedlesam_d": {"alpha": 0.2},
    "adabest": {"mu": 0.2},
    "fedacg": {"beta": 0.2},
    "fedgloss": {"alpha": 0.2},
    "feddc": {"alpha": 0.2},
    "fednova": {"mu": 0.2},
}
# ... and these by 1/s ...
SCALES_AGAINST_LOSS = {"fedgmt": {"beta": 5.0}}
# ... except that FedSMOO subtracts perturbations from gradients and FedWMSAM (rho > 0) a momentum from a model.
# FedSCAM adds a norm of gradients to 1. Adam divides gradients by their size, so only the rate scales its steps.
UNITS_MIXED = ("fedsmoo", "fedwmsam", "fedscam", "local_adamw", "fedadamw", "local_muon", "fedmuon")


def scaled(method: str, s: float) -> dict[str, float]:
    """The parameters of a method for a loss that is multiplied by s."""
    parameters = {name: s * value for name, value in SCALES_WITH_LOSS.get(method, {}).items()}
    return parameters | {name: value / s for name, value in SCALES_AGAINST_LOSS.get(method, {}).items()}


class Limit(NamedTuple):
    """Identity `number`: the method reaches the optimum (1e-6) after `rounds` with `size` clients each (None: all)."""

    number: int
    method: str
    rounds: int
    size: int | None
    parameters: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.number}:{self.method}-{self.size or 'all'}-{'-'.join(map(str, self.parameters.values()))}"


REACHES_OPTIMUM = [
    Limit(36, "scaffold", 60, None, {"option": "I"}),
    Limit(36, "scaffold", 60, None, {"option": "II"}),
    Limit(36, "scaffold", 200, 2, {"option": "II"}),
    Limit(37, "feddyn", 250, None, {"alpha": 0.5}),
    Limit(37, "feddyn", 800, 2, {"alpha": 0.5}),
    Limit(37, "fedlesam_d", 250, None, {"alpha": 0.5, "rho": 0.0}),
    Limit(38, "fedmoswa", 300, None, {"server_lr": 1.0, "option": "I"}),
    Limit(38, "fedmoswa", 300, None, {"server_lr": 1.0, "option": "II"}),
    Limit(38, "fedmoswa", 300, None, {"server_lr": 1.5, "option": "I"}),
    Limit(38, "fedmoswa", 300, None, {"server_lr": 1.5, "option": "II"}),
    Limit(39, "fedwmsam", 400, None, {"rho": 0.0, "alpha0": 0.1}),
    Limit(39, "fedwmsam", 120, None, {"rho": 0.0, "alpha0": 0.5}),
    Limit(39, "fedwmsam", 400, 2, {"rho": 0.0, "alpha0": 0.1}),
    Limit(40, "mime", 60, None, {}),
    Limit(105, "fedgloss", 250, None, {"alpha": 0.5, "server_rho": 0.0, "rho": 0.0}),
    Limit(105, "fedgloss", 400, None, {"alpha": 0.5, "server_rho": 0.0, "rho": 0.0, "dual_divisor": "cohort"}),
    Limit(130, "feddc", 250, None, {"alpha": 0.5}),
    Limit(130, "feddc", 800, 2, {"alpha": 0.5}),
]
