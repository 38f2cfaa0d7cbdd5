"""Hosts as a vector environment of Gymnasium. Skipped without the extra `gym`."""

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium")

import gymnasium
from gymnasium.vector import AutoresetMode

import esper_lightning.gym
from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import HEADS, HostPool, Op
from esper_lightning.envs.actions import RELEVANT_OPS
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.envs.gymnasium import GymVector
from esper_lightning.envs.vector_env import ChoiceAction
from esper_lightning.gym import GrowthVectorEnv, make_vector_env
from esper_lightning.runtime.registry import config_paths
from tests.cli.test_export import write_config
from tests.conftest import FREE
from tests.decisions import WAIT, fossilize, germinate
from tests.envs.breaking import ONLY_NAN_DIVERGES, breaking_epoch

MakePool = Callable[..., HostPool]

HORIZON = 3
IDS = {name: spec.kwargs for name, spec in gymnasium.registry.items() if spec.namespace == "esper_lightning"}
GOVERNOR = "esper_lightning.callbacks.Governor"


def test_an_episode_depends_on_its_seed_and_its_actions_alone(make_pool: MakePool) -> None:
    two, one = GrowthVectorEnv(make_pool(2, horizon=HORIZON)), GrowthVectorEnv(make_pool(1, horizon=HORIZON))
    actions = [germinate(0, 1), WAIT, WAIT, germinate(2), WAIT]
    among, alone = [two.reset(seed=7)[0][1]], [one.reset(seed=8)[0][0]]

    for tick, action in enumerate(actions):
        observation, reward, *_ = two.step(np.array([WAIT, action]))
        own, own_reward, terminated, truncated, _ = one.step(np.array([action]))
        assert reward[1] == own_reward[0]
        assert (terminated[0], truncated[0]) == (tick == HORIZON - 1, False)
        among.append(observation[1])
        alone.append(own[0])

    np.testing.assert_array_equal(among, alone)
    assert not np.array_equal(alone[0], alone[HORIZON]), "the next episode has another host"
    assert all(observation in one.single_observation_space for observation in alone)


def test_rewards_of_an_episode_sum_to_the_change_of_the_objective(make_pool: MakePool) -> None:
    envs = GrowthVectorEnv(make_pool(2, horizon=HORIZON))
    _, begun = envs.reset(seed=[5, 6])
    steps = [envs.step(np.array([action, WAIT])) for action in (germinate(0, 1), WAIT, WAIT)]

    observation, _, terminated, truncated, info = steps[-1]
    assert terminated.all() and not truncated.any()
    assert not any((step[2] | step[3]).any() or "final_obs" in step[4] for step in steps[:-1])
    final = info["final_info"]
    np.testing.assert_allclose(sum(step[1] for step in steps), final["objective"] - begun["objective"], atol=1e-6)
    assert info["_final_obs"].all() and not np.array_equal(info["final_obs"], observation), "the next episode's"
    assert not (info["rng_seed"] % 2).any(), "those of evaluations are odd"
    assert final["rng_seed"].tolist() == begun["rng_seed"].tolist() != info["rng_seed"].tolist()


def test_a_host_that_is_rolled_back_begins_a_new_episode_and_its_neighbour_goes_on(make_pool: MakePool) -> None:
    envs, undisturbed = (GrowthVectorEnv(make_pool(2, governor=ONLY_NAN_DIVERGES, horizon=HORIZON)) for _ in range(2))
    wait = np.array([WAIT] * 2)
    for both in (envs, undisturbed):
        both.reset(seed=1)
        both.step(wait)
    with breaking_epoch(envs.pool, [0]):
        observation, reward, terminated, truncated, info = envs.step(wait)
    expected = undisturbed.step(wait)

    assert terminated.tolist() == [True, False] == info["_final_obs"].tolist() and not truncated.any()
    assert info["final_info"]["verdict"][0].startswith("host 0 (RNG seed ") and reward[0] < -0.1
    assert [env.tick for env in envs.pool.envs] == [0, 2]
    np.testing.assert_array_equal(observation[1], expected[0][1])
    third, of_neighbour = envs.step(wait), undisturbed.step(wait)
    assert third[2].tolist() == [False, True], "each host has a horizon of its own"
    np.testing.assert_array_equal(third[4]["final_obs"][1], of_neighbour[4]["final_obs"][1])


