"""The reference executor, against plain training and validation loops."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch.nn import functional as F

from esper_lightning.controllers.rules import WaitOnly
from esper_lightning.envs import HostPool
from esper_lightning.envs.executors import loop
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.tasks import Digits
from tests.conftest import SMALL, small_host
from tests.decisions import WAIT, act, fossilize, germinate
from tests.imitated_gpu import ImitatedGpu


def grown_pool(make_pool: Callable[..., HostPool]) -> HostPool:
    """Return one environment with a fossilized, a probationary and a blending seed."""
    pool = make_pool(1, horizon=20)
    pool.reset([4])
    for row in [germinate(0, 1), germinate(2, 2), WAIT, fossilize(0)]:
        pool.step(act(row))
    pool.step(act(germinate(1, tempo=1)))
    pool.step(act(WAIT))
    assert [slot.stage for slot in pool.envs[0].slots] == [Stage.FOSSILIZED, Stage.BLENDING, Stage.PROBATIONARY]
    return pool


def test_a_tick_is_what_a_plain_training_loop_does(make_pool: Callable[..., HostPool]) -> None:
    pool = make_pool(1, training=HostTraining(lr=0.01, batches=3, max_grad_norm=None))
    pool.reset([4])
    env, (inputs, targets) = pool.envs[0], pool.data.train
    network = deepcopy(env.network).train()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    generator = env.generator.get_state()
    losses, hits = [], []
    for indices in env.draw_batches(pool.data.train.samples).indices:
        outputs = network(inputs[indices])
        loss = F.cross_entropy(outputs, targets[indices])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        hits.append((outputs.argmax(1) == targets[indices]).float().mean().item())
    gradient = torch.cat([p.grad.flatten() for p in network.parameters()])

    env.generator.set_state(generator)
    row = pool.executor.train_epoch([env], pool.data.train)[0].tolist()

    for ours, theirs in zip(env.network.parameters(), network.parameters(), strict=True):
        # A twentieth of one step: Adam turns the rounding of a tiny gradient into a part of a step.
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=5e-4)
    norm, rms = gradient.norm().item(), gradient.square().mean().sqrt().item()
    assert row[:7] == pytest.approx([sum(losses) / 3, sum(hits) / 3, 0.0, norm, rms, 0.0, 0.0], rel=1e-4)
    assert row[7:] == [0.0] * 4 * 3  # of empty slots


def test_a_validation_is_that_of_the_network_with_its_seeds_taken_out(make_pool: Callable[..., HostPool]) -> None:
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


def test_validation_changes_nothing(make_pool: Callable[..., HostPool]) -> None:
    pool = grown_pool(make_pool)
    before = deepcopy(pool.envs[0].network.state_dict())

    pool.executor.validate(pool.envs, pool.data.validation)

    after = pool.envs[0].network.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("before", [True, False])
def test_the_switch_of_convolutions_is_left_as_it_was(
    make_pool: Callable[..., HostPool], monkeypatch: pytest.MonkeyPatch, before: bool
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
