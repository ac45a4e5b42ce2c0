"""Private runs: clipping, noise, equal results on all engines, what is recorded, and what is rejected."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fedflat
from fedflat.algorithms import algorithm
from fedflat.api import make_config
from fedflat.cli.application import app
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.round.privacy import clip_together, secure_normal
from fedflat.errors import UserError
from fedflat.experiment.analysis.replay import Replay
from fedflat.experiment.campaign.branch import branch_point
from fedflat.experiment.run import Run
from fedflat.experiment.setup.engine import training_of
from fedflat.experiment.setup.problem import build_problem
from fedflat.experiment.store.run_folder import RunFolder
from fedflat.experiment.timeline import TimelineSetup, timeline_for
from fedflat.reporting.progress import latest_metrics

from ..cluster.federations import same, small, walk

SETTINGS: dict[str, Any] = {
    "rounds": 4,
    "clients": 12,
    "clients_per_round": 3,
    "local_steps": 1,
    "workers": 1,
    "model": "mlp(hidden=2)",
    "evaluation__examples": 20,
}
CLIP = 0.01


@pytest.mark.parametrize("name", ["fedsam", "scaffold", "fedmoswa"])
def test_all_messages_of_a_client_are_clipped_together(name: str) -> None:
    """Their joint norm is the clipping norm, and they keep their direction."""
    messages = []
    for privacy in (None, f"dp(noise=1e-9,clip={CLIP})"):
        config = small(algorithm=name, privacy=privacy, federation__weighting="uniform")
        replay = Replay(config, *build_problem(config), workers=1)
        replay.advance()
        buffers = replay.engine.cohort_buffers  # type: ignore[attr-defined]
        messages.append(torch.cat([buffers.displacement, *buffers.sent.values()], dim=1))
    plain, clipped = messages
    assert (plain.norm(dim=1) > CLIP).all()
    torch.testing.assert_close(clipped, CLIP * plain / plain.norm(dim=1, keepdim=True))
    assert (clipped.double().norm(dim=1) <= CLIP * (1 + 1e-6)).all()


def test_short_messages_are_not_changed() -> None:
    vectors = [torch.tensor([0.3, 0.0]), torch.tensor([0.0, 0.4]), torch.zeros(2)]
    before = [vector.clone() for vector in vectors]
    for clip, factor in ((0.5, 1.0), (0.25, 0.5)):
        clip_together(vectors, clip)
        assert all(torch.allclose(now, factor * old) for now, old in zip(vectors, before, strict=True))
    zero = [torch.zeros(3)]
    clip_together(zero, 1.0)
    assert torch.equal(zero[0], torch.zeros(3))


@pytest.mark.parametrize("privacy", ["dp(noise=2,clip=0.01)", "local-dp(noise=2,clip=0.01)"])
def test_the_noise_has_the_stated_deviation(privacy: str) -> None:
    """The mean over five clients has noise sigma C / 5, or, if each of them adds its own, sigma C / sqrt(5)."""
    options = {"model": "mlp(hidden=200)", "local_steps": 1, "algorithm": "scaffold"}
    outcomes = []
    for text in (privacy, privacy.replace("noise=2", "noise=1e-9")):
        config = small(privacy=text, **options)
        outcomes.append(Replay(config, *build_problem(config), workers=1).advance())
    noise = 2 * CLIP / (5**0.5 if privacy.startswith("local") else 5)
    noisy, silent = outcomes
    added = noisy.cohort_means.displacement - silent.cohort_means.displacement
    other = noisy.message_means["drift"]["dc"] - silent.message_means["drift"]["dc"]
    for difference in (added, other):
        assert float(difference.std()) == pytest.approx(noise, rel=0.03) and abs(float(difference.mean())) < noise / 20
    assert abs(float(torch.corrcoef(torch.stack([added, other]))[0, 1])) < 0.05
    assert torch.equal(noisy.cohort_means.uniform, noisy.cohort_means.displacement)
    assert torch.allclose(noisy.cohort_means.direction, -noisy.cohort_means.displacement / noisy.lr_sums[0])  # type: ignore[index]


@pytest.mark.parametrize("privacy", ["dp(noise=1)", "local-dp(noise=1)"])
def test_lanes_have_the_noise_of_the_loop(privacy: str) -> None:
    """Noise that differs between rounds and clients, but not between engines."""
    config = small(privacy=privacy, algorithm="fedcm+sam")
    loop = walk(config, rounds=3)
    assert same(loop, walk(config, LaneEngine(build_problem(config)[0], lanes=2), rounds=3))
    assert not same(loop, walk(config.model_copy(update={"seed": 4}), rounds=3))
    replay = Replay(config, *build_problem(config), workers=1)
    first, second = (replay.advance().cohort_means.displacement for _ in range(2))
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.2


def test_secure_noise_is_standard_normal_and_unpredictable() -> None:
    like = torch.zeros(3, 33_333, dtype=torch.float64)
    torch.manual_seed(0)
    one = secure_normal(like)
    torch.manual_seed(0)
    assert not torch.equal(one, secure_normal(like)) and one.shape == like.shape and one.dtype == like.dtype
    moments = [float((one**power).mean()) for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.25), "8 deviations of the fourth"
    within = [float((one.abs() < bound).double().mean()) for bound in (1, 2, 3)]
    assert within == pytest.approx([0.6827, 0.9545, 0.9973], abs=0.01)


def test_epsilon_is_recorded_shown_and_cannot_change(tmp_path: Path) -> None:
    """In metrics, progress and show; a resumed run keeps its settings and ends with the same bits."""
    out, budget = tmp_path / "run", "dp(epsilon=8,clip=0.5)"
    whole = fedflat.run("fedsam", privacy=budget, **SETTINGS)
    epsilons = [entry["epsilon"] for entry in whole.record.history]
    assert epsilons[0] == 0 and epsilons == sorted(epsilons) and 7.9 < epsilons[-1] <= 8

    class Killed(fedflat.Callback):
        """Ends the process, as far as a test can, in round 3."""

        def evaluated(self, run: Any) -> None:
            assert f"epsilon {run.history[-1]['epsilon']:.3g}" in latest_metrics(run)

        def round_done(self, run: Any) -> None:
            if run.rounds == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedflat.run("fedsam", privacy=budget, out=out, callbacks=Killed(), engine__checkpoint_every=1, **SETTINGS)
    for other in ("dp(noise=0.001,clip=0.5)", "none"):
        with pytest.raises(UserError, match=r"federation\.privacy"):
            Run(make_config(RunFolder(out).config(), {"privacy": other}), out, resume=True).execute()
    resumed = fedflat.resume(out)
    assert resumed.record.history == whole.record.history
    shown = CliRunner().invoke(app, ["show", str(out)]).stdout
    assert "epsilon 8" in shown and "federation.privacy" in shown and budget in shown
    with pytest.raises(UserError, match="private run"):
        branch_point(f"{out}@4")


def test_the_plan_states_the_noise() -> None:
    words = ["run", "fedsam", "--privacy", "DP(epsilon=8,clip=0.5)", "--rounds", "50", "--dry-run"]
    output = CliRunner().invoke(app, words)
    assert "privacy: dp(epsilon=8,clip=0.5)" in output.stdout and "weighting: uniform" in output.stdout
    pattern = (
        r"privacy: central, epsilon 8 after 50 rounds \(delta 1e-05\), noise multiplier \d\.\d+, clipping norm 0\.5"
    )
    assert re.search(pattern, output.stderr)
    assert small(algorithm="fedavg", privacy=" None").federation.weighting == "samples"  # no privacy
    assert CliRunner().invoke(app, [*words, "--set", "algorithm=fedexp"]).exit_code != 0


def test_a_run_stops_at_its_budget() -> None:
    free = fedflat.run("fedavg", privacy="dp(noise=4)", **SETTINGS)
    third, fourth = (free.record.history[round]["epsilon"] for round in (3, 4))
    budget = (third + fourth) / 2
    result = fedflat.run("fedavg", privacy=f"dp(noise=4,epsilon={budget})", eval_every=2, **SETTINGS)
    assert result.record.status == "stopped" and "round 4 would exceed" in result.record.reason
    assert result.record.history[-1]["round"] == 3 and result.record.history[-1]["epsilon"] == third
    with pytest.raises(UserError, match="first round"):
        fedflat.run("fedavg", privacy="dp(noise=4,epsilon=0.01)", **SETTINGS)


def test_clients_with_state_get_no_amplification() -> None:
    """A client's state depends on the earlier cohorts, so that these are no longer secret."""
    epsilons = {}
    for name in ("fedsam", "scaffold"):
        config = make_config(settings=SETTINGS | {"clients_per_round": 1, "algorithm": name, "privacy": "dp(noise=4)"})
        problem, partition = build_problem(config)
        mechanism = training_of(config, algorithm(name), len(partition.clients), problem).privacy
        assert mechanism is not None
        epsilons[name] = mechanism.epsilon(100)
    assert epsilons["fedsam"] < epsilons["scaffold"]