def test_an_action_that_is_not_possible_is_executed_as_wait(make_pool: MakePool) -> None:
    envs = GrowthVectorEnv(make_pool(2))
    _, info = envs.reset(seed=0)
    np.testing.assert_array_equal(info["action_mask"], envs.action_masks())
    assert not info["slot_mask"][:, Op.FOSSILIZE].any()

    *_, info = envs.step(np.array([fossilize(1), germinate(1)]))

    assert info["action_possible"].tolist() == [False, True]
    assert envs.pool.envs[0].last_op is Op.WAIT and envs.pool.envs[1].slots[1].occupied


def choices_in_possible_actions(pool: HostPool, host: int) -> list[bool]:
    """Try every action, and return the choices, head by head, that have an effect in one that is possible."""
    found = {head: [False] * size for head, size in pool.space.sizes.items()}
    for action in product(*map(range, pool.space.sizes.values())):
        if pool.masks_on_cpu.allows(host, action):
            for head, choice in zip(HEADS, action, strict=True):
                found[head][choice] |= Op(action[0]) in RELEVANT_OPS[head]
    return [choice for choices in found.values() for choice in (choices if any(choices) else [True, *choices[1:]])]


@pytest.mark.parametrize(("changes", "ticks"), [({}, range(6)), (FREE, (4, 8))], ids=["small", "free"])
def test_a_choice_is_masked_unless_a_possible_action_needs_it(
    make_pool: MakePool, changes: dict[str, Any], ticks: Any
) -> None:
    envs, wanderer = GrowthVectorEnv(make_pool(2, **changes)), RandomValid(rng_seed=3)
    pool = envs.pool
    pool.reset([1, 2])
    for tick in range(max(ticks) + 1):
        if tick in ticks:
            assert envs.action_masks().tolist() == [choices_in_possible_actions(pool, host) for host in range(2)]
        pool.step(wanderer.act(pool))


def test_a_policy_of_this_project_can_act_through_the_interface(make_pool: MakePool) -> None:
    envs = GrowthVectorEnv(make_pool(2, horizon=HORIZON))
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    pool = GymVector(envs, HORIZON, mask="action_mask")
    pool.reset([1, 2])

    steps = [pool.step(ChoiceAction(torch.tensor([WAIT] * 2))) for _ in range(HORIZON)]

    assert pool.masks.possible.shape == (2, sum(envs.pool.space.sizes.values()))
    assert steps[-1].terminated.all() and steps[-1].log["episode_length"] == HORIZON


def test_an_id_stands_for_each_config_of_one_task_that_comes_with_the_package() -> None:
    single = {path.stem for path in config_paths()} - {"general", "mixed"}

    assert {kwargs["config"] for kwargs in IDS.values() if kwargs} == single
    assert IDS["esper_lightning/Growth-v0"] == {}


def test_without_gymnasium_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "esper_lightning.gym")
    monkeypatch.delattr(esper_lightning, "gym")

    with pytest.raises(ImportError, match=r"^esper_lightning\.gym needs gymnasium; pip install"):
        __import__("esper_lightning.gym")


def test_a_config_is_made_into_the_hosts_that_fit_would_train(tmp_path: Path) -> None:
    config = write_config(
        tmp_path / "mine.yaml",
        model={"ppo": {"gamma": 0.9, "horizon_is_end": False}},
        trainer={"callbacks": [{"class_path": GOVERNOR, "init_args": {"rules": {"penalty": 0.25}}}]},
    )

    envs = gymnasium.make_vec("esper_lightning/Growth-v0", num_envs=2, config=config)

    envs.reset(seed=1)
    steps = [envs.step(envs.action_space.sample()) for _ in range(2)]
    assert [step[3].all() for step in steps] == [False, True], "the horizon of the config is a time limit"
    pool = envs.unwrapped.pool
    assert (pool.n_envs, pool.config.training.batches, pool.config.reward.gamma) == (2, 2, 0.9)
    assert pool.governor == GovernorConfig(penalty=0.25)
    assert make_vector_env(write_config(config, trainer={"callbacks": []})).pool.governor is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {max_epochs: 3}", "mine.yaml: the following arguments are required: data.task, data.host"),
        ("data: {also: {text: {}}}", r"mine\.yaml: .*data\.also"),
    ],
)
def test_a_config_without_hosts_of_one_task_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)

    with pytest.raises(ValueError, match=message):
        make_vector_env(tmp_path / "mine.yaml")
