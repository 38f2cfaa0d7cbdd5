"""Environments from configs, and their ids. Skipped without the extra `gym`."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

pytest.importorskip("gymnasium")

import gymnasium

import esper_lightning.gym
from esper_lightning.config_files import config_paths
from esper_lightning.governor.judge import GovernorConfig
from esper_lightning.gym.make import load_pool, make_vector_env
from tests.gym.configs import write_config
from tests.runs import ROOT

IDS = {name: spec.kwargs for name, spec in gymnasium.registry.items() if spec.namespace == "esper_lightning"}

GOVERNOR = "esper_lightning.callbacks.Governor"

TO_DOWNLOAD = ("Cifar10",)
"""Beginnings of the names of ids whose data are not part of a package."""


def test_an_id_stands_for_each_config_of_one_task_that_comes_with_the_package() -> None:
    assert {kwargs["config"] for kwargs in IDS.values() if kwargs} == {path.stem for path in config_paths()} - {
        "general",
        "mixed",
    }
    assert IDS["esper_lightning/Growth-v0"] == {} and IDS["esper_lightning/DigitsFamily-v0"] == {
        "config": "digits_family"
    }


def test_ids_are_registered_without_torch() -> None:
    """Run in a subprocess, since this one has already loaded the modules."""
    code = (
        "import sys, gymnasium, esper_lightning.gym as gym; gymnasium.register_envs(gym); print('torch' in sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert loaded.stdout == "False\n"


def test_without_gymnasium_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "esper_lightning.gym")
    monkeypatch.delattr(esper_lightning, "gym")

    with pytest.raises(
        ImportError, match=r"^esper_lightning\.gym needs gymnasium; pip install 'esper-lightning\[gym\]'$"
    ):
        __import__("esper_lightning.gym")


def test_a_config_is_made_into_the_hosts_that_fit_would_train(tmp_path: Path) -> None:
    config = write_config(
        tmp_path / "mine.yaml",
        model={"ppo": {"gamma": 0.9, "horizon_is_end": False}},
        trainer={"callbacks": [{"class_path": GOVERNOR, "init_args": {"rules": {"penalty": 0.25}}}]},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", category=UserWarning)
        env = gymnasium.make("esper_lightning/Growth-v0", config=config)
        env.reset(seed=1)
        assert env.step(env.action_space.sample())[3] is False
        assert env.step(env.action_space.sample())[3] is True, "the horizon of the config is a time limit"

    pool = env.unwrapped.hosts.pool
    assert (pool.n_envs, pool.config.training.batches, pool.config.reward.gamma) == (1, 2, 0.9)
    assert pool.governor == GovernorConfig(penalty=0.25)


def test_hosts_are_not_watched_where_the_config_says_so(tmp_path: Path) -> None:
    envs = make_vector_env(write_config(tmp_path / "mine.yaml", trainer={"callbacks": []}), num_envs=3)

    assert envs.hosts.pool.governor is None
    assert envs.observation_space.shape[0] == envs.action_space.shape[0] == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {max_epochs: 3}", "mine.yaml: the following arguments are required: data.task, data.host"),
        ("- 1", "mine.yaml: Unexpected config"),
        ("data: {also: {text: {}}}", r"mine\.yaml: .*data\.also"),
    ],
)
def test_a_config_without_hosts_of_one_task_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)

    with pytest.raises(ValueError, match=message):
        load_pool(tmp_path / "mine.yaml", 1)


def test_a_setting_that_is_not_valid_is_told_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mine\.yaml: .*n_horizons"):
        load_pool(write_config(tmp_path / "mine.yaml", data={"n_horizons": 3}), 1)
    with pytest.raises(ValueError, match=r"n_envs must be at least 1, got 0"):
        load_pool(write_config(tmp_path / "mine.yaml"), 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, kwargs in IDS.items() if kwargs])
def test_shipped_configs_are_environments(name: str) -> None:
    if name.removeprefix("esper_lightning/").startswith(TO_DOWNLOAD):
        with pytest.raises(ValueError, match="CIFAR"):
            gymnasium.make(name)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error", category=UserWarning)
        env = gymnasium.make(name, render_mode="rgb_array")
        env.reset(seed=0)
        for _ in range(3):
            env.step(env.action_space.sample())
        assert env.render().dtype.name == "uint8"


@pytest.mark.slow
def test_gymnasiums_checker_accepts_an_environment_with_an_id(tmp_path: Path) -> None:
    env = gymnasium.make("esper_lightning/Growth-v0", config=str(write_config(tmp_path / "mine.yaml"))).unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error", category=UserWarning)
        gymnasium.utils.env_checker.check_env(env)
