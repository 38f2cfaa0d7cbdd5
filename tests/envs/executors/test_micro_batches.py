"""A minibatch split into micro-batches gives the same training step as the whole minibatch."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.envs import ActionConfig, HostPool
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.hosts import MLP
from esper_lightning.tasks import Split
from tests.conftest import SMALL
from tests.decisions import WAIT, act, germinate

MakePool = Callable[..., HostPool]

SEEDS = ActionConfig(blueprints=["mlp_small", "lora"], tempos={"FAST": 2})


def mlp(input_shape: Sequence[int], outputs: int) -> nn.Module:
    """Return an MLP without BatchNorm, so that samples do not affect each other."""
    return MLP(input_shape, outputs, width=12, layers=2)


def blended_pool(make_pool: MakePool, parts: int, limit: float | None = 0.5, optimizer: str = "adam") -> HostPool:
    """Return a pool of one host with a blending and a training seed."""
    training = HostTraining(lr=0.02, batches=3, micro_batches=parts, max_grad_norm=limit, optimizer=optimizer)
    # The proximal gradient has norms over a part of the batch.
    lifecycle = replace(SMALL.lifecycle, isolation="straight_through")
    pool = make_pool(1, host=mlp, actions=SEEDS, training=training, lifecycle=lifecycle)
    pool.reset([4])
    for row in (germinate(0), WAIT, germinate(1, 1)):
        pool.step(act(row))
    return pool


def weights(pool: HostPool) -> list[Tensor]:
    return [value.clone() for value in pool.envs[0].network.state_dict().values()]


def test_a_batch_in_one_part_is_a_plain_training_loop_bit_for_bit(make_pool: MakePool) -> None:
    pool = blended_pool(make_pool, 1, limit=0.5)
    env, (inputs, targets) = pool.envs[0], pool.data.train
    generator = env.generator.get_state()
    network, optimizer = deepcopy((env.network, env.optimizer))
    network.train()
    losses, hits = torch.zeros(()), torch.zeros(())
    for indices in env.draw_batches(pool.data.train.samples).indices:
        optimizer.zero_grad()
        outputs = network(inputs[indices])
        loss = F.cross_entropy(outputs, targets[indices], reduction="none").mean()
        loss.backward()
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.5)
        optimizer.step()
        losses += loss.detach()
        hits += (outputs.argmax(1) == targets[indices]).float().mean()
    env.generator.set_state(generator)

    row = pool.executor.train_epoch([env], pool.data.train)[0]

    assert all(
        torch.equal(ours, theirs) for ours, theirs in zip(weights(pool), network.state_dict().values(), strict=True)
    )
    assert torch.equal(row[:2], torch.stack([losses, hits]) / 3)


def test_parts_must_be_of_equal_size() -> None:
    HostTraining(batch_size=12, micro_batches=4)
    with pytest.raises(ValueError, match=r"training\.micro_batches must divide batch_size, 5 does not divide 12"):
        HostTraining(batch_size=12, micro_batches=5)
    with pytest.raises(ValueError, match=r"training\.micro_batches must be positive, got 0"):
        HostTraining(micro_batches=0)
    with pytest.raises(ValueError, match=r"training\.micro_batches must divide batch_size"):
        HostTraining(batch_size=4, micro_batches=8)


def test_a_host_batch_can_go_through_in_micro_batches(make_pool: MakePool) -> None:
    """S12: the host sees a quarter of a batch at a time, and learns from the whole: same batches, same step."""
    seen: list[int] = []
    weights = []
    for parts in (1, 4):
        training = HostTraining(batches=2, batch_size=20, micro_batches=parts)
        pool = make_pool(1, host=mlp, actions=ActionConfig(blueprints=["norm"]), training=training)
        network = pool.envs[0].network.double()
        network.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
        pool.executor.train_epoch(pool.envs, Split(pool.data.train.inputs.double(), pool.data.train.targets))
        weights.append(list(network.parameters()))

    assert seen == [20] * 2 + [5] * 8
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-10, atol=1e-12)
