"""CUDA graphs change the speed of an update and nothing else."""

import copy

import pytest
import torch

from tests.small_runs import small_config
from trainer.builder import graph_obstacle, wants_graphs
from trainer.console import QuietConsole
from trainer.loop import Trainer


def test_a_cpu_has_no_graphs():
    assert not wants_graphs(small_config(), torch.device("cpu"))
    assert wants_graphs(small_config(), torch.device("cuda"))
    assert not wants_graphs(small_config("cuda_graphs=false"), torch.device("cuda"))


def test_unequal_minibatches_are_an_obstacle_that_names_the_key():
    config = small_config("ppo.num_minibatches=3", "num_envs=8", "rollout_length=8")
    obstacle = graph_obstacle(config)
    assert obstacle is not None and "ppo.num_minibatches=3" in obstacle


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [["ppo.lr_schedule=adaptive"], ["ppo.lr_schedule=linear", "ppo.target_kl=0.001"]])
def test_replayed_updates_equal_eager_ones(settings):
    """The same kernels on the same numbers: equal up to the order in which cuBLAS may sum under another workspace."""
    runs = []
    for graphs in ("true", "false"):
        config = small_config(
            "device=cuda", "env.engine=torch", f"cuda_graphs={graphs}", "total_steps=100000", *settings
        )
        trainer = Trainer(copy.deepcopy(config), QuietConsole())
        metrics = [trainer.train_one_update() for _ in range(5)]
        runs.append((metrics, [p.detach().clone() for p in trainer.policy.parameters()]))
        trainer.env.close()
    (replayed, replayed_parameters), (eager, eager_parameters) = runs
    for a, b in zip(replayed_parameters, eager_parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(replayed, eager, strict=True):
        assert a["env_steps"] == b["env_steps"]
        assert a["stopped_minibatches"] == b["stopped_minibatches"]
        for name in ("loss/policy", "loss/value", "loss/approx_kl", "learning_rate"):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), name


@pytest.mark.gpu
def test_a_replay_with_learning_rate_0_changes_nothing():
    config = small_config("device=cuda", "env.engine=torch", "ppo.lr_schedule=constant", "normalize.values=false")
    trainer = Trainer(config, QuietConsole())
    for _ in range(3):  # warm-up, capture, replay
        trainer.train_one_update()
    trainer.algorithm.learning_rate.zero_()
    before = [p.detach().clone() for p in trainer.policy.parameters()]
    trainer.train_one_update()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.policy.parameters(), strict=True))
    trainer.env.close()
