"""IMPALA over the engines: actors that share cores and a GPU, and the envs that they divide among them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from impala_runs import impala_config, updates
from small_runs import differences, rows

import envs
from envs.base import EnvError
from envs.group import EnvGroup
from trainer import builder, evaluate
from trainer.loop import Trainer
from trainer.session import train
from trainer.timing import PHASES

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


ON_A_GPU = {
    "torch": ("env.engine=torch", "env.options.compile=false"),
    "torch, retrace": ("env.engine=torch", "env.options.compile=false", "credit.estimator=retrace"),
    "mujoco_warp": ("env.engine=mujoco_warp", "env.id=Hopper"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("settings", ON_A_GPU.values(), ids=ON_A_GPU.keys())
def test_actors_share_a_gpu_engine_in_groups_on_streams_of_their_own(settings: tuple[str, ...]):
    made: list[Trainer] = []
    overrides = ("device=cuda", "num_envs=256", "env.pools=4", "normalize.observations=true", *settings)
    metrics = updates(30, *overrides, made=made)
    assert metrics[-1]["skipped_minibatches"] == 0
    assert metrics[-1]["credit_backend"] == "triton"
    assert made[0].episodes.lengths
    assert all(length >= 3 for length in made[0].episodes.lengths)
    phases = sum(metrics[-1][f"time/{name}_ms"] for name in PHASES)
    assert phases == pytest.approx(metrics[-1]["time/total_ms"], rel=1e-3)


ENVS = {
    "envpool": ("env.engine=envpool",),
    "envpool, retrace": ("env.engine=envpool", "credit.estimator=retrace"),
    "torch": ("env.engine=torch",),
    "torch, retrace": ("env.engine=torch", "credit.estimator=retrace"),
    "mujoco_warp": ("env.engine=mujoco_warp", "env.id=Hopper"),
    "a Dict, several discrete actions": ("env.engine=gymnasium", "env.module=gymnasium_toys", "env.id=Counter"),
}


@pytest.mark.parametrize("settings", ENVS.values(), ids=ENVS.keys())
def test_every_engine_trains_saves_and_is_evaluated(tmp_path: Path, settings: tuple[str, ...]):
    if "env.engine=mujoco_warp" in settings:
        pytest.importorskip("mujoco_warp", reason="the warp extra is not installed")
    config = impala_config("out=run", "total_steps=400", "impala.update_epochs=2", *settings)
    assert train(config, tmp_path) == 0
    assert rows(tmp_path / "run")[-1]["skipped_minibatches"] == 0
    config, state = evaluate.load_checkpoint(tmp_path / "run")
    result = evaluate.evaluate(config, state, 5, 1000, True, torch.device("cpu"))
    assert len(result.returns) == 5


@pytest.mark.parametrize(("engine", "asked", "threads"), [("envpool", 0, 3), ("envpool", 5, 5), ("gymnasium", 0, 0)])
def test_actors_share_the_cores_and_gymnasiums_envs_have_no_limit(
    engine: str, asked: int, threads: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(builder, "usable_cores", lambda: 6)
    config = impala_config(f"env.engine={engine}", f"env.num_threads={asked}", "env.pools=2")
    with closing(builder.make_training_env(config, torch.device("cpu"))) as env:
        assert isinstance(env, EnvGroup)
        assert [member._num_threads for member in env.members] == [threads, threads]


@pytest.mark.parametrize("engine", ["envpool", "gymnasium"])
def test_an_actors_env_is_named_by_its_number_in_the_run(engine: str):
    with closing(builder.make_training_env(impala_config(f"env.engine={engine}"), torch.device("cpu"))) as env:
        env.reset()
        with pytest.raises(EnvError, match=r"^env 6 got action 5: it must be in 0 \.\. 1$"):
            env.send(1, torch.tensor([0, 1, 5, 0]))


def test_a_group_of_envs_steps_as_one_env_with_pools():
    """Actors see the same episodes that PPO's pools do: seeds depend on the column, not on who steps it."""
    options = {"num_threads": 1, "seed": 5}
    whole = envs.make("CartPole", num_envs=6, pools=2, **options)
    group = EnvGroup(
        [envs.make("CartPole", num_envs=3, pools=1, rank=m, world_size=2, **options) for m in range(2)],
    )
    assert group.pools == whole.pools
    torch.manual_seed(0)
    assert torch.equal(whole.reset(), group.reset())
    for epoch in (0, 1):
        for _ in range(40):
            actions = torch.randint(0, 2, (6,))
            for one, other in zip(whole.step(actions), group.step(actions), strict=True):
                assert torch.equal(one, other)
        for env in (whole, group):
            env.reseed(epoch + 1)
        assert differences(whole.reset(), group.reset()) == []
    whole.close()
    group.close()
    with pytest.raises(EnvError, match="at least one member"):
        EnvGroup([])
