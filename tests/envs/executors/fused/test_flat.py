"""Hosts that live in an arena, and their optimizer, are in every respect as if each had memory of its own."""

import io
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from esper_lightning.envs import HostPool
from esper_lightning.envs.executors import FusedExecutor, LoopExecutor
from esper_lightning.envs.executors.fused.executor import FusedEpoch
from esper_lightning.envs.executors.fused.hosts import BatchedHosts
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.growth.stages import Stage
from tests.envs.breaking import set_weight_to_nan
from tests.envs.executors.fused.hosts import FAST_CONFIG, make, precision
from tests.growth.grown import generator_of

N = 3

SLOTS = ("layer1", "layer2")

EXACT = 1e-9

close = partial(torch.testing.assert_close, rtol=EXACT, atol=1e-12, equal_nan=True)


def tensors_of(env: HostEnv) -> Iterator[Tensor]:
    """Yield weights, statistics and optimizer state of a host and its seeds."""
    yield from env.network.parameters()
    yield from env.network.buffers()  # not the state dict: it makes extra states anew in each call
    for group in env.optimizer.param_groups:
        for p in group["params"]:
            yield from (value for _, value in sorted(env.optimizer.state.get(p, {}).items()))


class Twins:
    """A pool of batched hosts and one of separate hosts, to which the same things happen."""

    def __init__(self) -> None:
        self.fused, self.loop = make("fused", "mlp", N), make("loop", "mlp", N)
        self.executors = [self.fused.executor, FusedExecutor(self.fused.task, self.fused.config.training)]
        self.executors[1].prepare(self.fused.envs, self.fused.data.train)  # while no host is broken
        self.executors.append(LoopExecutor(self.fused.task, self.fused.config.training))

    def begin(self) -> None:
        self.fused.executor = self.executors[0]
        for pool in (self.fused, self.loop):
            pool.reset(range(N))

    def happen(self, pool: HostPool, event: str, host: int, slot: str, choice: int) -> None:
        env = pool.envs[host]
        match event:
            case "germinate" if not env.growing.slots[slot].occupied:
                env.growing.germinate(slot, ["norm", "lora", "mlp_small"][choice])
                if choice == 1:
                    env.growing.slots[slot].move_to(Stage.TRAINING)
            case "cull":
                env.growing.remove_seed(slot)
            case "reset":
                pool.reset_hosts([host], [10 + choice])
            case "load":
                pool.load_host(host, deepcopy(env.state_dict()))
            case "roll back":
                env.roll_back(False, "test")
            case "snapshot":
                env.take_snapshot()
            case "break":
                set_weight_to_nan(env)
            case "executor" if pool is self.fused:
                pool.executor = self.executors[choice]
            case "some":
                pool.executor.train_epoch([env, *pool.envs[:host]], pool.data.train)
            case "train":
                pool.executor.train_epoch(pool.envs, pool.data.train)
            case _:
                pass

    def compare(self) -> None:
        close(*[pool.executor.validate(pool.envs, pool.data.validation) for pool in (self.fused, self.loop)])
        for ours, theirs in zip(self.fused.envs, self.loop.envs, strict=True):
            assert ours.network.state_dict().keys() == theirs.network.state_dict().keys()
            close(list(tensors_of(ours)), list(tensors_of(theirs)))
        parameters = [p for env in self.fused.envs for p in tensors_of(env) if p.numel()]
        places = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in parameters)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(places)), "no two overlap"


EVENTS = ["germinate", "cull", "reset", "load", "roll back", "snapshot", "break", "executor", "some"]

lives = st.lists(
    st.tuples(st.sampled_from(EVENTS), st.integers(0, N - 1), st.sampled_from(SLOTS), st.integers(0, 2), st.booleans()),
    max_size=12,
)


@pytest.fixture(scope="module")
def twins() -> Twins:
    return Twins()


def live(twins: Twins, life: Sequence[tuple[str, int, str, int, bool]]) -> None:
    """Let the events of a life happen to both pools; after some of them all hosts train."""
    with precision(torch.float64):
        twins.begin()
        for pool in (twins.fused, twins.loop):
            for event, host, slot, choice, trains in life:
                twins.happen(pool, event, host, slot, choice)
                if trains:
                    twins.happen(pool, "train", 0, slot, 0)
            twins.happen(pool, "train", 0, SLOTS[0], 0)
        twins.compare()


TRAINED_ELSEWHERE = [("snapshot", 0, "layer1", 0, True), *(("executor", 0, "layer1", i, True) for i in (1, 0))]

ROLLED_BACK = [
    ("germinate", 1, "layer1", 0, True),
    ("snapshot", 1, "layer1", 0, True),
    ("roll back", 0, "layer1", 0, True),
]


@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.generate])
@example(life=TRAINED_ELSEWHERE)
@example(life=ROLLED_BACK)
@given(life=lives)
def test_whatever_happens_hosts_are_as_separate_ones(twins: Twins, life: list[tuple[str, int, str, int, bool]]) -> None:
    live(twins, life)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, phases=[Phase.generate])
@given(life=lives)
def test_whatever_happens_in_many_lives(twins: Twins, life: list[tuple[str, int, str, int, bool]]) -> None:
    live(twins, life)


