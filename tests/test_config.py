"""The configuration: presets, defaults, and refusals that name the key."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import envs
from scripts.overrides import check_overrides
from trainer.config import Config, ConfigError
from trainer.keys import KEYS, check_override, wrong_value
from trainer.schema import (
    CONFIG_FOLDER,
    compose_config,
    compose_for_resume,
    from_yaml,
    is_group,
    parse_overrides,
    to_dict,
    to_yaml,
)
from trainer.validation import validate

PRESETS = [
    (group.name, preset.stem)
    for group in sorted(CONFIG_FOLDER.iterdir())
    if group.is_dir()
    for preset in sorted(group.glob("*.yaml"))
]


@pytest.mark.parametrize(("group", "name"), PRESETS, ids=[f"{group}={name}" for group, name in PRESETS])
def test_every_preset_composes_into_a_valid_configuration(group: str, name: str):
    config = compose_config(["algo=impala"] * (name == "retrace") + [f"{group}={name}"])
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


def test_what_a_preset_sets_for_another_algorithm_is_no_override():
    config = compose_config(["algo=impala", "env=CartPole", "impala.update_epochs=3"])
    assert (config.ppo.update_epochs, config.impala.update_epochs) == (8, 3)


def documented_commands() -> list[tuple[str, list[str]]]:
    """(page, arguments) of every training command that README and docs show without placeholders."""
    root = CONFIG_FOLDER.parent
    found = []
    for page in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        for command in re.findall(r"scripts/train\.py ([^`#\n|()]*)", page.read_text()):
            if not re.search(r"<|\.\.\.", command):
                found.append((page.name, shlex.split(command)))
    return found


def test_the_training_commands_in_the_documentation_have_keys_and_presets_that_are_there():
    commands = documented_commands()
    assert len(commands) > 30
    for page, arguments in commands:
        for override in parse_overrides([argument for argument in arguments if "=" in argument]):
            key, value = override.key_or_group, override.value()
            if is_group(key):
                assert (CONFIG_FOLDER / key / f"{value}.yaml").is_file(), (page, override.input_line)
            elif not override.is_sweep_override():
                check_override(key, value)


@pytest.mark.parametrize(("num_envs", "actors"), [(1, 1), (2, 2), (9, 1), (4096, 2)])
def test_any_number_of_envs_is_taken_where_nobody_set_the_pools(num_envs: int, actors: int):
    for algorithm in ("ppo", "impala"):
        config = compose_config([f"num_envs={num_envs}", f"algo={algorithm}"])
        assert config.num_actors == actors


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
        ("ppo=3", "ppo=3: ppo is a section of keys"),
        ("~num_envs", "~num_envs: a key is not deleted"),
        ("env=Ant", "env=Ant: a preset cannot be changed on resume"),
        ("num_env=3", "num_env: there is no such key; did you mean num_envs?"),
        ("+num_env=3", "num_env: there is no such key; did you mean num_envs?"),
        ("total_steps=abc", "total_steps=abc is not a whole number"),
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


def test_a_key_of_another_version_is_refused_as_the_run_s_own():
    saved = to_yaml(compose_config(["env=CartPole"])) + "old_key: 3\n"
    with pytest.raises(ConfigError, match=r"^old_key: there is no such key.*the run's config.yaml, of another version"):
        compose_for_resume(saved, ["total_steps=5"])


def test_an_empty_saved_configuration_is_all_defaults():
    assert from_yaml("{}") == Config()


def test_keys_are_the_leaves_of_the_configuration():
    assert {"num_envs", "ppo.learning_rate", "env.options", "wandb.mode"} <= KEYS.keys()
    assert "ppo" not in KEYS
    assert all(wrong_value(key, "?").startswith(f"{key}=? is not ") for key in KEYS), "every type has its words"


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
