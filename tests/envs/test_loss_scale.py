"""Loss scales of hosts in fp16, one by one and stacked, against torch's own scaler."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from esper_lightning.envs import HostPool, host_training
from esper_lightning.envs.executors import LoopExecutor
from esper_lightning.envs.host_training import INITIAL_LOSS_SCALE, HostTraining, LossScale, next_scale
from tests.envs.executors.episodes import same
from tests.envs.executors.fused.hosts import make
from tests.growth.grown import CPU

patterns = st.lists(st.tuples(*[st.booleans()] * 3), min_size=1, max_size=12)
"""Strategy: whether each of 3 hosts has finite gradients, by step."""


def weight_and_optimizer() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.ones(()))
    return weight, torch.optim.SGD([weight], lr=0.1, fused=True)


@given(pattern=patterns, power=st.sampled_from([-100, 12, 127]))
def test_whatever_overflows_scales_and_steps_are_those_of_torch(pattern: list[tuple[bool, ...]], power: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_training, "GROWTH_INTERVAL", 3)
        patch.setattr(host_training, "INITIAL_LOSS_SCALE", 2.0**power)
        theirs = [torch.amp.GradScaler("cpu", 2.0**power, growth_interval=3) for _ in range(3)]
        ours = [LossScale(CPU) for _ in theirs]
        scales, good_steps = torch.full((3,), 2.0**power), torch.zeros(3, dtype=torch.int32)
        weights = [(weight_and_optimizer(), weight_and_optimizer()) for _ in theirs]
        for healthy in pattern:
            for own, their, pair, well in zip(ours, theirs, weights, healthy, strict=True):
                for (weight, optimizer), scaled in zip(pair, (own.scale, their.scale(torch.ones(()))), strict=True):
                    optimizer.zero_grad()
                    (weight * scaled).backward()
                    weight.grad.mul_(1.0 if well else float("inf"))
                own.unscale(pair[0][1])
                assert own.step(pair[0][1]) == well
                their.step(pair[1][1])
                their.update()
                assert torch.equal(pair[0][0], pair[1][0])
            scales, good_steps = next_scale(scales, good_steps, torch.tensor(healthy))
        for i, (own, their) in enumerate(zip(ours, theirs, strict=True)):
            expected = (their.get_scale(), their.state_dict()["_growth_tracker"])
            assert (own.scale.item(), own.good_steps.item()) == (scales[i], good_steps[i]) == expected


def half_pool(executor: str, optimizer: str = "adam") -> HostPool:
    """Return a pool of 3 hosts in fp16 with training and blended seeds; the second host overflows."""
    training = HostTraining(lr=0.02, batches=4, batch_size=16, precision="fp16", optimizer=optimizer)
    pool = make(executor, "cnn", 3, torch.float32, training=training)
    pool.reset(range(3))
    for env in pool.envs:
        env.growing.germinate("block1", "conv_light", ticks=1)
    pool.train_without_actions(2)
    for env in pool.envs:
        env.growing.germinate("block3", "conv_small")
    pool.train_without_actions(1)
    with torch.no_grad():
        pool.envs[1].slots[0].seed.body[0].weight.fill_(1e6)
    return pool


def tensors(pool: HostPool, host: int) -> list[Tensor]:
    """Return copies of weights and optimizer state of a host and its seeds."""
    env = pool.envs[host]
    states = [env.optimizer.state[p] for group in env.optimizer.param_groups for p in group["params"]]
    kept = [*env.network.parameters(), *(value for state in states for value in state.values())]
    return [tensor.detach().clone() for tensor in kept]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_in_a_stack_a_host_out_of_range_is_skipped_alone_with_all_its_seeds(optimizer: str) -> None:
    pool = half_pool("fused", optimizer)
    before, skipped = [tensors(pool, host) for host in range(3)], [env.skipped_steps for env in pool.envs]
    pool.train_without_actions(1)

    assert [env.skipped_steps - past for env, past in zip(pool.envs, skipped, strict=True)] == [0, 4, 0]
    scales = [env.loss_scale.scale for env in pool.envs]
    assert scales == [INITIAL_LOSS_SCALE, INITIAL_LOSS_SCALE / 2**4, INITIAL_LOSS_SCALE]
    assert same(tensors(pool, 1), before[1])
    for host in (0, 2):
        assert not any(torch.equal(a, b) for a, b in zip(tensors(pool, host), before[host], strict=True))


def test_the_loop_goes_on_with_the_scales_that_the_stack_left() -> None:
    turns, loop = half_pool("fused"), half_pool("loop")
    for pool in (turns, loop):
        pool.train_without_actions(1)
        with torch.no_grad():
            pool.envs[1].slots[0].seed.body[0].weight.fill_(0.1)
    turns.executor = LoopExecutor(turns.task, turns.config.training)
    for pool in (turns, loop):
        pool.train_without_actions(1)

    states = [[env.loss_scale.state_dict() for env in pool.envs] for pool in (turns, loop)]
    assert states[0] == states[1]
    assert states[0][1]["scale"] < states[0][0]["scale"]
    assert [env.skipped_steps for env in turns.envs] == [env.skipped_steps for env in loop.envs]
    assert states[0][0]["good_steps"] == 4 * 5, "steps since the last one that was skipped"
