"""Hosts with data augmentation: their images depend on their own RNG seed alone, with every executor."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from esper_lightning.envs import HostPool
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.tasks import AugmentConfig, Split
from tests.decisions import WAIT, act, germinate

MakePool = Callable[..., HostPool]

AUGMENT = AugmentConfig(pad=1, flip=True)
TRAINING = HostTraining(batch_size=16, batches=3, augment=AUGMENT)


def weights_after_three_ticks(pool: HostPool, seeds: Sequence[int]) -> list[list[Tensor]]:
    """Return the weights of each host after three ticks."""
    pool.reset(seeds)
    for row in (germinate(0, 1), WAIT, WAIT):
        pool.step(act(*[row] * pool.n_envs))
    return [list(env.network.state_dict().values()) for env in pool.envs]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def inputs_of_epoch(pool: HostPool, data: Split) -> list[Tensor]:
    """Return the inputs of the first host in an epoch on `data`, one tensor per minibatch."""
    inputs: list[Tensor] = []
    pool.envs[0].network.register_forward_pre_hook(lambda network, args: inputs.append(args[0].clone()))
    pool.executor.train_epoch(pool.envs[:1], data)
    return inputs


@pytest.mark.parametrize("executor", ["loop", "threads"])
def test_a_host_learns_the_same_alone_and_among_others(make_pool: MakePool, executor: str) -> None:
    (alone,) = weights_after_three_ticks(make_pool(1, training=TRAINING), [5])
    first, *_ = weights_after_three_ticks(make_pool(3, training=TRAINING, executor=executor), [5, 1, 2])
    *_, last = weights_after_three_ticks(make_pool(3, training=TRAINING, executor=executor), [8, 9, 5])
    (plain,) = weights_after_three_ticks(make_pool(1, training=replace(TRAINING, augment=AugmentConfig())), [5])

    assert same(alone, first) and same(alone, last)
    assert not same(alone, plain), "it learned from other images"


def test_what_the_host_sees_is_what_was_drawn_for_it(make_pool: MakePool) -> None:
    pool = make_pool(1, training=HostTraining(batch_size=8, batches=4, augment=AugmentConfig(flip=True)))
    state = pool.envs[0].generator.get_state()
    drawn = pool.envs[0].draw_batches(pool.data.train.samples)
    pool.envs[0].generator.set_state(state)

    inputs = torch.cat(inputs_of_epoch(pool, pool.data.train))

    for image, i, flip in zip(inputs, drawn.indices.flatten(), drawn.augment_params.flip.flatten(), strict=True):
        original = pool.data.train.inputs[i]
        assert torch.equal(image, original.flip(2) if flip else original)