def test_cohorts_of_real_sites_do_not_follow_from_the_seed() -> None:
    """Amplification by sampling needs cohorts that sites, which know the seed, cannot predict."""
    config = make_config(settings=SETTINGS | {"algorithm": "fedavg", "privacy": "dp(noise=4)"})
    problem, partition = build_problem(config)

    def cohorts(is_deployed: bool) -> list[list[int]]:
        training = training_of(config, algorithm("fedavg"), len(partition.clients), problem, is_deployed)
        timeline = timeline_for(TimelineSetup(config, training.algorithm, training, problem, partition.clients))
        return [[number for number, _ in timeline.upcoming(round)] for round in range(20)]

    assert cohorts(is_deployed=False) == cohorts(is_deployed=False)
    assert cohorts(is_deployed=True) != cohorts(is_deployed=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"privacy": "dp"}, "give a budget"),
        ({"privacy": "dp(noise=0)"}, "noise"),
        ({"privacy": "dp(epsilon=8,sigma=1)"}, "sigma"),
        ({"privacy": "gaussian(noise=1)"}, "dp, local-dp"),
        ({"privacy": "dp(epsilon=1e-9)"}, "no noise gives"),
        ({"federation__weighting": "samples"}, "equal weights"),
        ({"federation__aggregation": "median"}, "median"),
        ({"federation__sampling": "bernoulli"}, "fixed size"),
        ({"policy": "fedbuff"}, "fedbuff"),
        ({"policy": "over-select", "clock": "lognormal"}, "over-select"),
        ({"clock": "lognormal+diurnal"}, "availability"),
        ({"algorithm": "mime"}, "gradient of their data"),
        ({"algorithm": "mimelite-sgdm"}, "number of examples"),
        ({"algorithm": "fednova"}, "the number a"),
        ({"algorithm": "fedexp"}, "the number square"),
        ({"algorithm": "feddisco"}, "weights of clients"),
        ({"algorithm": "fedawa"}, "weights of clients"),
        ({"algorithm": "fedadamw"}, "second moments"),
        ({"algorithm": "fedcm", "local_steps": None}, "training.local_steps"),
        ({"algorithm": "fedcm", "federation__partial": 0.5}, "federation.partial"),
        ({"model": "resnet20(norm=batch)"}, "training.statistics=own"),
    ],
    ids=str,
)
def test_combinations_without_a_guarantee_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        fedflat.run(**{"algorithm": "fedavg", "privacy": "dp(noise=1)", **SETTINGS, **settings})
