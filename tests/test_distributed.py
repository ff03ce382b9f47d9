"""Two ranks on gloo: what they agree on, and that they equal one process with the same rows."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_env import CPU, Script, ScriptedEnv, make_collector, make_policy, random_script
from impala_cases import make_learner
from small_runs import SMALL, rows
from torch.multiprocessing.spawn import spawn

from trainer import distributed
from trainer.config import CreditConfig, PPOConfig
from trainer.episodes import EpisodeTracker
from trainer.estimator import estimate
from trainer.graphs import Graphs
from trainer.normalize import ObservationNormalizer, RunningMoments, ValueNormalizer, moments
from trainer.policy import ActorCritic
from trainer.ppo import PPO
from trainer.rollout import Rollout

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
Result = dict[str, Any]


# --- what each rank does --------------------------------------------------------------------------------------------


def columns(script: Script, rank: int) -> Script:
    """The script's envs of one rank: 3 and 5 of 8, so that ranks have unlike numbers of rows."""
    return Script(*(tensor.split([3, 5], dim=1)[rank] for tensor in script))


def collected(script: Script) -> tuple[ActorCritic, Rollout]:
    env = ScriptedEnv(script)
    policy = make_policy(env)
    rollout = make_collector(env, policy, len(script.rewards)).collect()
    rollout.actions.copy_((10 * script.observations[:-1, :, 0].abs()).long() % 3)  # the same however envs are split
    observations = rollout.observations[:-1].flatten(0, 1)
    log_probs = policy.evaluate(observations, rollout.actions.flatten()).log_probs
    rollout.log_probs.copy_(log_probs.detach().view_as(rollout.log_probs))
    return policy, rollout


def update(
    policy: ActorCritic, rollout: Rollout, normalizer: ValueNormalizer | None = None, seed: int = 0, **options: Any
) -> Result:
    """One update; all metrics, and the parameters and number of steps afterwards."""
    config = PPOConfig(**{"learning_rate": 1e-2, "lr_schedule": "constant", **options})
    estimator = partial(estimate, config=CreditConfig(), backend="torch")
    ppo = PPO(policy, normalizer, estimator, config, Graphs())
    torch.manual_seed(seed)
    metrics = ppo.update(rollout, rollout.rewards, 0.0)
    return {
        "metrics": {name: float(value) for name, value in metrics.items()},
        "parameters": torch.nn.utils.parameters_to_vector(policy.parameters()).detach(),
        "steps": float(ppo.optimizer.moments.steps),
    }


SCRIPT = random_script(9, 8, seed=2)


def primitives(rank: int) -> Result:
    parameter = torch.nn.Parameter(torch.full((2, 3), float(rank)))
    untouched = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((2, 3), 1.0 + rank)
    distributed.sum_gradients_([parameter, untouched])
    distributed.broadcast_parameters_([parameter])
    return {
        "rank": (distributed.rank(), distributed.world_size()),
        "sum": distributed.sum_(torch.tensor([1.0, 10.0]) * (rank + 1)).tolist(),
        "gradient": parameter.grad,
        "parameter": parameter.detach(),
        "any": [distributed.any_rank(flag, CPU) for flag in (False, rank == 1, True)],
    }


def merged_moments(rank: int) -> Result:
    script = columns(SCRIPT, rank)
    rows, valid = script.observations[:-1].flatten(0, 1) + 1e4, script.valid.flatten()
    running = RunningMoments((3,))
    for part, mask in zip(rows.tensor_split(3), valid.tensor_split(3), strict=True):
        running.update(part, mask)
    return {
        "merged": distributed.merge_moments(moments(rows, valid)),
        "running": torch.stack([running.count.expand(3), running.mean, running.m2]),
    }


def episodes(rollout: Rollout) -> Result:
    """Twice the same window, as of one update and the next."""
    tracker = EpisodeTracker(rollout.valid.shape[1], 1000, "torch", CPU)
    for _ in range(2):
        tracker.record(tracker.follow(rollout))
        statistics = tracker.statistics()
    return statistics._asdict()


def on_policy(policy: ActorCritic, rollout: Rollout) -> Result:
    return update(policy, rollout, ValueNormalizer(), num_minibatches=1, update_epochs=3, lr_schedule="adaptive")


def whole_batch(rank: int) -> Result:
    return on_policy(*collected(columns(SCRIPT, rank)))


