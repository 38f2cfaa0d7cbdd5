"""Optimizer steps skipped because gradients overflow fp16, and clipping of gradient norms."""

import math
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.envs import HostPool
from esper_lightning.envs.executors import StreamsExecutor
from esper_lightning.envs.governor import Verdict
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.runtime.ranks import ALONE
from esper_lightning.telemetry.metrics import tick_metrics
from esper_lightning.telemetry.observer import join, observe
from tests.decisions import WAIT, act, germinate
from tests.envs.breaking import ONLY_NAN_DIVERGES, breaking_epoch
from tests.envs.executors.fake_cuda import FakeCuda
from tests.runs import differences

MakePool = Callable[..., HostPool]


def total_norm(gradients: list[Tensor]) -> float:
    """Compute the Euclidean norm over all tensors."""
    return nn.utils.get_total_norm(gradients).item()


def test_host_and_seeds_skip_a_step_together(make_pool: MakePool) -> None:
    """F4: if one gradient of a host or its seeds overflows fp16, none of them steps, and that host counts it."""
    pool = make_pool(2, training=HostTraining(batches=1, precision="fp16"))
    pool.step(act(germinate(0, 1), germinate(0, 1)))
    seed = pool.envs[0].slots[0].seed
    next(seed.parameters()).register_hook(lambda gradient: gradient * math.inf)
    counted = [env.skipped_steps for env in pool.envs]
    before = [[p.clone() for p in env.network.parameters()] for env in pool.envs]
    step = pool.step(act(WAIT, WAIT))

    stood = [
        [torch.equal(p, then) for p, then in zip(env.network.parameters(), weights, strict=True)]
        for env, weights in zip(pool.envs, before, strict=True)
    ]
    assert all(stood[0]) and not any(stood[1])
    assert [env.skipped_steps for env in pool.envs] == [counted[0] + 1, counted[1]]
    written = tick_metrics(join([observe(pool, step, 1)], ALONE), pool.space.slot)
    assert {tag: steps for tag, steps in written.items() if "skipped" in tag} == {
        "hosts/skipped_steps": sum(counted) + 1,
        "skipped_steps/host0": counted[0] + 1,
        "skipped_steps/host1": counted[1],
    }


@pytest.mark.parametrize("executor", ["loop", "threads", "fused"])
def test_a_host_that_can_take_no_step_is_rolled_back_and_the_others_step_on(make_pool: MakePool, executor: str) -> None:
    """F4: a host that skips every step is counted, logged and rolled back; the other host keeps training."""
    training = HostTraining(lr=0.02, batches=4, precision="fp16")
    pool = make_pool(2, governor=ONLY_NAN_DIVERGES, training=training, executor=executor)
    pool.reset([1, 2])
    pool.step(act(germinate(0, 0), germinate(0, 0)))
    counted = [env.skipped_steps for env in pool.envs]
    good = deepcopy(pool.envs[0].loss_scale.state_dict())
    with torch.no_grad():
        for parameter in pool.envs[0].slots[0].seed.parameters():
            parameter.fill_(math.nan)  # behind straight-through: the host itself is healthy
    pool.envs[0].take_snapshot()
    before = [p.clone() for p in pool.envs[0].network.parameters()]
    step = pool.step(act(WAIT, WAIT))

    assert [word.decision for word in step.verdicts] == [Verdict.SUSPICIOUS]
    stood = [
        torch.equal(a, b) for a, b in zip(pool.envs[0].network.parameters(), before, strict=True) if a.isfinite().all()
    ]
    assert stood and all(stood), "host and seed made the same decision"
    assert pool.envs[0].skipped_steps == counted[0] + 4
    written = tick_metrics(join([observe(pool, step, 1)], ALONE), pool.space.slot)
    assert written["skipped_steps/host0"] == counted[0] + 4
    assert pool.envs[1].skipped_steps < counted[1] + 4
    scale = pool.envs[1].loss_scale.scale.clone()
    step = pool.step(act(WAIT, WAIT))
    assert [(word.host, word.decision) for word in step.verdicts] == [(0, Verdict.ROLL_BACK)]
    assert pool.envs[0].loss_scale.state_dict() == good, "its loss scale is that of the snapshot"
    assert pool.envs[1].loss_scale.scale.clone() <= scale or pool.envs[1].skipped_steps == counted[1]


def test_a_rollback_touches_one_hosts_scaler_between_the_streams_work(make_pool: MakePool, fake_cuda: FakeCuda) -> None:
    """F5: a rollback on a stream restores the host's loss scale; other loss scales are those of the loop executor."""
    training = HostTraining(batches=2, precision="fp16")
    pools = [make_pool(3, governor=ONLY_NAN_DIVERGES, training=training) for _ in range(2)]
    pools[0].executor = StreamsExecutor(pools[0].task, training)
    for pool in pools:
        pool.reset([1, 2, 3])
        for tick in range(6):
            with breaking_epoch(pool, [1] if tick == 3 else []):
                step = pool.step(act(*[germinate(0, 1) if tick == 0 else WAIT] * 3))
            assert [word.host for word in step.verdicts if word.decision.diverged] == [1] * (tick == 3)

    assert len({id(env.loss_scale) for env in pools[0].envs}) == 3
    ours, theirs = ([env.state_dict() for env in pool.envs] for pool in pools)
    assert differences(ours, theirs) == []


def test_seeds_are_clipped_each_for_itself(make_pool: MakePool) -> None:
    """F8: at every optimizer step the gradient of each group, host or seed, is within the limit."""
    largest: dict[float | None, float] = {}
    for limit in (1e-2, None):
        pool = make_pool(1, training=HostTraining(lr=0.02, batches=3, max_grad_norm=limit))
        optimizer, norms = pool.envs[0].optimizer, []

        def watch(optimizer: torch.optim.Optimizer, *_: object, norms: list[float] = norms) -> None:
            norms += [total_norm([p.grad for p in group["params"]]) for group in optimizer.param_groups]

        optimizer.register_step_pre_hook(watch)
        pool.step(act(germinate(1, 1)))
        assert len(norms) == 2 * 3  # host and seed, three batches
        largest[limit] = max(norms)

    assert largest[1e-2] <= 1e-2 * (1 + 1e-4)
    assert largest[None] > 1e-1
