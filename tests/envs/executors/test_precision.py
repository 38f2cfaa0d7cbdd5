"""Hosts in half precision: which parts use it, and that host and seeds skip a step together."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import EnvConfig, HostPool, host_training
from esper_lightning.envs.host_training import INITIAL_LOSS_SCALE, HostTraining
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from esper_lightning.tasks import Synthetic
from tests.decisions import WAIT, act, germinate
from tests.envs.executors.episodes import same
from tests.growth.grown import CPU
from tests.runs import differences

MakePool = Callable[..., HostPool]

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}

in_half = pytest.mark.parametrize("precision", HALVES)


class Overflow:
    """Makes the gradients of the host, or of the seed in its first slot, infinite while `on`."""

    def __init__(self, pool: HostPool, host: int = 0, of_seed: bool = False) -> None:
        self.on = True
        network = pool.envs[host].network
        module = pool.envs[host].slots[0].seed if of_seed else network.head
        next(module.parameters()).register_hook(self)

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient * float("inf") if self.on else gradient


def frozen(pool: HostPool, host: int) -> list[Tensor]:
    """Return copies of the weights and optimizer state of a host and its seeds."""
    env = pool.envs[host]
    states = [env.optimizer.state[p] for group in env.optimizer.param_groups for p in group["params"]]
    tensors = [*env.network.parameters(), *(value for state in states for value in state.values())]
    return [tensor.detach().clone() for tensor in tensors]


def one_step_pool(make_pool: MakePool, n_envs: int = 1, **settings: object) -> HostPool:
    """Return a pool in fp16 with one minibatch per step, and a training and a blending seed on the first host."""
    pool = make_pool(n_envs, horizon=20, training=HostTraining(precision="fp16", batches=1, lr=0.02, **settings))
    pool.reset(range(n_envs))
    idle = [WAIT] * (n_envs - 1)
    for row in (germinate(1, 1), WAIT, germinate(0, 2)):
        pool.step(act(row, *idle))
    assert [slot.stage for slot in pool.envs[0].slots] == [Stage.TRAINING, Stage.PROBATIONARY, Stage.DORMANT]
    return pool


@in_half
def test_what_is_measured_is_not_rounded(make_pool: MakePool, precision: str) -> None:
    pool = make_pool(2, training=HostTraining(precision=precision))
    for _ in range(2):
        metrics = pool.step(act(WAIT, WAIT)).metrics
    shares = torch.arange(101) / 100  # of 100 images

    assert metrics.score.dtype == metrics.loss.dtype == torch.float32
    assert torch.isin(metrics.score, shares).all()
    assert not torch.equal(metrics.loss, metrics.loss.to(HALVES[precision]).float())


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("of_seed", [False, True], ids=["host", "seed"])
def test_a_step_out_of_range_is_skipped_by_host_and_seeds_alike(
    make_pool: MakePool, optimizer: str, of_seed: bool
) -> None:
    pool = one_step_pool(make_pool, optimizer=optimizer)
    env, overflow = pool.envs[0], Overflow(pool, of_seed=of_seed)
    before, skipped, scale = frozen(pool, 0), env.skipped_steps, env.loss_scale.scale.item()
    step = pool.step(act(WAIT))

    assert same(frozen(pool, 0), before)
    assert (env.skipped_steps, env.loss_scale.scale.item()) == (skipped + 1, scale / 2)
    assert step.observation.features.isfinite().all()
    overflow.on = False
    pool.step(act(WAIT))
    assert not any(torch.equal(now, then) for now, then in zip(frozen(pool, 0), before, strict=True))
    assert (env.skipped_steps, env.loss_scale.scale.item()) == (skipped + 1, scale / 2)
    pool.reset([0])
    assert (env.skipped_steps, env.loss_scale.scale.item()) == (0, INITIAL_LOSS_SCALE)


def test_a_momentum_whose_first_step_was_skipped_begins_at_zero(make_pool: MakePool) -> None:
    training = HostTraining(precision="fp16", batches=1, optimizer="sgd", max_grad_norm=0.1)
    pool = make_pool(1, training=training)
    pool.reset([1])
    overflow, env = Overflow(pool), pool.envs[0]
    parameters = env.optimizer.param_groups[0]["params"]
    litter = [torch.full_like(p, 7.0) for _ in range(20) for p in parameters]
    del litter  # its memory is reused by new tensors
    pool.step(act(WAIT))

    assert not any(env.optimizer.state[p]["momentum_buffer"].any() for p in parameters)
    overflow.on = False
    pool.step(act(WAIT))
    assert all(torch.equal(env.optimizer.state[p]["momentum_buffer"], p.grad) for p in parameters)


def test_a_run_goes_on_bit_for_bit_from_every_tick(make_pool: MakePool) -> None:
    pool, other = (make_pool(2, training=HostTraining(batches=2, precision="fp16")) for _ in range(2))
    overflow, wanderer = Overflow(pool), RandomValid(2)
    for tick in range(pool.config.horizon):
        other.load_state_dict(deepcopy(pool.state_dict()))
        overflow.on = False
        action = wanderer.act(pool)
        pool.step(action)
        other.step(action)

        assert differences(pool.state_dict(), other.state_dict()) == []
        overflow.on = tick == 0  # the following steps begin with another scale
        if overflow.on:
            pool.executor.train_epoch(pool.envs, pool.data.train)
    assert pool.envs[0].loss_scale.scale < pool.envs[1].loss_scale.scale


def test_what_is_clipped_are_unscaled_gradients(make_pool: MakePool) -> None:
    limit = 0.05
    pool = one_step_pool(make_pool, max_grad_norm=limit)
    env, (inputs, targets) = pool.envs[0], pool.data.train
    generator = env.generator.get_state()
    network, optimizer = deepcopy((env.network, env.optimizer))
    scaler = torch.amp.GradScaler("cpu", init_scale=env.loss_scale.scale.item())
    (indices,) = env.draw_batches(pool.data.train.samples).indices
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(network.train()(inputs[indices]), targets[indices], reduction="none").mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norms = [nn.utils.clip_grad_norm_(group["params"], limit).item() for group in optimizer.param_groups]
    scaler.step(optimizer)
    env.generator.set_state(generator)

    row = pool.executor.train_epoch([env], pool.data.train)[0]

    assert same(list(env.network.state_dict().values()), list(network.state_dict().values()))
    assert row[3].item() == pytest.approx(norms[0], rel=1e-5)  # of the host, before clipping
    assert all(limit < norm < 100 for norm in norms)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_hosts_train_and_are_validated_in_the_precision_of_their_setting(
    make_pool: MakePool, precision: str, dtype: torch.dtype
) -> None:
    """S11: in both passes hosts compute in fp32, bf16 or fp16; the loss is scaled with the last alone."""
    pool = make_pool(1, training=HostTraining(batches=1, precision=precision))
    seen: set[tuple[bool, torch.dtype]] = set()

    def watch(network: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
        seen.add((network.training, outputs.dtype))

    pool.envs[0].network.register_forward_hook(watch)
    pool.step(act(WAIT))

    assert seen == {(True, dtype), (False, dtype)}
    assert (pool.envs[0].loss_scale is not None) is (precision == "fp16")


@pytest.mark.parametrize(("has_bf16", "precision"), [(True, "bf16"), (False, "fp16")])
def test_auto_is_the_half_precision_that_a_gpu_has(
    monkeypatch: pytest.MonkeyPatch, has_bf16: bool, precision: str
) -> None:
    monkeypatch.setattr(host_training, "has_bf16", lambda device: has_bf16)
    training = HostTraining(precision="auto")

    assert training.on(torch.device("cuda", 0), gains=False).precision == precision
    assert training.on(CPU, gains=True).precision == ("bf16" if has_bf16 else "fp32")
    assert training.on(CPU, gains=False).precision == "fp32"
    assert replace(training, onednn=False).on(CPU, gains=True).precision == "fp32"
    assert training.on(torch.device("mps"), gains=True).precision == "fp32"


@pytest.mark.parametrize(
    ("base", "batch_size", "has_bf16", "expected"),
    [(32, 64, True, "bf16"), (32, 64, False, "fp32"), (4, 64, True, "fp32"), (32, 8, True, "fp32")],
)
def test_auto_is_bf16_on_a_cpu_that_has_it_for_hosts_that_it_makes_faster_and_an_episode_goes_on_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, base: int, batch_size: int, has_bf16: bool, expected: str
) -> None:
    monkeypatch.setattr(host_training, "has_bf16", lambda device: has_bf16)
    task = Synthetic(shape=(3, 16, 16), classes=3, train=64, validation=16, test=8)
    training = HostTraining(precision="auto", batches=1, batch_size=batch_size)
    config = EnvConfig(horizon=4, executor="loop", training=training)

    def make_pool() -> HostPool:
        return HostPool(task, task.load(), partial(CNN, base=base), config=config, n_envs=1, device=CPU)

    pool, other = make_pool(), make_pool()
    pool.step(act(WAIT))
    other.load_state_dict(deepcopy(pool.state_dict()))

    assert pool.config.training.precision == pool.envs[0].training.precision == expected
    assert torch.equal(pool.step(act(WAIT)).metrics.loss, other.step(act(WAIT)).metrics.loss)


def test_tf32_is_refused_on_the_cpu(make_pool: MakePool) -> None:
    with pytest.raises(ValueError, match=r"^training.precision tf32 needs a GPU, hosts are on cpu; use fp32"):
        make_pool(1, training=HostTraining(precision="tf32"))
