"""Optimizer momentum across stage changes and germinations."""

from collections.abc import Callable

import torch
from torch import Tensor

from esper_lightning.envs import HostPool
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.stages import Stage
from tests.decisions import WAIT, act, germinate

MakePool = Callable[..., HostPool]


def test_a_seed_that_begins_to_blend_keeps_its_momentum(make_pool: MakePool) -> None:
    """F21: the step from TRAINING to BLENDING keeps memory and values of the seed's momentum buffers."""
    pool = make_pool(1, training=HostTraining(optimizer="sgd", batches=2))
    env, slot = pool.envs[0], pool.envs[0].slots[0]
    learned: list[Tensor] = []

    def momenta() -> list[Tensor]:
        return [env.optimizer.state[p]["momentum_buffer"] for p in slot.seed.parameters()]

    def remember(*_: object) -> None:
        learned[:] = [momentum.clone() for momentum in momenta()]

    pool.step(act(germinate(0, 1)))
    assert slot.stage is Stage.TRAINING
    before = momenta()
    env.optimizer.register_step_post_hook(remember)
    pool.step(act(WAIT))

    assert slot.stage is Stage.BLENDING
    assert all(now is then for now, then in zip(momenta(), before, strict=True))
    assert all(now.any() and torch.equal(now, then) for now, then in zip(momenta(), learned, strict=True))
