import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import HostPool, Op
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.rewards import ObjectiveConfig
from esper_lightning.growth.stages import Stage
from esper_lightning.tasks import AugmentConfig
from tests.decisions import WAIT, act, germinate
from tests.envs.episodes import random_actions, score_by_forward_pass
from tests.envs.executors.episodes import same

LONGER = HostTraining(lr=0.02, batches=8)  # long enough for hosts to learn something


def play_episode(pool: HostPool, members: list[int]) -> list[list[Tensor]]:
    """Play an episode and return everything observable of each environment; `members` sets all RNG seeds."""
    choices = [random.Random(member) for member in members]
    seen: list[list[Tensor]] = [[features.clone()] for features in pool.reset([100 + m for m in members]).features]
    for _ in range(pool.config.horizon):
        step = pool.step(random_actions(pool, choices))
        rows = (*step.observation, step.reward, *step.masks, *step.metrics)
        for i, life in enumerate(seen):
            life += [row[i].clone() for row in rows]
    for life, env in zip(seen, pool.envs, strict=True):
        life += [weights.clone() for weights in env.network.state_dict().values()]
    return seen


def test_an_environment_does_not_depend_on_its_neighbours_nor_on_their_number(
    make_pool: Callable[..., HostPool],
) -> None:
    make_pool = partial(make_pool, training=HostTraining(batches=2, augment=AugmentConfig(pad=1, flip=True)))
    among_eight = play_episode(make_pool(8), list(range(8)))
    elsewhere = play_episode(make_pool(3, executor="threads"), [40, 5, 41])

    for member in (0, 5, 7):
        (alone,) = play_episode(make_pool(1), [member])
        assert same(alone, among_eight[member]), f"host {member} differs among eight"
    assert same(elsewhere[1], among_eight[5])
    assert not same(among_eight[4], among_eight[5])


def test_an_action_takes_effect_before_the_host_trains(make_pool: Callable[..., HostPool]) -> None:
    pool = make_pool(1)
    step = pool.step(act(germinate(1, 1)))

    assert [(e.host, e.tick, e.slot, e.after) for e in step.events] == [
        (0, 1, "block2.pool", Stage.GERMINATED),
        (0, 1, "block2.pool", Stage.TRAINING),
    ]
    # The last layer of a seed starts as zeros, so it has been trained in the same step.
    assert all(p.all() for p in pool.envs[0].slots[1].seed.parameters())
    assert pool.envs[0].last_op is Op.GERMINATE


def test_what_is_not_fossilized_at_the_horizon_is_dropped_and_costs_nothing(
    make_pool: Callable[..., HostPool],
) -> None:
    pool = make_pool(1, objective=ObjectiveConfig(price=0.3), training=LONGER)
    pool.reset([3])
    step = pool.step(act(germinate(0, 2)))
    while not step.truncated.any():
        step = pool.step(act(WAIT))

    network, validation = pool.envs[0].network, pool.data.validation
    bare = score_by_forward_pass(network, validation, without=["block1.pool"])
    assert bare != score_by_forward_pass(network, validation)
    assert not step.terminated.any()
    assert step.metrics.objective.item() == step.metrics.score.item() == pytest.approx(bare)
    assert step.metrics.parameters.item() == 390


def test_observation_and_masks_are_written_into_the_same_storage(make_pool: Callable[..., HostPool]) -> None:
    pool, wanderer = make_pool(2), RandomValid(0)
    storage = [t.data_ptr() for t in (*pool.observation, *pool.masks)]
    before = pool.observation.features.clone()

    assert pool.reset([1, 2]) is pool.observation
    for _ in range(2):
        step = pool.step(wanderer.act(pool))
        assert [t.data_ptr() for t in (*step.observation, *step.masks)] == storage
    assert not torch.equal(pool.observation.features, before)


def test_the_global_random_state_is_neither_read_nor_changed(make_pool: Callable[..., HostPool]) -> None:
    def episode() -> list[Tensor]:
        return play_episode(make_pool(1), [9])[0]

    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    first = episode()
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]

    torch.manual_seed(2)
    assert same(first, episode())


def test_what_the_host_sees_is_what_was_drawn_for_it(make_pool: Callable[..., HostPool]) -> None:
    pool = make_pool(1, training=HostTraining(batch_size=8, batches=4, augment=AugmentConfig(flip=True)))
    (env,), data, seen = pool.envs, pool.data.train, list[Tensor]()
    state = env.generator.get_state()
    drawn = env.draw_batches(data.samples)
    env.generator.set_state(state)
    env.network.register_forward_pre_hook(lambda network, args: seen.append(args[0].clone()))
    pool.executor.train_epoch(pool.envs, data)

    for image, i, flip in zip(
        torch.cat(seen), drawn.indices.flatten(), drawn.augment_params.flip.flatten(), strict=True
    ):
        assert torch.equal(image, data.inputs[i].flip(2) if flip else data.inputs[i])
