"""All methods by name: METHODS[name](problem, x0, cohorts, eta, steps, **parameters) -> Trace."""

from collections.abc import Callable

from . import plain, sharpness, variates
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
    )
}