def off_policy(policy: ActorCritic, rollout: Rollout) -> Result:
    """Two updates of IMPALA with everything that ranks merge: gradients, advantage moments, both normalizers."""
    normalizers = ValueNormalizer(), ObservationNormalizer((3,), clip=10.0)
    learner = make_learner(
        policy, CreditConfig(estimator="vtrace"), *normalizers, update_epochs=2, normalize_advantages=True
    )
    for _ in range(2):
        metrics = learner.update(rollout, rollout.rewards, 0.0)
    return {
        "metrics": {name: float(value) for name, value in metrics.items()},
        "parameters": torch.nn.utils.parameters_to_vector(policy.parameters()).detach(),
        "steps": float(learner.optimizer.state_dict()["state"][0]["step"]),
    }


def with_kls(kls: tuple[float, float]) -> Callable[[int], Result]:
    """Every row of a rank has the same log-ratio at first, of the KL that is asked for."""

    def run(rank: int) -> Result:
        policy, rollout = collected(random_script(6, 4, seed=rank, end_rate=0.0))
        log_ratio = torch.tensor(kls[rank]).mul(2).sqrt()
        for _ in range(20):  # Newton: exp(x) - 1 - x = kl
            log_ratio -= (log_ratio.expm1() - log_ratio - kls[rank]) / log_ratio.expm1()
        rollout.log_probs -= log_ratio
        return update(policy, rollout, target_kl=0.04, update_epochs=4, num_minibatches=2, seed=rank)

    return run


def drifting(rank: int) -> Result:
    """Updates large enough to pass the threshold halfway."""
    policy, rollout = collected(random_script(6, 4, seed=rank, end_rate=0.0))
    return update(policy, rollout, target_kl=0.01, learning_rate=3e-2, update_epochs=4, num_minibatches=2, seed=rank)


def nan_on(broken: int) -> Callable[[int], Result]:
    """One log-prob of one rank is NaN, in its second minibatch."""

    def run(rank: int) -> Result:
        policy, rollout = collected(random_script(6, 4, seed=rank, end_rate=0.0))
        torch.manual_seed(rank)  # as the update does, to know its first order
        row = torch.randperm(24).tensor_split(2)[1][0]
        if rank == broken:
            rollout.log_probs.view(-1)[row] = torch.nan
        return update(policy, rollout, update_epochs=4, num_minibatches=2, seed=rank)

    return run


SCENARIOS: dict[str, Callable[[int], Result]] = {
    "primitives": primitives,
    "moments": merged_moments,
    "episodes": lambda rank: episodes(collected(columns(SCRIPT, rank))[1]),
    "whole batch": whole_batch,
    "off policy": lambda rank: off_policy(*collected(columns(SCRIPT, rank))),
    "kls": with_kls((0.01, 0.09)),
    "kls swapped": with_kls((0.09, 0.01)),
    "kls below": with_kls((0.01, 0.03)),
    "drift": drifting,
    "nan 0": nan_on(0),
    "nan 1": nan_on(1),
}


