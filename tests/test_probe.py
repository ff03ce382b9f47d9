"""The credit probe: times and compares the other backend on live tensors, and changes nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import rows, small_config, without_times

from trainer import probe
from trainer.config import ConfigError, CreditConfig
from trainer.probe import (
    TOLERANCE,
    CreditProbe,
    CreditTimes,
    amdahl,
    compare_credit,
    estimator_of,
    other_credit,
    phase_shares,
)
from trainer.rollout import Rollout
from trainer.session import train
from trainer.timing import PHASES

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def random_rollout(
    length: int, num_envs: int, device: torch.device = CPU, seed: int = 0
) -> tuple[Rollout, torch.Tensor]:
    """Random values, rewards and ends, with rewards apart from the rollout's own."""
    torch.manual_seed(seed)
    rollout = Rollout.allocate(length, num_envs, (3,), torch.float32, (), torch.int64, device)
    for tensor in (rollout.values, rollout.rewards, rollout.log_probs):
        tensor.normal_()
    rollout.terminated.bernoulli_(0.05)
    rollout.truncated.bernoulli_(0.05)
    rollout.valid.bernoulli_(0.9)
    return rollout, torch.randn(length, num_envs, device=device)


def compared(rollout: Rollout, rewards: torch.Tensor, used: CreditConfig, other: CreditConfig) -> CreditTimes:
    return compare_credit(estimator_of(used, "torch"), estimator_of(other, "torch"), rollout, rewards, 0.0)


@pytest.mark.parametrize(
    ("share", "speedup", "whole"),
    [(0.1, 10.0, 1 / 0.91), (0.5, 2.0, 4 / 3), (0.022, 10.0, 1.0201999), (1.0, 3.0, 3.0), (0.25, 0.5, 0.8)],
)
def test_amdahls_law_by_hand(share: float, speedup: float, whole: float):
    assert amdahl(share, speedup) == pytest.approx(whole, rel=1e-6)


@given(st.floats(0, 0.999), st.floats(0.01, 1e6))
def test_a_whole_never_gets_faster_than_its_part_nor_than_without_it(share: float, speedup: float):
    whole = amdahl(share, speedup)
    assert min(1.0, speedup) * (1 - 1e-9) <= whole <= max(1.0, speedup) * (1 + 1e-9)
    assert whole <= 1 / (1 - share) * (1 + 1e-9)


def test_shares_leave_out_the_probes_own_time():
    times = {"credit": 2.0, "update": 5.0, "other": 1.0, "probe": 92.0, "total": 100.0, "forward": 4.0}
    assert phase_shares(times) == {"credit": 0.25, "update": 0.625, "other": 0.125, "forward": 0.5}
    assert phase_shares({"total": 0.0}) == {}


@pytest.mark.parametrize(("length", "num_envs"), [(1, 1), (63, 3), (7, 1)])
@pytest.mark.parametrize("estimator", ["gae", "vtrace", "td_lambda", "discounted"])
def test_two_modes_on_the_same_tensors_agree_and_leave_them_as_they_were(estimator: str, length: int, num_envs: int):
    rollout, rewards = random_rollout(length, num_envs)
    before = {name: tensor.clone() for name, tensor in vars(rollout).items() if isinstance(tensor, torch.Tensor)}
    loop, scan = (CreditConfig(estimator=estimator, torch_mode=mode) for mode in ("loop", "scan"))
    times = compared(rollout, rewards, loop, scan)
    assert times.difference <= TOLERANCE
    assert times.used_ms > 0 and times.other_ms > 0
    assert times.speedup == times.used_ms / times.other_ms
    assert all(torch.equal(tensor, getattr(rollout, name)) for name, tensor in before.items())


def test_results_that_differ_are_seen():
    rollout, rewards = random_rollout(33, 5)
    times = compared(rollout, rewards, CreditConfig(), CreditConfig(gamma=0.98))
    assert TOLERANCE < times.difference < math.inf


def test_a_nan_in_one_env_is_no_difference_and_hides_none():
    rollout, rewards = random_rollout(33, 5)
    rewards[10, 2], rollout.valid[10, 2] = math.nan, True
    loop, scan = CreditConfig(torch_mode="loop"), CreditConfig(torch_mode="scan")
    assert compared(rollout, rewards, loop, scan).difference <= TOLERANCE
    assert compared(rollout, rewards, loop, CreditConfig(gamma=0.98)).difference > TOLERANCE


def test_a_result_that_is_finite_in_one_backend_only_differs_without_bound():
    rollout, rewards = random_rollout(8, 2)
    good = estimator_of(CreditConfig(), "torch")

    def bad(rollout: Rollout, rewards: torch.Tensor):
        estimate = good(rollout, rewards)
        estimate.advantages[3, 1] = math.inf
        return estimate

    assert compare_credit(bad, good, rollout, rewards, 0.0).difference == math.inf
    assert compare_credit(good, bad, rollout, rewards, 0.0).difference == math.inf


