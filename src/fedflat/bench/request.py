"""What a benchmark measures: the requested contenders (fedflat, a plain PyTorch loop, and other simulators)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedflat.algorithms import algorithm, canonical
from fedflat.bench.contender_process import LocalContender
from fedflat.bench.contenders import Fedflat, Plain, SpeedBound
from fedflat.bench.peers import SIMULATORS, Simulator
from fedflat.bench.setting import BenchmarkSetting
from fedflat.data.sources.source import user_cache
from fedflat.errors import UserError, one_of
from fedflat.experiment.setup.engine import check_precision
from fedflat.experiment.setup.problem import build_problem
from fedflat.flatness.precision import gpu_has_tf32
from fedflat.text import parse

PLAIN, NONE = "plain", "none"
PRECISIONS = ("auto", "float32", "tf32", "bf16")
ENGINES = ("auto", "loop", "lanes", "ray")


@dataclass(frozen=True)
class Request:
    """What to measure: every combination of algorithm, precision, engine and number of clients, for ``rounds`` rounds.

    ``against`` names the contenders that fedflat is compared with: the plain loop and other simulators, or ``none``.
    Each simulator has its own environment in ``peer_dir``.
    """

    setting: BenchmarkSetting
    algorithms: Sequence[str] = ("fedavg",)
    precisions: Sequence[str] = ("auto",)
    engines: Sequence[str] = ("auto",)
    clients: Sequence[int] = (100,)
    against: Sequence[str] = (PLAIN,)
    peer_dir: Path = field(default_factory=lambda: user_cache() / "peers")
    rounds: int = 10
    warm_up: int = 2
    concurrent_setups: int = 1
    """Contenders that set up concurrently on a GPU."""

    def check(self) -> None:
        """Raise a ``UserError`` for a request that cannot be measured."""
        setting = self.setting
        _require_known("precision", self.precisions, PRECISIONS)
        _require_known("engine", self.engines, ENGINES)
        _require_known("device", (setting.device,), ("auto", "cpu", "cuda"))
        _require_known("contender", self.against, (PLAIN, *SIMULATORS, NONE))
        precisions = self._precisions()
        if self._simulators() and "float32" not in precisions:
            raise UserError("other simulators are measured in float32; add it to --precision, or use --against plain")
        if "tf32" in precisions and not setting.on_gpu:
            raise UserError("--precision tf32 needs a GPU; use float32 on the CPU")
        for precision in precisions:
            check_precision(precision, setting.on_gpu, "--precision float32")
        if setting.device == "cuda" and not setting.on_gpu:
            raise UserError("--device cuda needs a GPU, but torch finds none; use --device cpu")
        if "mixup" in [call.name for call in parse(setting.augmentation)]:
            raise UserError("the plain loop has no mixup; measure with --augmentation crop-flip or none")
        # Building the problem checks model, partition and augmentation; on the CPU, to leave the GPU to contenders.
        data, on_cpu = setting.load_data(), replace(setting, device="cpu")
        for clients in self.clients:
            build_problem(on_cpu.config(clients=clients), data=data)

    def contenders(self) -> list[LocalContender | Simulator]:
        """Return everything to measure, in the order of the table.

        Only fedflat is measured with every number of clients; the others with the first.
        """
        setting, clients, precisions = self.setting, self.clients[0], self._precisions()
        default_engine = "lanes" if setting.on_gpu else "loop"
        contenders: list[LocalContender | Simulator] = []
        for client_count, precision, engine, text in itertools.product(
            self.clients, precisions, self.engines, self.algorithms
        ):
            resolved_engine = default_engine if engine == "auto" else engine
            contenders.append(Fedflat(setting, canonical(algorithm(text)), precision, resolved_engine, client_count))
        if PLAIN in self.against:
            contenders += [Plain(setting, precision=precision, clients=clients) for precision in precisions]
        contenders += [
            simulator(setting, clients=clients, environment=(self.peer_dir / simulator.key).absolute())
            for simulator in self._simulators()
        ]
        # One bound with compilation if some engine compiles, and one without if some engine does not. On a CPU, bounds
        # are not compiled: compilation slows down one large batch there, and a bound should be the least possible time.
        compilations = sorted({setting.compiled(engine) for engine in self.engines})
        for precision in precisions:
            for compiled in compilations:
                engine = "compiled" if compiled else "eager"
                contenders.append(SpeedBound(setting, "", precision, engine, clients, compiled))
        return contenders

    def _precisions(self) -> list[str]:
        """Return the precisions to measure.

        ``auto`` is the precision that a run would choose. If other simulators are measured, it is float32, like theirs.
        """
        uses_tf32 = self.setting.on_gpu and not self._simulators() and gpu_has_tf32()
        default = "tf32" if uses_tf32 else "float32"
        return list(dict.fromkeys(default if precision == "auto" else precision for precision in self.precisions))

    def _simulators(self) -> list[type[Simulator]]:
        """Return the requested simulators."""
        return [SIMULATORS[name] for name in self.against if name in SIMULATORS]


def _require_known(kind: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise a ``UserError`` for the first name that is not known."""
    for name in names:
        if name not in known:
            raise one_of(kind, name, known)
