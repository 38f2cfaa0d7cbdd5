"""Rows S of the findings: what was slow in an earlier implementation, and is not done here."""

import ast
import gc
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from esper_lightning.data import HostPoolData
from esper_lightning.envs import ActionConfig, HostPool
from esper_lightning.envs.execution import make_timer
from esper_lightning.envs.training import HostTraining
from esper_lightning.growth import growing
from esper_lightning.growth.counterfactual import forward_variants
from esper_lightning.growth.gradients import gradient_stats
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN, MLP
from esper_lightning.ppo.gae import gae
from esper_lightning.rollout import RolloutLoop
from esper_lightning.tamiyo.baselines import RandomValid
from esper_lightning.tasks import Digits, Split, TaskData
from tests.envs.execution.fake_cuda import FakeCuda, Stream
from tests.growth.grown import grow, slot_named, small_batch, small_cnn
from tests.runs import ROOT, differences, fit, only_run, tiny_host

MakePool = Callable[..., HostPool]

CPU = torch.device("cpu")


def storage(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    """The same tensors in the same memory."""
    return all(a is b and a.data_ptr() == b.data_ptr() for a, b in zip(ours, theirs, strict=True))


def play(pool: HostPool, seed: int) -> None:
    """One random episode."""
    controller = RandomValid(seed)
    pool.reset([seed + i for i in range(pool.n_envs)])
    for _ in range(pool.config.horizon):
        pool.step(controller.act(pool))


def test_s1_environments_are_reset_in_place(make_pool: MakePool) -> None:
    """S1: over episodes the same hosts, weights and optimizer states, in the same memory."""
    pool = make_pool(2)

    def tensors() -> Iterator[Tensor]:
        for env in pool.envs:
            host = env.optimizer.param_groups[0]["params"]
            yield from host
            yield from (buffer for name, buffer in env.network.named_buffers() if ".seed." not in name)
            yield from (value for p in host for value in env.optimizer.state[p].values())

    play(pool, 0)
    before = list(tensors())
    pointers = storage(before)
    for seed in (1, 2):
        play(pool, seed)
        assert same(tensors(), before)
        assert storage(before) == pointers
    assert len(before) > 2 * 20


def test_s4_what_is_filled_every_tick_is_allocated_once(
    make_loop: Callable[..., RolloutLoop], play_rollout: Callable[[RolloutLoop], None]
) -> None:
    """S4: observation, masks and the rollout's storage are the same memory, rollout after rollout."""
    loop = make_loop(2)

    def tensors() -> Iterator[Tensor]:
        yield from (*loop.pool.observation, *loop.pool.masks, loop.raw, loop.starts)
        buffer = loop.buffer
        yield from (*buffer.observation, *buffer.masks, *buffer.action, *buffer.state, buffer.log_prob, buffer.values)
        yield from (buffer.rewards, buffer.terminated, buffer.truncated, buffer.starts)

    before = list(tensors())
    pointers = storage(before)
    for _ in range(2):
        play_rollout(loop)
        loop.finish_rollout()
        assert same(tensors(), before)
        assert storage(before) == pointers
    assert len(set(pointers)) == len(pointers)


def test_s5_one_data_set_serves_every_pool_and_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """S5: loaded once, shared by training and evaluation pools, kept by no cache when they are gone."""
    loads: list[Digits] = []
    real = Digits.load

    def counted(task: Digits) -> TaskData:
        loads.append(task)
        return real(task)

    monkeypatch.setattr(Digits, "load", counted)
    data = HostPoolData(Digits(), tiny_host, n_envs=2)
    data.build(CPU)
    other = data.make_pool(3)

    assert len(loads) == 1
    for ours, theirs in zip(data.pool.data[:3], other.data[:3], strict=True):
        assert same(ours, theirs)
    kept = weakref.ref(data.pool.data.train.inputs)
    del data, other, ours, theirs
    gc.collect()
    assert kept() is None


def test_s6_devices_are_not_asked_about_in_the_loop() -> None:
    """S6: no `is_cuda`; what kind a device is decides once, when a pool is made, and where numbers cross over."""
    asking = []
    for path in (ROOT / "esper_lightning").rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                nodes = list(ast.walk(function))
                questions = [ast.unparse(n.left) for n in nodes if isinstance(n, ast.Compare)]
                asked = any(isinstance(n, ast.Attribute) and n.attr == "is_cuda" for n in nodes)
                if asked or any(question.endswith("device.type") for question in questions):
                    asking.append(f"{path.name}: {function.name}")

    crossing = {"transfer.py: send", "transfer.py: download"}
    once = {"config.py: check_fits", "proof.py: check_stack", "proof.py: _random_state", "timing.py: make_timer"}
    once |= {"snapshot.py: __init__", "memory.py: memory_metrics", "memory.py: memory_share", "memory.py: make_gauge"}
    # registry.py: which blueprints can be offered and built at all.
    assert set(asking) == {"registry.py: runs_on"} | once | crossing


def test_s7_variants_share_the_rows_before_they_differ() -> None:
    """S7: four distinct variants cost one pass at the first layer and four only at the last."""
    places = ["block1", "block2.pool", "block3.pool"]
    network = small_cnn(places).eval()
    for place in places:
        grow(slot_named(network, place), Stage.PROBATIONARY)
    rows: list[int] = []

    def count(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows.append(len(inputs[0]))

    for layer in (*network.convs, network.head):
        layer.register_forward_pre_hook(count)
    images = small_batch(samples=10)[0]
    everything = frozenset(places)
    with torch.inference_mode():
        forward_variants(network, [everything, *(everything - {place} for place in places)], images)

    assert rows == [10, 20, 30, 40]  # separate passes: 40 at each


def test_s8_numbers_of_all_environments_and_variants_are_one_tensor(make_pool: MakePool) -> None:
    """S8: an executor returns one tensor for training, one [N, 2, V] for validation."""
    pool = make_pool(2)
    slots = len(pool.space.slot)

    assert pool.executor.train_epoch(pool.envs, pool.data.train).shape == (2, 3 + 4 * (1 + slots))
    assert pool.executor.validate(pool.envs, pool.data.validation).shape == (2, 2, slots + 2)


def test_s9_gradient_statistics_are_tensors_asked_for_once_a_tick(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S9: norms are torch's own, stay on the device, and are taken once per host and tick, not per batch."""
    taken: list[Tensor] = []

    def watched(given: Iterable[nn.Parameter], device: torch.device | None = None) -> Tensor:
        stats = gradient_stats(parameters := list(given), device)
        torch.testing.assert_close(stats[0], nn.utils.get_total_norm([p.grad for p in parameters]))
        taken.append(stats)
        return stats

    monkeypatch.setattr(growing, "gradient_stats", watched)
    pool = make_pool(2, training=HostTraining(batches=5))
    pool.executor.train_epoch(pool.envs, pool.data.train)

    assert len(taken) == 2 * (1 + len(pool.space.slot))
    assert all(isinstance(stats, Tensor) and stats.shape == (4,) for stats in taken)


def mlp(input_shape: Sequence[int], outputs: int) -> nn.Module:
    return MLP(input_shape, outputs, width=12)


def test_s12_a_host_batch_can_go_through_in_micro_batches(make_pool: MakePool) -> None:
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


def saved_bytes(network: nn.Module, images: Tensor) -> int:
    """What a forward pass keeps for the backward pass, each memory once, weights aside."""
    own = {p.untyped_storage().data_ptr() for p in network.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = network(images)
    assert outputs.requires_grad
    return sum(kept.values())


def test_s17_a_host_can_compute_activations_again_instead_of_keeping_them(make_pool: MakePool) -> None:
    """S17: with `checkpoint_activations` a host keeps less for backward and lives the same life, bit for bit."""
    pools = []
    for again in (False, True):
        pools.append(make_pool(2, host=partial(CNN, base=4, pools=2, checkpoint_activations=again)))
        play(pools[-1], seed=3)
    plain, frugal = (pool.envs[0].network.train() for pool in pools)

    assert differences(pools[0].state_dict(), pools[1].state_dict()) == []
    images = pools[0].data.train.inputs[:64]
    assert saved_bytes(frugal, images) < 0.5 * saved_bytes(plain, images)


def test_s13_the_clock_fits_the_device_and_telemetry_says_which_it_was(tmp_path: Path, fake_cuda: FakeCuda) -> None:
    """S13: events that measure time, in the stream at hand, on CUDA; the processor's clock on the CPU."""
    fit(tmp_path, "--trainer.max_epochs", "1")
    names = re.findall(r"\btime/(\w+)\.train\b", " ".join(only_run(tmp_path).scalars()))
    gpu = torch.device("cuda", 0)
    with torch.cuda.stream(own := Stream(gpu)):
        mark = make_timer(gpu).mark()

    assert sorted(names) == ["perf_counter", "samples_per_second", "share"]
    assert make_timer(gpu).name == "cuda_events"
    assert mark.enable_timing and mark.stream is own


class CountedCalls(TorchFunctionMode):
    """Counts calls of torch functions."""

    calls = 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


def test_s14_advantages_of_all_environments_come_from_the_same_calls() -> None:
    """S14: more environments mean longer tensors, not more of them; each column is as it would be alone."""
    generator = torch.Generator().manual_seed(0)
    rewards, values, after = (torch.randn(5, 64, generator=generator) for _ in range(3))
    ends, cuts = (torch.rand(5, 64, generator=generator) < 0.2 for _ in range(2))

    def run(columns: slice) -> tuple[Tensor, int]:
        with CountedCalls() as counted:
            advantages, _ = gae(*(part[:, columns] for part in (rewards, values, after, ends, cuts)), 0.9, 0.8)
        return advantages, counted.calls

    together, calls = run(slice(None))
    alone, calls_alone = run(slice(7, 8))
    assert calls == calls_alone > 0
    assert torch.equal(alone, together[:, 7:8])


@pytest.mark.parametrize("executor", ["loop", "threads"])
def test_s15_validation_runs_in_inference_mode(make_pool: MakePool, executor: str) -> None:
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
