"""Hosts that live in an arena are in every respect as if each had memory of its own."""

import io
from collections.abc import Iterator, Sequence
from copy import deepcopy
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
from esper_lightning.envs.executors.fused import flat_params
from esper_lightning.envs.executors.fused.arena import leave_arena
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.growth.stages import Stage
from tests.envs.breaking import set_weight_to_nan
from tests.envs.executors.fused.hosts import HOSTS, distance, make, precision

N = 3

SLOTS = ("layer1", "layer2")

EXACT = 1e-9

close = partial(torch.testing.assert_close, rtol=EXACT, atol=1e-12, equal_nan=True)


def tensors_of(env: HostEnv) -> Iterator[Tensor]:
    """Yield weights, statistics and optimizer state of a host and its seeds."""
    yield from (value for value in env.network.state_dict().values() if isinstance(value, Tensor))
    for group in env.optimizer.param_groups:
        for p in group["params"]:
            yield from (value for _, value in sorted(env.optimizer.state.get(p, {}).items()))


def memory_of(tensors: Iterator[Tensor]) -> int:
    """Return the bytes of all memory that tensors keep alive."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def shares_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.nbytes


def saved_bytes(state: Any) -> int:
    file = io.BytesIO()
    torch.save(state, file)
    return file.tell()


class Twins:
    """A pool of stacked hosts and one of separate hosts, to which the same things happen."""

    def __init__(self) -> None:
        self.fused, self.loop = make("fused", "mlp", N), make("loop", "mlp", N)
        self.executors = [self.fused.executor, FusedExecutor(self.fused.task, self.fused.config.training)]
        self.executors.append(LoopExecutor(self.fused.task, self.fused.config.training))

    def begin(self) -> None:
        self.fused.executor = self.executors[0]
        for pool in (self.fused, self.loop):
            pool.reset(range(N))

    def happen(self, pool: HostPool, event: str, host: int, slot: str, choice: int) -> None:
        env = pool.envs[host]
        match event:
            case "germinate" if not env.growing.slots[slot].occupied:
                blueprint, style = [("norm", "add"), ("lora", "add"), ("norm", "gate")][choice]
                env.growing.germinate(slot, blueprint, style=style)  # type: ignore[arg-type]
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
        measured = [pool.executor.validate(pool.envs, pool.data.validation) for pool in (self.fused, self.loop)]
        close(*measured)
        for ours, theirs in zip(self.fused.envs, self.loop.envs, strict=True):
            assert ours.network.state_dict().keys() == theirs.network.state_dict().keys()
            a, b = list(tensors_of(ours)), list(tensors_of(theirs))
            close(a, b)
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


def test_a_seed_that_left_keeps_its_numbers(twins: Twins) -> None:
    with precision(torch.float64):
        twins.begin()
        pool = twins.fused
        for env in pool.envs:
            env.growing.germinate("layer1", "lora")
        twins.happen(pool, "train", 0, "layer1", 0)
        kept = pool.envs[0].slots[0].seed
        before = [p.detach().clone() for p in kept.parameters()]
        pool.envs[0].growing.remove_seed("layer1")
        pool.envs[0].growing.germinate("layer1", "lora")
        twins.happen(pool, "train", 0, "layer1", 0)

    assert all(map(torch.equal, kept.parameters(), before))
    assert not any(map(torch.equal, pool.envs[0].slots[0].seed.parameters(), before))


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

    tensors_of_a_host = len(places) / 6
    assert counts[1] - counts[0] < 4 * 0.25 * tensors_of_a_host, "four more hosts"


def test_what_is_saved_of_a_host_holds_nothing_of_others() -> None:
    sizes = []
    for executor in ("fused", "loop"):
        pool = make(executor, "cnn", 6)
        pool.reset(range(6))
        pool.envs[0].growing.germinate("block1", "conv_small")
        pool.train_without_actions(1)
        state = pool.envs[0].state_dict()
        state["monitor"] = None
        sizes.append(saved_bytes(state))
    network = deepcopy(pool.envs[0].network)

    assert sizes[0] < 1.02 * sizes[1]
    assert memory_of(iter(network.parameters())) == sum(p.nbytes for p in network.parameters())


def test_hosts_that_leave_the_arena_have_memory_of_their_own() -> None:
    pool = make("fused", "cnn", N)
    pool.reset(range(N))
    pool.envs[1].growing.germinate("block1", "conv_small")
    pool.train_without_actions(1)
    env = pool.envs[1]
    assert any(shares_memory(tensor) for tensor in tensors_of(env))
    before = [tensor.clone() for tensor in tensors_of(env)]
    leave_arena(env.network, env.optimizer)
    assert all(map(torch.equal, tensors_of(env), before))

    assert not any(shares_memory(tensor) for tensor in tensors_of(env))


def test_rows_begin_where_a_gpu_needs_them_whatever_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(flat_params.ALIGNMENT_BYTES, "cpu", flat_params.ALIGNMENT_BYTES["cuda"])
    fused, loop = make("fused", "mlp", N), make("loop", "mlp", N)
    for pool in (fused, loop):
        pool.reset(range(N))
        for host, slot, blueprint in [(0, "layer1", "norm"), (1, "layer2", "lora"), (2, "layer1", "lora")]:
            pool.envs[host].growing.germinate(slot, blueprint)
            with precision(torch.float64):
                pool.executor.train_epoch(pool.envs, pool.data.train)

    (stack,) = fused.executor.stacks.values()  # type: ignore[attr-defined]
    for numbers in (stack.arena.values, stack.arena.grads, *list(stack.arena.states.values())[:2]):
        places = [view.data_ptr() for views in stack.arena.views(numbers) for view in views]
        assert len(places) > 8 and {(place - numbers.data_ptr()) % 256 for place in places} == {0}
    assert distance(fused, loop) < EXACT


@pytest.mark.slow
def test_weights_keep_their_memory_format(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_channels_last(*args: Any, **kwargs: Any) -> nn.Module:
        return HOSTS["cnn, gradients through seeds"](*args, **kwargs).to(memory_format=torch.channels_last)

    monkeypatch.setitem(HOSTS, "in channels_last", in_channels_last)
    fused, loop = make("fused", "in channels_last", N), make("loop", "in channels_last", N)
    formats = []
    for pool in (fused, loop):
        for _ in range(2):  # in the second episode weights are drawn in the order of the memory
            pool.reset(range(N))
            pool.train_without_actions(2)
        formats.append([tensor.is_contiguous() for tensor in tensors_of(pool.envs[0])])

    assert formats[0] == formats[1]
    assert formats[0].count(False) > 4, "weights and moments"
    assert distance(fused, loop) < EXACT