def test_the_device_is_left_as_busy_as_it_was_found(monkeypatch: pytest.MonkeyPatch):
    busy: list[float] = []
    monkeypatch.setattr(probe, "_wait", lambda _: 7.5)
    monkeypatch.setattr(probe, "_keep_busy", lambda _, ms: busy.append(ms))
    estimator = estimator_of(CreditConfig(), "torch")
    CreditProbe(estimator, estimator, "torch")(*random_rollout(5, 3), update=0)
    assert busy[-1] == 7.5 and len(busy) > 1


def test_the_other_backend_is_the_one_that_a_run_could_switch_to():
    config = CreditConfig(torch_mode="auto")
    assert other_credit(config, "triton", CUDA) == (config, "torch")
    assert other_credit(config, "torch", CUDA) == (config, "triton")
    assert other_credit(config, "torch", CPU) == (CreditConfig(torch_mode="loop"), "torch")
    assert other_credit(CreditConfig(torch_mode="loop"), "torch", CPU) == (CreditConfig(torch_mode="scan"), "torch")


def test_a_probed_run_learns_bit_for_bit_the_same_and_logs_every_kth_update(tmp_path: Path):
    settings = ("total_steps=350", "credit.probe_interval=2")
    for name, is_probed in (("plain", "false"), ("probed", "true")):
        assert train(small_config(f"out={name}", f"credit.probe={is_probed}", *settings), tmp_path) == 0
    plain, probed = rows(tmp_path / "plain"), rows(tmp_path / "probed")
    assert len(plain) == len(probed) > 3
    for index, (row, seen) in enumerate(zip(plain, probed, strict=True)):
        found = {key: value for key, value in seen.items() if key.startswith("probe/")}
        rest = {key: value for key, value in without_times(seen).items() if key not in found}
        assert without_times(row) == rest
        assert bool(found) == (index % 2 == 0)
        if found:
            assert found["probe/agrees"] == 1.0 and found["probe/difference"] <= TOLERANCE
            assert found["probe/other_backend"] == "torch loop"
            assert 0 <= found["probe/unfinished_ms"] < 1.0, "a CPU has no work but what its caller waits for"
            speedup = found["probe/used_ms"] / found["probe/other_ms"]
            assert found["probe/speedup"] == pytest.approx(speedup)
            predicted = 1 / (1 - seen["share/credit"] + seen["share/credit"] / speedup)
            assert found["probe/predicted_speedup"] == pytest.approx(predicted)
            assert seen["time/probe_ms"] > found["probe/used_ms"] + found["probe/other_ms"]


@pytest.mark.parametrize("probe", ["false", "true"])
def test_every_row_has_the_share_of_every_phase_and_they_sum_to_one(tmp_path: Path, probe: str):
    assert train(small_config("out=run", f"credit.probe={probe}", "total_steps=130"), tmp_path) == 0
    for row in rows(tmp_path / "run"):
        assert sum(row[f"share/{phase}"] for phase in PHASES) == pytest.approx(1.0)
        own = row["time/total_ms"] - row.get("time/probe_ms", 0.0)
        assert all(row[f"share/{phase}"] == pytest.approx(row[f"time/{phase}_ms"] / own) for phase in PHASES)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["credit.probe_interval=0"], r"^credit\.probe_interval=0 "),
        (["algo=impala", "credit.estimator=retrace", "credit.probe=true"], r"^credit\.probe=true .*retrace"),
    ],
)
def test_what_cannot_be_probed_is_refused_by_its_name(settings: list[str], said: str):
    with pytest.raises(ConfigError, match=said):
        small_config(*settings)


@pytest.mark.gpu
@pytest.mark.parametrize("estimator", ["gae", "vtrace"])
def test_triton_and_torch_agree_on_the_device(estimator: str):
    rollout, rewards = random_rollout(63, 129, CUDA)
    config = CreditConfig(estimator=estimator)
    times = compare_credit(estimator_of(config, "triton"), estimator_of(config, "torch"), rollout, rewards, 0.0)
    assert times.difference <= TOLERANCE
    assert times.used_ms > 0 and times.other_ms > 0


@pytest.mark.gpu
def test_behind_work_of_the_device_a_call_costs_no_launches():
    rollout, rewards = random_rollout(64, 32, CUDA)
    loop = estimator_of(CreditConfig(torch_mode="loop"), "torch")
    idle, behind = (compare_credit(loop, loop, rollout, rewards, ms).used_ms for ms in (0.0, 20.0))
    assert behind < 0.8 * idle, "the loop's hundreds of launches take the host longer than the device"
    replayed = compare_credit(loop, loop, rollout, rewards, 0.0, graphed=True)
    assert replayed.used_ms < 0.8 * idle and replayed.difference == 0.0
