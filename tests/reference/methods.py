"""All methods by name: METHODS[name](problem, x0, cohorts, eta, steps, **parameters) -> Trace."""

from collections.abc import Callable

from . import duals, momenta, normalised, optimisers, plain, servers, sharpness, teacher, variates, weights
from .trace import Trace

METHODS: dict[str, Callable[..., Trace]] = {
    method.__name__: method
    for method in (
        plain.fedavg,
        plain.fedavgm,
        plain.fedprox,
        plain.fedadam,
        plain.fedyogi,
        plain.fedadagrad,
        plain.fedacg,
        plain.fedcm,
        plain.mime,
        plain.mimelite,
        plain.fedswa,
        servers.fedexp,
        servers.fedinit,
        weights.feddisco,
        weights.fedscam,
        weights.fedawa,
        variates.scaffold,
        variates.feddyn,
        variates.adabest,
        variates.fedmo,
        variates.fedmoswa,
        sharpness.fedsam,
        sharpness.fedasam,
        sharpness.mofedsam,
        sharpness.fedgamma,
        sharpness.fedspeed,
        sharpness.fedsmoo,
        sharpness.fedlesam,
        sharpness.fedlesam_s,
        sharpness.fedlesam_d,
        sharpness.fedwmsam,
        optimisers.local_adamw,
        optimisers.fedadamw,
        optimisers.local_muon,
        optimisers.fedmuon,
        teacher.fedgmt,
        teacher.fedsol,
        duals.fedgloss,
        duals.feddc,
        momenta.fednsam,
        momenta.ghbm,
        momenta.localghbm,
        momenta.fedhbm,
        normalised.fednova,
    )
}
