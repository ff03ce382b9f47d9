"""The torch engine's compiled step, and the captured one on a GPU."""

import functools
import warnings

import pytest
import torch
from torch_envs import TASKS, make, random_actions

from envs.torch_classic import TorchVecEnv


def test_the_compiled_step_equals_the_eager_one() -> None:
    env = make("Pendulum-v1", 33, max_episode_steps=5, seed=6)
    compiled = make("Pendulum-v1", 33, max_episode_steps=5, seed=6, compile=True)
    assert torch.equal(env.reset(), compiled.reset())
    for actions in random_actions(env, torch.Generator().manual_seed(2), steps=13):
        expected, result = env.step(actions), compiled.step(actions)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_many_compiled_envs_live_in_one_process_without_recompiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    one_each = torch._dynamo.config.patch(recompile_limit=1)
    with one_each, warnings.catch_warnings(action="error", category=RuntimeWarning):
        envs = [make("MountainCar-v0", num_envs, compile=True) for num_envs in (1, 2, 3)]
    with torch.compiler.set_stance("fail_on_recompile"):
        for env in envs:
            env.reset()
            assert env.step(torch.zeros(env.num_envs, dtype=torch.int64)).valid.all()


@pytest.mark.parametrize("id", TASKS)
def test_a_compiled_step_leaves_nothing_for_the_host(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def backend(graph, inputs):
        called.extend(str(node.target) for node in graph.graph.nodes)
        assert all(isinstance(each, torch.Tensor) and each.ndim for each in inputs)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    make(id, 5, compile=True)
    assert called
    assert "item" not in called


def test_without_a_compiler_a_warning_says_so_and_the_env_steps_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments, **options):
        raise RuntimeError("no working compiler was found\ndetails")

    monkeypatch.setattr(torch, "compile", lambda step, **options: broken)
    with pytest.warns(RuntimeWarning, match="CartPole-v1 steps eagerly, .*no working compiler was found$"):
        env = make("CartPole-v1", 2, compile=True)
    env.reset()
    with warnings.catch_warnings(action="error"):
        assert env.step(torch.zeros(2, dtype=torch.int64)).valid.all()


@pytest.mark.gpu
@pytest.mark.parametrize("id", TASKS)
def test_a_captured_step_replays_new_starts_and_follows_a_reseed(id: str) -> None:
    options = {"seed": 1, "max_episode_steps": 3, "dtype": torch.float64}
    eager = TorchVecEnv(id, 65, device="cuda", compile=False, **options)
    env = TorchVecEnv(id, 65, device="cuda", **options)
    host = torch.Generator().manual_seed(0)
    static = random_actions(env, host)[0].cuda()
    eager.reset()
    env.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = env.step(static)
    fillers = []
    for step, actions in enumerate(random_actions(env, host, steps=24)):
        if step == 12:
            for each in (eager, env):
                each.reseed(5)
                each.reset()
        static.copy_(actions)
        graph.replay()
        expected = eager.step(actions.cuda())
        torch.testing.assert_close(tuple(captured), tuple(expected), rtol=1e-9, atol=1e-9)
        fillers += [captured.observations[0].clone()] if not captured.valid[0] else []
    assert len(torch.stack(fillers).unique(dim=0)) == len(fillers) >= 4


@pytest.mark.gpu
@pytest.mark.parametrize("id", TASKS)
def test_a_step_never_synchronizes_with_the_host_and_equals_the_cpu(id: str) -> None:
    env, reference = TorchVecEnv(id, 65, device="cuda", dtype="float64"), make(id, 65, dtype="float64")
    torch.testing.assert_close(env.reset().cpu(), reference.reset(), rtol=1e-12, atol=1e-12)
    actions = random_actions(reference, torch.Generator().manual_seed(0))[0]
    on_device = actions.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = env.step(on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(tuple(x.cpu() for x in result), tuple(reference.step(actions)), rtol=1e-9, atol=1e-9)
