"""An exported policy acts as the checkpoint does, alone: ONNX models and programs of torch, batches of any size."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from onnx.reference import ReferenceEvaluator
from small_runs import run_until, small_config

from envs.actions import ActionMap
from scripts import export_policy as command
from trainer.config import ConfigError, PolicyConfig
from trainer.evaluate import Agent, load_checkpoint
from trainer.export import export_policy
from trainer.normalize import ObservationNormalizer
from trainer.policy import ActorCritic

VECTOR, FRAMES = Box(-np.inf, np.inf, (3,), np.float32), Box(0, 255, (4, 84, 84), np.uint8)
ARM = Box(np.array([-2.0, -np.inf], np.float32), np.array([1.0, np.inf], np.float32))
CASES: dict[str, tuple[Box, Space, dict[str, object]]] = {
    "continuous": (VECTOR, ARM, {}),
    "discrete": (VECTOR, Discrete(3, start=1), {}),
    "several discrete": (VECTOR, MultiDiscrete([2, 3]), {}),
    "with memory": (VECTOR, ARM, {"core": "gru", "core_size": 5}),
    "frames": (FRAMES, Discrete(4), {"torso": "nature_cnn", "hidden_sizes": [8]}),
}


def make_agent(observation_space: Box, action_space: Space, **policy: object) -> Agent:
    torch.manual_seed(0)
    networks = ActorCritic(observation_space, action_space, PolicyConfig(**{"hidden_sizes": [16], **policy}))
    normalizer = None
    if observation_space is VECTOR:
        normalizer = ObservationNormalizer((3,), clip=2.0)
        normalizer.update(torch.randn(50, 4, 3) * 3 + 7, torch.ones(50, 4, dtype=torch.bool))
    return Agent(networks, normalizer, ActionMap(action_space, "rescale"))


def batch(space: Box, rows: int) -> torch.Tensor:
    rng = np.random.default_rng(rows)
    values = rng.integers(256, size=(rows, *space.shape)) if space is FRAMES else rng.normal(7, 3, (rows, *space.shape))
    return torch.from_numpy(values.astype(space.dtype))


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
@pytest.mark.parametrize("case", CASES)
def test_an_exported_policy_acts_as_the_agent_does_alone(case: str, suffix: str, tmp_path: Path):
    observation_space, action_space, policy = CASES[case]
    agent, path = make_agent(observation_space, action_space, **policy), tmp_path / f"policy{suffix}"
    export_policy(agent, batch(observation_space, 2), path, {"env_id": "Arm-v0"})
    observations, state = batch(observation_space, 5), torch.randn(5, agent.policy.state_size)
    expected = agent.act(observations, state, deterministic=True)
    inputs = [observations, state] if agent.policy.state_size else [observations]
    if suffix == ".onnx":
        model = onnx.load(path)
        assert {note.key: note.value for note in model.metadata_props}["env_id"] == "Arm-v0"
        feed = {name: x.numpy() for name, x in zip(("observations", "state"), inputs, strict=False)}
        results = [torch.from_numpy(np.asarray(x)) for x in ReferenceEvaluator(model).run(None, feed)]
    else:
        notes = {"env_id": ""}
        acted = torch.export.load(path, extra_files=notes).module()(*inputs)
        assert notes["env_id"] == "Arm-v0"
        results = list(acted) if isinstance(acted, tuple) else [acted]
    assert len(results) == len(inputs)
    for result, exact in zip(results, expected, strict=False):
        torch.testing.assert_close(result, exact, rtol=1e-5, atol=1e-5)  # other orders of summation


def test_the_command_exports_the_newest_checkpoint_into_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run_until(1, small_config("out=run"), tmp_path) == 143
    run = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["export_policy.py", f"checkpoint={run}/checkpoints"])
    command.main()
    assert f"saved          {run}/policy-1.onnx" in capsys.readouterr().out
    (actions,) = ReferenceEvaluator(onnx.load(run / "policy-1.onnx")).run(None, {"observations": np.zeros((3, 4), "f")})
    assert actions.shape == (3,)
    assert load_checkpoint(run)[1]["update"] == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "checkpoint=<a run folder or file> is missing"),
        (["checkpoint=nowhere"], "nowhere: no such checkpoint"),
        (["nowhere"], "nowhere: an argument is key=value"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
):
    monkeypatch.setattr(sys, "argv", ["export_policy.py", *arguments])
    with pytest.raises(SystemExit):
        command.main()
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert named in errors
    assert errors.count("\n") == 1


def test_another_format_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"policy\.pth: the file must end in \.onnx or \.pt2"):
        export_policy(make_agent(VECTOR, ARM), batch(VECTOR, 2), tmp_path / "policy.pth", {})
