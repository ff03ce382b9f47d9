"""The configuration: presets, defaults, what a run folder stores, what a resumed run may change."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import envs
from scripts.overrides import check_overrides
from trainer.config import Config, ConfigError, EnvConfig
from trainer.keys import KEYS, check_override, wrong_value
from trainer.schema import (
    CONFIG_FOLDER,
    compose_config,
    compose_for_resume,
    from_yaml,
    is_group,
    parse_overrides,
    read_yaml,
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


@pytest.mark.parametrize("name", [name for group, name in PRESETS if group == "env"])
def test_every_env_preset_has_settings_for_impala(name: str):
    config = compose_config(["algo=impala", f"env={name}"])
    validate(config)
    assert config.impala.optimizer == "adam", "the paper's defaults are tuned for none of them"


def test_impala_takes_ppo_s_recipe_where_its_own_was_not_tuned():
    config = compose_config(["algo=impala", "env=HalfCheetah"])
    assert config.impala.learning_rate == config.ppo.learning_rate == 3e-4
    assert (config.impala.update_epochs, config.impala.num_minibatches) == (10, 16)
    assert config.credit.vtrace_lambda == config.credit.gae_lambda == 0.92


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


@pytest.mark.parametrize(("num_envs", "actors"), [(1, 1), (2, 2), (9, 1), (512, 2), (1026, 2), (4096, 4)])
def test_any_number_of_envs_is_taken_where_nobody_set_the_pools(num_envs: int, actors: int):
    compose_config([f"num_envs={num_envs}"])
    config = compose_config([f"num_envs={num_envs}", "algo=impala"])
    assert config.num_actors == actors
    assert compose_config(["algo=impala", "env.engine=torch", "env.id=CartPole", "num_envs=4096"]).num_actors == 2


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


def test_where_ones_own_module_lies_is_no_fault_of_a_saved_configuration():
    saved = to_yaml(Config(env=EnvConfig(module="far_away", engine="mine")))
    with pytest.raises(ConfigError, match=r"^env\.module=far_away cannot .*; it is looked for .* in PYTHONPATH$"):
        compose_for_resume(saved, [])
    assert read_yaml(saved).env.engine == "mine", "to look at it nothing is imported"


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
