"""Overrides on the command line: what is refused before anything starts, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

import envs
from scripts.overrides import check_overrides
from trainer.schema import (
    compose_config,
    to_yaml,
)

REFUSED = {
    "lr=abc": "lr: there is no such key; did you mean ppo.learning_rate or impala.learning_rate?",
    "learnig_rate=1": "learnig_rate: there is no such key; did you mean ppo.learning_rate or impala.learning_rate?",
    "ppo.learnig_rate=1": "ppo.learnig_rate: there is no such key; did you mean ppo.learning_rate?",
    "+ppo.learnig_rate=1": "ppo.learnig_rate: there is no such key; did you mean ppo.learning_rate?",
    "++total_step=1": "total_step: there is no such key; did you mean total_steps?",
    "~total_step": "~total_step: a key is not deleted",
    "~env": "~env: a key is not deleted",
    "batch_size=64": "batch_size: there is no such key; did you mean ppo.num_minibatches or impala.num_minibatches?",
    "algo.num_minibatches=3": "algo.num_minibatches: there is no such key; did you mean ppo.num_minibatches",
    "impala.actors=4": "impala.actors: there is no such key; did you mean env.pools?",
    "impala.actors": "impala.actors: an override is key=value",
    "gae_lambda=0.9": "gae_lambda: there is no such key; did you mean credit.gae_lambda?",
    "n_envs=8": "n_envs: there is no such key; did you mean num_envs?",
    "n_steps=8": "n_steps: there is no such key; did you mean rollout_length?",
    "total_timesteps=8": "total_timesteps: there is no such key; did you mean total_steps?",
    "polcy=mlp": "polcy: there is no such key; did you mean policy?",
    "+foo=1": "foo: there is no such key; docs/config.md lists them all",
    "env.frame_skip=4": "env.frame_skip: there is no such key; env has id, engine, module,",
    "--num_envs=8": "--num_envs=8: an override is key=value, without dashes: num_envs=8",
    "--num-envs": "--num-envs: an override is key=value, without dashes: num_envs=<value>",
    "--ppo.learning_rate=-1e-3": "without dashes: ppo.learning_rate=-1e-3",
    "--env-id": "without dashes; env_id: there is no such key; did you mean env.id?",
    "--task=Ant": "without dashes; task: there is no such key; did you mean env.id?",
    "--headless": "without dashes; headless: there is no such key; docs/config.md lists them all",
    "max_iterations=9": "max_iterations: there is no such key; did you mean total_steps?",
    "track=true": "track: there is no such key; did you mean wandb.mode?",
    "ppo.learning_rate=abc": "ppo.learning_rate=abc is not a number, such as ppo.learning_rate=0.0003",
    "ppo.learning_rate=nan": "ppo.learning_rate=nan",
    "num_envs=0": "num_envs=0 must be at least 1",
    "env.max_episode_steps=3000000000": "env.max_episode_steps=3000000000 must be at least 1 and at most 2147483647",
    "env.timeout=1e10": "env.timeout=10000000000.0 must be greater than 0 and at most 1e+09",
    "ppo.learning_rate=1e39": "ppo.learning_rate=1e+39 must be at least 0 and at most 1e+09",
    "policy.hidden_sizes=[10000000000]": "policy.hidden_sizes=[10000000000] must be one or more widths from 1 to 65536",
    "num_envs=1.5": "num_envs=1.5 is not a whole number, such as num_envs=4096",
    "num_envs=1e3": "num_envs=1000.0 is not a whole number, such as num_envs=1000",
    "num_envs=true": "num_envs=true is not a whole number",
    "num_envs=null": "num_envs=null is not a whole number",
    "num_envs": "num_envs: an override is key=value",
    "=3": "=3: an override is key=value",
    "rollout_length=0": "rollout_length=0",
    "total_steps=0": "total_steps=0",
    "total_steps=1M": "total_steps=1M is not a whole number, such as total_steps=10000000",
    "seed=-1": "seed=-1",
    "out=": "out= is not a text or null",
    "out=None": "out=None: write out=null",
    "ppo.target_kl=None": "ppo.target_kl=None: write ppo.target_kl=null",
    "ppo.num_minibatches=0": "ppo.num_minibatches=0 must be at least 1",
    "ppo.num_minibatches=70000": "ppo.num_minibatches=70000 is more than the 32768 rows of a rollout",
    "ppo.clip_range=0": "ppo.clip_range=0.0",
    "env.options.pools=4": "env.options.pools is not an engine's own option: set env.pools",
    "env.options=3": "env.options=3 is not a mapping, such as env.options={}",
    "env.module=no_such.py": "; write env.module=no_such",
    "env.module=no_such_module": "env.module=no_such_module cannot be imported: No module named",
    "ppo=3": "ppo=3: ppo is a section of keys; ppo has learning_rate, ",
    "wandb=disabled": "wandb=disabled: wandb is a section of keys; wandb has mode, project, group, name, tags",
    "credit.gamma=1.5": "credit.gamma=1.5",
    "credit.gamma=nan": "credit.gamma=nan must be finite, at least 0 and at most 1",
    "credit.probe=2": "credit.probe=2 is not true or false",
    "credit.backend=trtion": "credit.backend=trtion is not one of auto, triton, torch; did you mean triton?",
    "credit=foo": "credit=foo: there is no such preset under configs/credit: discounted, gae, retrace,",
    "env=Foo": "env=Foo: there is no such preset under configs/env",
    "env=HalfCheeta": "did you mean HalfCheetah?; any other id: env.id=<id>",
    "env=CartPole-v1": "did you mean CartPole?; any other id: env.id=<id>",
    "policy=cnn": "did you mean nature_cnn?",
    "algo=sac": "algo=sac: there is no such preset under configs/algo: impala, ppo",
    "algo=PPO": "did you mean ppo?",
    "experiment=foo": "experiment=foo: there is no such preset",
    "env.engine=warp": "is not one of envpool, gymnasium, mujoco_warp, torch; did you mean mujoco_warp?",
    "policy.hidden_sizes=[]": "policy.hidden_sizes=[]",
    "policy.hidden_sizes=64": "policy.hidden_sizes=64 is not a list of whole numbers, such as policy.hidden_sizes=[25",
    "policy.hidden_sizes=64,64": "policy.hidden_sizes=64,64 sweeps over several values: write policy.hidden_sizes=[",
    "policy.hidden_sizes=[64,a]": "policy.hidden_sizes[1]: Value 'a'",
    "policy.init_log_std=nan": "policy.init_log_std=nan",
    "policy.init_log_std=3": "policy.init_log_std=3.0 must lie between",
    "device=gpu": "device=gpu is not one of auto, cpu, cuda, cuda:N",
    "device=cuda:x": "device=cuda:x",
    "seed=[1": "seed=[1: ",
    "policy.hidden_sizes=[64,": "; a list is one word, without spaces",
    "seed=1,2": "seed=1,2 sweeps over several values: add -m",
    "hydra.foo=1": "hydra.foo: there is no such key",
    "hydra.run.dir=here": "hydra.run.dir=here: a run's folder is named by out=<folder>",
    "out=${nope}": "out: Interpolation key 'nope' not found",
    "num_envs=${oc.env:NOPE_}": "num_envs: KeyError raised while resolving interpolation",
    "resume=/nowhere": "resume=/nowhere: there is no run (no config.yaml)",
}


@pytest.mark.parametrize("override", REFUSED)
def test_a_wrong_override_is_refused_in_one_line_that_names_the_key(override: str):
    problem = check_overrides([override])
    assert problem is not None
    assert REFUSED[override] in problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    "override",
    ["hydra.job.chdir=True", "ppo.value_clip_range=null", "ppo.learning_rate=1e-4", "normalize.reward_clip=1"],
)
def test_a_right_override_passes(override: str):
    assert check_overrides([override]) is None


UNREAD = {
    "impala.queue_size=3": "impala.queue_size=3 is read with algo=impala only, and this is algo=ppo; leave it out",
    "algo=impala ppo.update_epochs=4": "ppo.update_epochs=4 is read with algo=ppo only, and this is algo=impala; "
    "set impala.update_epochs",
    "credit=vtrace credit.gae_lambda=0.9": "credit.gae_lambda=0.9 is read with credit.estimator=gae only, and this is "
    "credit.estimator=vtrace; leave it out",
    "algo=impala impala.optimizer=rmsprop impala.adam_eps=1e-3": "impala.adam_eps=0.001 is read with "
    "impala.optimizer=adam only, and this is impala.optimizer=rmsprop; leave it out",
    "ppo.lr_schedule=linear ppo.desired_kl=0.02": "ppo.desired_kl=0.02 is read with ppo.lr_schedule=adaptive only, "
    "and this is ppo.lr_schedule=linear; leave it out",
    "normalize.observations=false normalize.observation_clip=3": "normalize.observation_clip=3 is read with "
    "normalize.observations=true only, and this is normalize.observations=false; leave it out",
    "env.physics=euler": "env.physics=euler is read with env.engine=mujoco_warp only, and this is env.engine=envpool; "
    "leave it out",
    "algo=impala env.engine=torch env.num_threads=4": "env.num_threads=4 is read with env.engine=envpool or gymnasium "
    "only, and this is env.engine=torch; leave it out",
    "env.engine=torch env.pools=2": "env.pools=2 is read with env.engine=envpool or gymnasium only, and this is "
    "env.engine=torch; leave it out",
    "policy.core_size=64": "policy.core_size=64 is read with policy.core=lstm or gru only, and this is "
    "policy.core=none; leave it out",
}


@pytest.mark.parametrize("overrides", UNREAD)
def test_a_key_that_nothing_reads_is_refused_where_a_person_set_it(overrides: str, tmp_path: Path):
    *settings, unread = overrides.split()
    assert check_overrides([*settings, unread]) == UNREAD[overrides]
    (tmp_path / "config.yaml").write_text(to_yaml(compose_config(settings)))
    assert check_overrides([f"resume={tmp_path}", unread]) == UNREAD[overrides]


def test_a_key_that_one_job_of_a_sweep_reads_is_taken():
    assert check_overrides(["-m", "algo=ppo,impala", "ppo.update_epochs=4", "impala.update_epochs=2"]) is None
    assert check_overrides(["-m", "policy.core=none,lstm", "policy.core_size=32"]) is None
    assert "credit.td_lambda=0.9 is read" in str(check_overrides(["-m", "credit=gae,vtrace", "credit.td_lambda=0.9"]))


def test_more_pools_than_envs_are_refused():
    assert check_overrides(["env.pools=3", "num_envs=2"]) == "env.pools=3 is more than num_envs=2"
    assert compose_config(["env.pools=3", "num_envs=2", "env.engine=torch"]).env.pools == 3


def test_what_actors_or_an_engine_of_ones_own_take_is_read(monkeypatch: pytest.MonkeyPatch):
    own = envs.Engine("envs.torch_classic", "TorchVecEnv", "rollscan", ("physics",))
    monkeypatch.setattr("envs.ENGINES", {**envs.ENGINES, "mine": own})
    assert check_overrides(["env.engine=mine", "env.physics=euler"]) is None
    assert check_overrides(["algo=impala", "env.engine=torch", "env.pools=4", "env.timeout=60"]) is None


def test_every_value_of_a_sweep_is_checked():
    assert check_overrides(["-m", "seed=1,2,3", "num_envs=8,16"]) is None
    assert "ppo.num_minibatches=0" in str(check_overrides(["-m", "seed=1,2,3", "ppo.num_minibatches=1,0"]))
    assert "seed=-1" in str(check_overrides(["-m", "seed=range(-1,2)"]))
