"""Builds the differential-privacy mechanism of a config, and computes the epsilon spent so far."""

from __future__ import annotations

from fedflat.algorithms import Algorithm
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import Engine, RepeatingEngine, Training
from fedflat.errors import UserError
from fedflat.experiment.config import Config
from fedflat.experiment.stopping import Verdict
from fedflat.privacy import GaussianMechanism, privacy_spec


def mechanism_of(
    config: Config, algorithm: Algorithm, clients: int, problem: Problem, is_deployed: bool
) -> GaussianMechanism | None:
    """The mechanism of a run, or None; raises a ``UserError`` if its algorithm or model cannot be protected.

    Args:
        config: the experiment.
        algorithm: its algorithm.
        clients: number of clients.
        problem: model, task and data.
        is_deployed: whether clients are real sites, whose noise must not follow from the run's seed.
    """
    federation, training = config.federation, config.training
    if federation.privacy is None:
        return None
    own_statistics = training.statistics == "own"
    equal_steps = training.local_steps is not None and not federation.partial
    conflicts = (slot.privacy_conflict(equal_steps) for _, slot in algorithm.slots())
    conflict = next(filter(None, conflicts), None)
    if conflict:
        raise UserError(
            f"federation.privacy={federation.privacy} does not work with {config.algorithm}: {conflict}; "
            "algorithms such as fedavg, fedsam or fedmoswa do"
        )
    if problem.buffer_layout.size and not own_statistics:
        raise UserError(
            f"federation.privacy={federation.privacy} does not cover the BatchNorm statistics of {config.model}; "
            "keep them at the clients with training.statistics=own, or use another normalisation"
        )
    keeps_state = own_statistics or any(algorithm.client_fields().values())
    sampling_rate = min(federation.clients_per_round, clients) / clients
    rounds = training.rounds - config.init_rounds
    mechanism = privacy_spec(federation.privacy).mechanism(sampling_rate, rounds, keeps_state, is_deployed)
    if mechanism.exceeds_budget(1):
        raise UserError(
            f"the first round with federation.privacy={federation.privacy} costs epsilon={mechanism.epsilon(1):.3g}; "
            "use more noise or a larger epsilon"
        )
    return mechanism


def _rounds_spent(config: Config, engine: Engine, rounds: int) -> int:
    """Number of rounds that cost epsilon, after ``rounds`` rounds; rounds that were trained twice count twice.

    Initial weights are public, so rounds before ``init_rounds`` do not count.
    """
    repeated = engine.private_rounds if isinstance(engine, RepeatingEngine) else 0
    return max(rounds - config.init_rounds, repeated)


def privacy_metrics(config: Config, training: Training, engine: Engine, rounds: int) -> dict[str, float]:
    """Epsilon after ``rounds`` rounds, for the history; empty for a run without privacy."""
    return {"epsilon": training.privacy.epsilon(_rounds_spent(config, engine, rounds))} if training.privacy else {}


def budget_verdict(config: Config, training: Training, engine: Engine, rounds: int) -> Verdict | None:
    """The verdict ``stopped`` if the round after ``rounds`` rounds would exceed the run's epsilon, else None."""
    if training.privacy is None or rounds == config.training.rounds:
        return None
    if not training.privacy.exceeds_budget(_rounds_spent(config, engine, rounds) + 1):
        return None
    return Verdict("stopped", f"round {rounds + 1} would exceed the budget of {config.federation.privacy}")


def describe_privacy(config: Config, training: Training) -> str:
    """Describe the guarantee of a complete run in one line; empty for a run without privacy."""
    rounds = config.training.rounds - config.init_rounds
    return f"privacy: {training.privacy.describe(rounds)}" if training.privacy else ""
