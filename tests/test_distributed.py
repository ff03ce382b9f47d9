"""Two ranks on gloo: what they agree on, and that they equal one process with the same rows."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_env import CPU
from rank_cases import (
    NOISE,
    RANKS,
    SCENARIOS,
    SCRIPT,
    TARGETS,
    Result,
    collected,
    episodes,
    off_policy,
    on_policy,
    work,
)
from small_runs import SMALL, rows
from torch.multiprocessing.spawn import spawn

from trainer import distributed, losses
from trainer.builder import resolve_device
from trainer.config import ConfigError
from trainer.policy import ActorCritic
from trainer.rollout import Rollout

ROOT = Path(__file__).resolve().parent.parent
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Result]]:
    """The results of every scenario on every rank; one start of two processes for all of them."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = spawn(work, (port, str(folder)), nprocs=RANKS, join=False, daemon=True)
    assert context is not None
    if not context.join(timeout=120):  # joins all, or tells that one has ended
        assert context.join(timeout=120)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def test_the_small_agreements(ranks: list[dict[str, Result]]) -> None:
    for rank, results in enumerate(ranks):
        got = results["primitives"]
        assert got["rank"] == (rank, RANKS)
        assert got["sum"] == [3.0, 30.0]
        assert torch.equal(got["gradient"], torch.full((2, 3), 3.0))
        assert got["report"] == [30.0, 60.0]
        assert torch.equal(got["parameter"], torch.zeros(2, 3))
        assert got["any"] == [False, True, True]


def test_a_rank_without_a_valid_row_explains_nothing(ranks: list[dict[str, Result]]) -> None:
    alone = losses.explained_variance(TARGETS + NOISE, TARGETS, torch.ones(8, dtype=torch.bool))
    for results in ranks:
        assert results["primitives"]["explained"] == pytest.approx(float(alone))


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
        for name, value in alone["metrics"].items():
            assert together["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name not in ("primitives", "moments", "episodes")])
def test_ranks_leave_an_update_with_the_same_parameters_and_metrics(
    ranks: list[dict[str, Result]], scenario: str
) -> None:
    first, second = (results[scenario] for results in ranks)
    assert torch.equal(first["parameters"], second["parameters"])
    assert first["steps"] == second["steps"]
    assert first["metrics"] == second["metrics"]


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


def small_settings_but(*left_out: str) -> list[str]:
    return [setting for setting in SMALL if not setting.startswith(left_out)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, TWO_GPUS])])
def test_the_command_under_torchrun_trains_one_run_in_one_folder(tmp_path: Path, device: str) -> None:
    settings = small_settings_but("device=", "env.num_threads=")
    done = torchrun(tmp_path, *settings, f"device={device}", "env.engine=torch", "total_steps=500", "out=run")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    history = rows(tmp_path / "run")
    assert history[0]["env_steps"] > 8 * 8, "more rows than one rank has"
    assert history[-1]["env_steps"] >= 500 > history[-2]["env_steps"]
    assert done.stderr.count("finished after") == 1


@pytest.mark.gpu
@TWO_GPUS
@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_two_gpus_learn_the_same_with_sums_inside_of_graphs_as_without_graphs(tmp_path: Path, algo: str) -> None:
    settings = small_settings_but("device=", "env.num_threads=", "ppo.", "total_steps=")
    settings += [f"algo={algo}", "device=cuda", "env.engine=torch", "env.options.compile=false", "total_steps=3000"]
    if algo == "impala":
        settings.append("impala.force_lag=0")  # repeatable; batches before the first graph have no lag in any case
    losses = []
    for graphs in (True, False):
        done = torchrun(tmp_path, *settings, f"cuda_graphs={graphs}", f"out={graphs}")
        assert done.returncode == 0, done.stderr
        assert "cannot be captured" not in done.stderr
        losses.append([row["loss/total"] for row in rows(tmp_path / str(graphs))])
    assert losses[0] == losses[1]
    assert len(losses[0]) > 10


def test_one_gpu_for_several_ranks_of_a_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"^device=cuda:1 is one GPU for 2 ranks of this host; use device=cuda$"):
        resolve_device("cuda:1")


def test_a_single_process_agrees_with_itself() -> None:
    tensor = torch.tensor([1.0, 2.0, 3.0])
    assert (distributed.rank(), distributed.world_size(), distributed.local_rank()) == (0, 1, 0)
    assert distributed.sum_(tensor) is tensor
    assert distributed.merge_moments(tensor) is tensor
    assert [distributed.any_rank(flag, CPU) for flag in (False, True)] == [False, True]
    distributed.initialize("cpu")
    distributed.shutdown()
    assert not torch.distributed.is_initialized()
