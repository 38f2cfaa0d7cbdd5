"""The reference executor, against plain training and validation loops."""

from collections.abc import Callable, Sequence
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from esper_lightning.controllers.rules import WaitOnly
from esper_lightning.envs import ActionConfig, HostPool
from esper_lightning.envs.executors import loop
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import MLP
from esper_lightning.tasks import Digits, Split
from tests.conftest import SMALL, small_host
from tests.decisions import WAIT, act, fossilize, germinate
from tests.envs.executors.episodes import same
from tests.imitated_gpu import ImitatedGpu

MakePool = Callable[..., HostPool]


def grown_pool(make_pool: MakePool) -> HostPool:
    """Return one environment with a fossilized, a probationary and a blending seed."""
    pool = make_pool(1, horizon=20)
    pool.reset([4])
    for row in [germinate(0, 1), germinate(2, 2), WAIT, fossilize(0)]:
        pool.step(act(row))
    pool.step(act(germinate(1, tempo=1)))
    pool.step(act(WAIT))
    assert [slot.stage for slot in pool.envs[0].slots] == [Stage.FOSSILIZED, Stage.BLENDING, Stage.PROBATIONARY]
    return pool


def mlp(input_shape: Sequence[int], outputs: int) -> nn.Module:
    """Return an MLP without BatchNorm, so that samples do not affect each other."""
    return MLP(input_shape, outputs, width=12, layers=2)


def test_an_epoch_is_a_plain_training_loop_bit_for_bit(make_pool: MakePool) -> None:
    seeds = ActionConfig(blueprints=["mlp_small", "lora"], tempos={"FAST": 2})
    pool = make_pool(1, mlp, actions=seeds, training=HostTraining(lr=0.02, batches=3, max_grad_norm=0.5))
    pool.reset([4])
    for row in (germinate(0), WAIT, germinate(1, 1)):  # a blended and a training seed
        pool.step(act(row))
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
        norms = [nn.utils.clip_grad_norm_(group["params"], 0.5) for group in optimizer.param_groups]
        optimizer.step()
        losses += loss.detach()
        hits += (outputs.argmax(1) == targets[indices]).float().mean()
    env.generator.set_state(generator)

    row = pool.executor.train_epoch([env], pool.data.train)[0]

    assert same(list(env.network.state_dict().values()), list(network.state_dict().values()))
    assert torch.equal(row[:2], torch.stack([losses, hits]) / 3)
    torch.testing.assert_close(row[3:15:4], torch.stack(norms))  # of the host and of the seeds, before clipping


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


def test_a_validation_is_that_of_the_network_with_its_seeds_taken_out(make_pool: MakePool) -> None:
    pool = grown_pool(make_pool)
    env, (inputs, targets) = pool.envs[0], pool.data.validation
    loss, score = pool.executor.validate([env], pool.data.validation)[0]

    slots = [slot.name for slot in env.slots]
    left_out = [[], *([name] for name in slots), slots[1:]]  # the last: fossilized seeds only
    for variant, names in enumerate(left_out):
        network = deepcopy(env.network).eval()
        for name in names:
            slots_of(network)[name].empty()
        outputs = network(inputs)
        torch.testing.assert_close(loss[variant], F.cross_entropy(outputs, targets), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(score[variant], (outputs.argmax(1) == targets).float().mean())
    assert len(set(loss.tolist())) == 5, "every combination should say something else"


def test_validation_changes_nothing(make_pool: MakePool) -> None:
    pool = grown_pool(make_pool)
    before = deepcopy(pool.envs[0].network.state_dict())

    pool.executor.validate(pool.envs, pool.data.validation)

    after = pool.envs[0].network.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("before", [True, False])
def test_the_switch_of_convolutions_is_left_as_it_was(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", before)
    pool = make_pool(1, training=HostTraining(batches=1, onednn=not before))
    used: list[bool] = []
    pool.envs[0].network.register_forward_pre_hook(lambda *_: used.append(torch.backends.mkldnn.enabled))

    pool.step(WaitOnly().act(pool))

    assert used == [not before] * 2, "in training and in validation"
    assert torch.backends.mkldnn.enabled is before


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_host_is_validated_in_parts_with_the_same_result(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Digits(validation=50, test=50)
    with ImitatedGpu():
        pool = HostPool(task, task.load(), small_host, config=SMALL, n_envs=1, device=torch.device(device))
        lengths: list[int] = []
        pool.envs[0].network.register_forward_pre_hook(lambda _, inputs: lengths.append(len(inputs[0])))
        whole = pool.executor.validate(pool.envs, pool.data.validation)
        monkeypatch.setattr(loop, "MAX_VALIDATED_ELEMENTS", {device: 20 * 64})
        in_parts = pool.executor.validate(pool.envs, pool.data.validation)
        torch.testing.assert_close(in_parts, whole)
    assert lengths == [50, 20, 20, 10]