class Copied(TorchDispatchMode):
    """Counts the tensors that are read by operations which copy."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(word in function._schema.name for word in ("copy", "cat", "stack", "clone")):
            self.tensors += sum(len(arg) if isinstance(arg, list) else isinstance(arg, Tensor) for arg in args)
        return function(*args, **(kwargs or {}))


def test_an_epoch_of_settled_hosts_copies_no_tensor_of_a_single_host() -> None:
    counts = []
    for hosts in (2, 6):
        pool = make("fused", "cnn", hosts)
        pool.reset(range(hosts))
        pool.train_without_actions(1)
        places = [tensor.data_ptr() for env in pool.envs for tensor in tensors_of(env)]
        with Copied() as copied:
            pool.executor.train_epoch(pool.envs, pool.data.train)
            pool.executor.validate(pool.envs, pool.data.validation)
        counts.append(copied.tensors)
        assert [tensor.data_ptr() for env in pool.envs for tensor in tensors_of(env)] == places

    assert counts[1] - counts[0] < 4 * 0.25 * len(places) / 6, "four more hosts"


def test_what_is_saved_of_a_host_holds_nothing_of_others() -> None:
    sizes = []
    for executor in ("fused", "loop"):
        pool = make(executor, "cnn", 6)
        pool.reset(range(6))
        pool.envs[0].growing.germinate("block1", "conv_small")
        pool.train_without_actions(1)
        file = io.BytesIO()
        torch.save(pool.envs[0].state_dict() | {"monitor": None}, file)
        sizes.append(file.tell())

    assert sizes[0] < 1.02 * sizes[1]


def test_a_host_that_leaves_keeps_no_memory_of_others_alive() -> None:
    pool = make("fused", "cnn", 3)
    pool.reset(range(3))
    pool.train_without_actions(1)
    pool.executor.train_epoch(pool.envs[:1], pool.data.train)

    left = [tensor for env in pool.envs[1:] for tensor in tensors_of(env)]
    assert [tensor.untyped_storage().nbytes() for tensor in left] == [tensor.nbytes for tensor in left]


RULES: list[dict[str, Any]] = [
    {"optimizer": "adam"},
    {"optimizer": "adam", "weight_decay": 0.1},
    {"optimizer": "adamw", "weight_decay": 0.1},
    {"optimizer": "sgd", "weight_decay": 0.1},
]


def grown_pool(**training: Any) -> HostPool:
    """Return a pool of 3 hosts, 2 of them with a seed; every group has its own learning rate and weight decay."""
    pool = make("loop", "mlp", 3, training=replace(FAST_CONFIG.training, **training))
    pool.reset(range(3))
    for env, blueprint in zip(pool.envs, ("norm", "lora"), strict=False):
        grow(env, "layer1", blueprint)
    return pool


def grow(env: HostEnv, slot: str, blueprint: str) -> None:
    env.growing.germinate(slot, blueprint)
    for i, group in enumerate(env.optimizer.param_groups):
        group["lr"] *= 0.5 ** (i + env.rng_seed)
        group["weight_decay"] *= 2.0**i


def epoch_of(batched: BatchedHosts, pool: HostPool) -> FusedEpoch:
    batches = [env.draw_batches(pool.data.train.samples) for env in pool.envs]
    return FusedEpoch(batched, pool.envs, pool.task, data=pool.data.train, batches=batches)


def learn(pool: HostPool, steps: range, batched: BatchedHosts | None) -> None:
    """Take steps with the same gradients, batched in one epoch or each host alone."""
    number = {p: i for env in pool.envs for i, p in enumerate(env.network.parameters())}

    def gradient(p: nn.Parameter, step: int) -> Tensor:
        return (step + 1) * torch.randn(p.shape, generator=generator_of(100 * step + number[p]), dtype=p.dtype)

    if batched is not None:
        epoch = epoch_of(batched, pool)
        for step in steps:
            arena = epoch.weights
            arena.grads.copy_(arena.gather([gradient(p, step) for p in arena.parameters]))
            epoch.update_weights()
        return
    for env in pool.envs:
        for step in steps:
            for p in env.network.parameters():
                p.grad = gradient(p, step)
            for group in env.optimizer.param_groups:
                if env.training.max_grad_norm is not None:
                    nn.utils.clip_grad_norm_(group["params"], env.training.max_grad_norm)
            env.optimizer.step()


@pytest.mark.parametrize("limit", [None, 3.0])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_any_rule_any_rates_and_any_number_of_steps(rule: dict[str, Any], limit: float | None) -> None:
    together, alone = (grown_pool(max_grad_norm=limit, **rule) for _ in range(2))
    for pool, batched in ((together, BatchedHosts(together.envs[0].network)), (alone, None)):
        learn(pool, range(3), batched)
        grow(pool.envs[2], "layer2", "norm")  # its step count begins here
        learn(pool, range(3, 5), batched)
        pool.envs[0].growing.remove_seed("layer1")
        learn(pool, range(5, 7), batched)

    for ours, theirs in zip(together.envs, alone.envs, strict=True):
        torch.testing.assert_close(list(tensors_of(ours)), list(tensors_of(theirs)), rtol=1e-10, atol=1e-12)


def test_hosts_that_are_not_healthy_stay_as_they_are() -> None:
    pool, same = grown_pool(), grown_pool()
    epoch = epoch_of(BatchedHosts(pool.envs[0].network), pool)
    for healthy in (True, False):
        epoch.weights.grads.fill_(1.0 if healthy else float("nan"))
        epoch.update_weights(torch.tensor([True, healthy, True]))

    counted = [[env.optimizer.state[p]["step"].item() for p in env.network.parameters()] for env in pool.envs]
    assert [set(steps) for steps in counted] == [{2.0}, {1.0}, {2.0}]
    for i, env in enumerate(pool.envs):
        assert all(p.isfinite().all() == (i == 1) for p in env.network.parameters())
        assert not any(map(torch.equal, env.network.parameters(), same.envs[i].network.parameters()))