def work(rank: int, port: int, folder: str) -> None:
    os.environ.update(WORLD_SIZE=str(RANKS), RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    distributed.initialize("cpu")
    torch.save({name: run(rank) for name, run in SCENARIOS.items()}, Path(folder) / f"{rank}.pt")
    distributed.shutdown()


# --- what a test looks at -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Result]]:
    """The results of every scenario on every rank; one start of two processes for all of them."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = spawn(work, (port, str(folder)), nprocs=RANKS, join=False, daemon=True)
    assert context is not None
    if not context.join(timeout=60):  # joins all, or tells that one has ended
        assert context.join(timeout=60)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def test_the_small_agreements(ranks: list[dict[str, Result]]) -> None:
    for rank, results in enumerate(ranks):
        got = results["primitives"]
        assert got["rank"] == (rank, RANKS)
        assert got["sum"] == [3.0, 30.0]
        assert torch.equal(got["gradient"], torch.full((2, 3), 3.0))
        assert torch.equal(got["parameter"], torch.zeros(2, 3))
        assert got["any"] == [False, True, True]


def test_merged_moments_are_those_of_all_rows(ranks: list[dict[str, Result]]) -> None:
    rows = SCRIPT.observations[:-1][SCRIPT.valid].double() + 1e4
    rows = rows.float().double()  # as the ranks saw them
    expected = torch.stack([torch.full((3,), len(rows)), rows.mean(0), (rows - rows.mean(0)).square().sum(0)])
    for results in ranks:
        for got in results["moments"].values():
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=0)


def test_episode_statistics_are_those_of_all_ranks(ranks: list[dict[str, Result]]) -> None:
    alone = episodes(collected(SCRIPT)[1])
    assert alone["episodes"] > 10
    for results in ranks:
        assert results["episodes"] == pytest.approx(alone)


@pytest.mark.parametrize(("scenario", "learn", "steps"), [("whole batch", on_policy, 3), ("off policy", off_policy, 4)])
def test_two_ranks_equal_one_process_with_all_their_envs(
    ranks: list[dict[str, Result]], scenario: str, learn: Callable[[ActorCritic, Rollout], Result], steps: int
) -> None:
    alone = learn(*collected(SCRIPT))
    assert alone["steps"] == steps
    for results in ranks:
        together = results[scenario]
        # sums over rows in another order
        torch.testing.assert_close(together["parameters"], alone["parameters"], rtol=1e-4, atol=1e-5)
        shared = alone["metrics"].keys() - {"explained_variance"}  # of a rank's own rows
        for name in shared:
            assert together["metrics"][name] == pytest.approx(alone["metrics"][name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name not in ("primitives", "moments", "episodes")])
def test_ranks_leave_an_update_with_the_same_parameters_and_metrics(
    ranks: list[dict[str, Result]], scenario: str
) -> None:
    first, second = (results[scenario] for results in ranks)
    assert torch.equal(first["parameters"], second["parameters"])
    assert first["steps"] == second["steps"]
    own = "explained_variance"
    assert {**first["metrics"], own: 0} == {**second["metrics"], own: 0}


@pytest.mark.parametrize("scenario", ["kls", "kls swapped"])
def test_a_mean_kl_above_the_threshold_stops_both_ranks(ranks: list[dict[str, Result]], scenario: str) -> None:
    for results in ranks:
        assert results[scenario]["steps"] == 0
        assert results[scenario]["metrics"]["stopped_minibatches"] == 8
        assert results[scenario]["metrics"]["loss/approx_kl"] == pytest.approx(0.05, rel=1e-4)


def test_a_mean_kl_below_the_threshold_stops_neither(ranks: list[dict[str, Result]]) -> None:
    for results in ranks:
        assert results["kls below"]["steps"] > 0


def test_a_kl_that_grows_stops_both_ranks_at_the_same_minibatch(ranks: list[dict[str, Result]]) -> None:
    steps = [results["drift"]["steps"] for results in ranks]
    assert 0 < steps[0] == steps[1] < 8


@pytest.mark.parametrize("scenario", ["nan 0", "nan 1"])
def test_a_nan_on_one_rank_is_withheld_on_both(ranks: list[dict[str, Result]], scenario: str) -> None:
    for results in ranks:
        assert results[scenario]["steps"] == 1
        assert results[scenario]["metrics"]["skipped_minibatches"] == 7
        assert results[scenario]["parameters"].isfinite().all()


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    return subprocess.run(
        [*launcher, str(ROOT / "scripts/train.py"), *arguments],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, TWO_GPUS])])
def test_the_command_under_torchrun_trains_one_run_in_one_folder(tmp_path: Path, device: str) -> None:
    settings = [setting for setting in SMALL if not setting.startswith("device=")]
    done = torchrun(tmp_path, *settings, f"device={device}", "env.engine=torch", "total_steps=500", "out=run")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    history = rows(tmp_path / "run")
    assert history[0]["env_steps"] > 8 * 8, "more rows than one rank has"
    assert history[-1]["env_steps"] >= 500 > history[-2]["env_steps"]
    assert done.stderr.count("finished after") == 1


def test_a_single_process_agrees_with_itself() -> None:
    tensor = torch.tensor([1.0, 2.0, 3.0])
    assert (distributed.rank(), distributed.world_size(), distributed.local_rank()) == (0, 1, 0)
    assert distributed.sum_(tensor) is tensor
    assert distributed.merge_moments(tensor) is tensor
    assert [distributed.any_rank(flag, CPU) for flag in (False, True)] == [False, True]
    distributed.initialize("cpu")
    distributed.shutdown()
    assert not torch.distributed.is_initialized()
