"""Costs of an executor: tensors it returns and asks, and memory that it keeps."""

import gc
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from esper_lightning.controllers.rules import RandomValid, WaitOnly
from esper_lightning.envs import HostPool
from esper_lightning.envs.config import REQUIRED_DEVICE_TYPE
from esper_lightning.envs.executors import EXECUTORS
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth import growing_network
from esper_lightning.growth.gates import gradient_stats
from tests.decisions import WAIT, act, germinate

MakePool = Callable[..., HostPool]


class AttributeAccesses(TorchFunctionMode):
    """Counts accesses to tensor attributes by name, by the project and by torch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "__get__":
            self.asked[function.__self__.__name__] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("executor", ["loop", "fused"])
def test_no_tensor_is_asked_what_kind_of_device_it_is_on(make_pool: MakePool, executor: str) -> None:
    """S6: a tick asks no tensor what kind of device it is on: that was decided when the pool was made."""
    pool = make_pool(2, executor=executor)
    pool.step(act(germinate(0, 1), germinate(1, 1)))
    with AttributeAccesses() as questions:
        pool.step(act(WAIT, WAIT))

    assert questions.asked["shape"] > 0, "questions are seen"
    assert not {"is_cuda", "is_cpu", "is_meta"} & set(questions.asked)


def test_numbers_of_all_environments_and_variants_are_one_tensor(make_pool: MakePool) -> None:
    """S8: an executor returns one tensor for training, one [N, 2, V] for validation."""
    pool = make_pool(2)
    slots = len(pool.space.slot)

    assert pool.executor.train_epoch(pool.envs, pool.data.train).shape == (2, 3 + 4 * (1 + slots))
    assert pool.executor.validate(pool.envs, pool.data.validation).shape == (2, 2, slots + 2)


def test_gradient_statistics_are_tensors_asked_for_once_a_tick(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S9: norms are torch's own, stay on the device, and are taken once per host and tick, not per batch."""
    taken: list[Tensor] = []

    def watched(given: Iterable[nn.Parameter], device: torch.device | None = None) -> Tensor:
        stats = gradient_stats(parameters := list(given), device)
        torch.testing.assert_close(stats[0], nn.utils.get_total_norm([p.grad for p in parameters]))
        taken.append(stats)
        return stats

    monkeypatch.setattr(growing_network, "gradient_stats", watched)
    pool = make_pool(2, training=HostTraining(lr=0.02, batches=5))
    pool.executor.train_epoch(pool.envs, pool.data.train)

    assert len(taken) == 2, "those of empty slots are known"
    assert all(isinstance(stats, Tensor) and stats.shape == (4,) for stats in taken)


@pytest.mark.parametrize("executor", ["loop", "threads"])
def test_validation_runs_in_inference_mode(make_pool: MakePool, executor: str) -> None:
    """S15: every output of a validation is an inference tensor; those of training are not."""
    pool = make_pool(2, executor=executor)
    seen: list[tuple[bool, bool, bool]] = []

    def watch(network: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
        seen.append((torch.is_inference_mode_enabled(), outputs.is_inference(), outputs.requires_grad))

    for env in pool.envs:
        env.network.register_forward_hook(watch)
    pool.executor.validate(pool.envs, pool.data.validation)
    assert seen == [(True, True, False)] * 2
    seen.clear()
    pool.executor.train_epoch(pool.envs, pool.data.train)
    assert set(seen) == {(False, False, True)}


CPU_EXECUTORS = [name for name in EXECUTORS if REQUIRED_DEVICE_TYPE.get(name) in (None, "cpu")]


def tensors_alive() -> tuple[int, int]:
    """Return the number of live tensors and the bytes of their memory."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return len(tensors), sum(memory.values())


@pytest.mark.slow
@pytest.mark.parametrize("executor", CPU_EXECUTORS)
def test_what_is_alive_after_a_rollout_does_not_become_more(make_pool: Callable[..., HostPool], executor: str) -> None:
    # Without snapshots, which have room for the largest network so far.
    pool, wanderer = make_pool(3, executor=executor, horizon=8, governor=None), RandomValid(0)
    seeds: WeakSet[nn.Module] = WeakSet()
    grown = 0
    held = []
    for rollout in range(4):
        pool.reset(range(rollout, rollout + pool.n_envs))
        for _ in range(pool.config.horizon):
            pool.step(wanderer.act(pool))
            fresh = {slot.seed for env in pool.envs for slot in env.slots if slot.occupied} - set(seeds)
            grown += len(fresh)
            seeds.update(fresh)
        del fresh
        pool.reset(range(pool.n_envs))
        pool.step(WaitOnly().act(pool))  # `fused` holds the hosts and seeds of the last epoch until the next one
        held.append(tensors_alive())

    assert grown > 10
    assert len(seeds) == 0, "culled seeds and those of earlier episodes are gone"
    # State of the executors varies a little; a leak of one tensor per seed would add 10 %.
    for first, last in zip(held[0], held[-1], strict=True):
        assert last <= 1.03 * first, held
