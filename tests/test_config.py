"""The configuration: presets, defaults, and refusals that name the key."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import envs
from scripts.overrides import check_overrides
from trainer.config import Config, ConfigError
from trainer.schema import CONFIG_FOLDER, all_keys, compose_config, compose_for_resume, from_yaml, to_dict, to_yaml
from trainer.validation import validate

PRESETS = [
    (group.name, preset.stem)
    for group in sorted(CONFIG_FOLDER.iterdir())
    if group.is_dir()
    for preset in sorted(group.glob("*.yaml"))
]


@pytest.mark.parametrize(("group", "name"), PRESETS, ids=[f"{group}={name}" for group, name in PRESETS])
def test_every_preset_composes_into_a_valid_configuration(group: str, name: str):
    config = compose_config([f"{group}={name}"])
    validate(config)
    assert from_yaml(to_yaml(config)) == config, "what a run folder stores is the same configuration"


def test_the_promised_env_presets_are_there():
    promised = {"Ant", "HalfCheetah", "Hopper", "Walker2d", "Humanoid", "CartPole", "Pendulum", "Acrobot"}
    assert promised <= {name for group, name in PRESETS if group == "env"}
    assert all(compose_config([f"env={name}"]).env.id == name for name in promised)


def test_the_defaults_are_the_contract_s():
    config = compose_config([])
    assert (config.algo, config.env.id, config.env.engine, config.num_envs) == ("ppo", "Ant", "envpool", 4096)
    assert (config.credit.backend, config.credit.torch_mode, config.wandb.mode) == ("auto", "auto", "offline")
    assert (config.device, config.resume, config.out) == ("auto", None, None)


def test_any_env_id_is_taken_and_groups_and_keys_combine():
    config = compose_config(["env.id=Whatever-v7", "credit=vtrace", "credit.c_bar=2", "policy=mlp_small"])
    assert (config.env.id, config.credit.estimator, config.credit.c_bar) == ("Whatever-v7", "vtrace", 2.0)
    assert config.policy.hidden_sizes == [64, 64]
    assert compose_config(["env.options.stack_num=4", "env.options.gray_scale=true"]).env.options == {
        "stack_num": 4,
        "gray_scale": True,
    }


def test_a_key_on_the_command_line_wins_over_its_preset():
    assert compose_config(["ppo.update_epochs=3", "env=CartPole"]).ppo.update_epochs == 3


def test_a_saved_configuration_comes_back_as_it_was():
    config = compose_config(["env=CartPole", "ppo.target_kl=0.01", "wandb.tags=[a,b]", "env.options={x: 1}"])
    assert from_yaml(to_yaml(config)) == config
    assert to_dict(config)["ppo"]["target_kl"] == 0.01
    assert OmegaConf.create(to_yaml(config)).env.options.x == 1


REFUSED = {
    "lr=abc": "lr: there is no such key",
    "learnig_rate=1": "learnig_rate: there is no such key; did you mean ppo.learning_rate?",
    "ppo.learnig_rate=1": "ppo.learnig_rate: there is no such key; did you mean ppo.learning_rate?",
    "+ppo.learnig_rate=1": "ppo.learnig_rate: there is no such key; did you mean ppo.learning_rate?",
    "++total_step=1": "total_step: there is no such key; did you mean total_steps?",
    "~total_step": "total_step",
    "ppo.learning_rate=abc": "ppo.learning_rate: Value 'abc' of type 'str' could not be converted to Float",
    "ppo.learning_rate=nan": "ppo.learning_rate=nan",
    "num_envs=0": "num_envs=0 must be finite, at least 1",
    "num_envs=1.5": "num_envs: Value '1.5'",
    "num_envs=true": "num_envs: Value 'True'",
    "num_envs=null": "num_envs",
    "num_envs": "num_envs: an override is key=value",
    "=3": "=3: an override is key=value",
    "rollout_length=0": "rollout_length=0",
    "total_steps=0": "total_steps=0",
    "seed=-1": "seed=-1",
    "ppo.num_minibatches=0": "ppo.num_minibatches=0 must be finite, at least 1",
    "ppo.num_minibatches=70000": "ppo.num_minibatches=70000 is more than the 32768 rows of a rollout",
    "ppo.clip_range=0": "ppo.clip_range=0.0",
    "env.options.pools=4": "env.options.pools is not an engine's own option: set env.pools",
    "env.module=no_such_module": "env.module=no_such_module cannot be imported: No module named",
    "ppo=3": "ppo:",
    "credit.gamma=1.5": "credit.gamma=1.5",
    "credit.gamma=nan": "credit.gamma=nan",
    "credit.backend=trtion": "credit.backend=trtion is not one of auto, triton, torch; did you mean triton?",
    "credit=foo": "credit=foo: there is no such preset under configs/credit: discounted, gae, td_lambda, vtrace",
    "env=Foo": "env=Foo: there is no such preset under configs/env",
    "algo=foo": "algo=foo: there is no such preset under configs/algo: impala, ppo",
    "experiment=foo": "experiment=foo: there is no such preset",
    "env.engine=gym": "env.engine=gym",
    "policy.hidden_sizes=[]": "policy.hidden_sizes=[]",
    "policy.hidden_sizes=[64,a]": "policy.hidden_sizes[1]: Value 'a'",
    "policy.init_log_std=nan": "policy.init_log_std=nan",
    "policy.init_log_std=3": "policy.init_log_std=3.0 must lie between",
    "device=gpu": "device=gpu is not one of auto, cpu, cuda, cuda:N",
    "device=cuda:x": "device=cuda:x",
    "seed=[1": "seed=[1: ",
    "seed=1,2": "seed=1,2 sweeps over several values: add -m",
    "hydra.foo=1": "hydra.foo: there is no such key",
    "resume=/nowhere": "resume=/nowhere: there is no run (no config.yaml)",
}


@pytest.mark.parametrize("override", REFUSED)
def test_a_wrong_override_is_refused_in_one_line_that_names_the_key(override: str):
    problem = check_overrides([override])
    assert problem is not None
    assert REFUSED[override] in problem
    assert "\n" not in problem


@pytest.mark.parametrize("override", ["hydra.job.chdir=True", "ppo.value_clip_range=null", "ppo.learning_rate=1e-4"])
def test_a_right_override_passes(override: str):
    assert check_overrides([override]) is None


def test_more_pools_than_envs_are_refused():
    assert check_overrides(["env.pools=3", "num_envs=2"]) == "env.pools=3 is more than num_envs=2"
    assert check_overrides(["env.pools=3", "num_envs=2", "env.engine=torch"]) is None


def test_every_value_of_a_sweep_is_checked():
    assert check_overrides(["-m", "seed=1,2,3", "num_envs=8,16"]) is None
    assert "ppo.num_minibatches=0" in str(check_overrides(["-m", "seed=1,2,3", "ppo.num_minibatches=1,0"]))
    assert "seed=-1" in str(check_overrides(["-m", "seed=range(-1,2)"]))


def test_on_resume_single_keys_change_and_everything_else_is_checked(tmp_path: Path):
    saved = to_yaml(compose_config(["env=CartPole"]))
    (tmp_path / "config.yaml").write_text(saved)
    config = compose_for_resume(saved, [f"resume={tmp_path}", "total_steps=5", "wandb.tags=[x]", "env.options.a=1"])
    assert (config.total_steps, config.wandb.tags, config.env.options) == (5, ["x"], {"a": 1})
    assert config.num_envs == 64
    for override, named in (
        ("env=Ant", "env=Ant: a preset cannot be changed on resume"),
        ("num_env=3", "num_env: there is no such key; did you mean num_envs?"),
        ("+num_env=3", "num_env: there is no such key; did you mean num_envs?"),
        ("total_steps=abc", "total_steps: Value 'abc'"),
        ("num_envs=0", "num_envs=0"),
    ):
        problem = check_overrides([f'resume="{tmp_path}"', override])
        assert problem is not None
        assert named in problem


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2\n", "num_envs: many\n", "num_env: 3\n"])
def test_a_broken_saved_configuration_is_refused_in_one_line(text: str):
    with pytest.raises(ConfigError) as refusal:
        from_yaml(text)
    assert "\n" not in str(refusal.value)


def test_an_empty_saved_configuration_is_all_defaults():
    assert from_yaml("{}") == Config()


def test_all_keys_lists_each_leaf_once():
    keys = all_keys()
    assert len(keys) == len(set(keys))
    assert {"num_envs", "ppo.learning_rate", "env.options", "wandb.mode"} <= set(keys)
    assert "ppo" not in keys


def test_a_policy_that_was_asked_for_wins_over_the_presets():
    config = compose_config(["env=HalfCheetah", "policy=mlp_small"])
    assert (config.policy.hidden_sizes, config.policy.activation) == ([64, 64], "tanh")
    assert compose_config(["env=HalfCheetah"]).policy.hidden_sizes == [128, 128]


def test_an_adaptive_learning_rate_starts_within_its_range():
    with pytest.raises(ConfigError, match=r"ppo.learning_rate=0.0007 must lie between ppo.min_learning_rate=1.0 and"):
        compose_config(["ppo.lr_schedule=adaptive", "ppo.min_learning_rate=1"])


def test_ones_own_module_registers_an_engine_before_the_engine_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module = "import envs\nenvs.ENGINES['mine'] = envs.Engine('envs.torch_classic', 'TorchVecEnv', 'rollscan')\n"
    (tmp_path / "my_own_engine.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setattr("envs.ENGINES", dict(envs.ENGINES))
    config = compose_config(["env=CartPole", "env.module=my_own_engine", "env.engine=mine"])
    assert config.env.engine == "mine"
