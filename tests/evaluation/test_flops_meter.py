"""Data order of all controllers, and training FLOPs compared with PyTorch's own count during training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from esper_lightning.controllers.learned import Controller
from esper_lightning.controllers.random import RandomValid, WaitOnly
from esper_lightning.envs import HostPool, Op
from esper_lightning.envs.flops import measure_flops
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.evaluation.flops_meter import step_flops
from esper_lightning.evaluation.play import FossilizedSeed, Topology, play_episode
from esper_lightning.evaluation.static_host import StaticController
from esper_lightning.growth import GrowingNetwork, LifecycleConfig, slots_of
from esper_lightning.growth.blend import Isolation
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from tests.growth.grown import grow, small_batch

MakePool = Callable[..., HostPool]

SEEDS = [11, 13]
BARE: Topology = ()
GROWN: Topology = (FossilizedSeed("block1.pool", "conv_light", "add"), FossilizedSeed("block3", "norm", "gate"))

FIRST_LAYER = 2 * 4 * 1 * 8 * 8
"""FLOPs per sample of the small host's first layer, a 1×1 convolution from 1 to 4 channels without an input
gradient."""


@contextmanager
def counted_training(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Count FLOPs with PyTorch while hosts train, one number per host and tick."""
    counts: list[int] = []
    train = pool.executor.train_epoch

    def watched(envs: list[HostEnv], data: Any) -> Tensor:
        rows = []
        for env in envs:
            with FlopCounterMode(display=False) as counter:
                rows.append(train([env], data))
            counts.append(counter.get_total_flops())
        return torch.cat(rows)

    with monkeypatch.context() as patch:
        patch.setattr(pool.executor, "train_epoch", watched)
        yield counts


@pytest.mark.parametrize(
    "topologies", [[BARE, BARE], [GROWN, GROWN], [BARE, GROWN]], ids=["bare", "grown", "of two kinds"]
)
def test_training_compute_is_what_pytorch_counts(
    make_pool: MakePool, topologies: list[Topology], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(2, training=HostTraining(batches=2, batch_size=16))
    with counted_training(pool, monkeypatch) as counts:
        played = play_episode(pool, "static", StaticController(topologies), rng_seeds=SEEDS)

    counted = np.array(counts).reshape(-1, 2).sum(0)  # [T, H] -> [H]
    samples = 6 * 2 * 16
    assert played.flops.tolist() == (counted + samples * FIRST_LAYER).tolist()
    assert played.ticks.tolist() == [6, 6]


def test_seeds_count_from_the_tick_in_which_they_germinate_to_that_in_which_they_end(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(8)
    with counted_training(pool, monkeypatch) as counts:
        played = play_episode(pool, "random", RandomValid(3), rng_seeds=range(8))

    counted = np.array(counts).reshape(-1, 8)
    changes = np.diff(counted, axis=0)
    assert (changes > 0).any() and (changes < 0).any(), "hosts grow and shrink"
    # Besides the first layer, only seeds behind the straight-through estimator skip a gradient: that of their input.
    missing = played.flops - counted.sum(0) - 6 * 2 * 32 * FIRST_LAYER
    assert (missing >= 0).all()
    assert (missing < 0.35 * counted.sum(0)).all()


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("isolation", get_args(Isolation))
def test_a_step_with_seeds_in_all_stages_costs_what_pytorch_counts(isolation: Isolation, isolate: bool) -> None:
    samples, (images, digits) = 6, small_batch(6)
    stages = [Stage.BLENDING, Stage.TRAINING, Stage.BLENDING, Stage.TRAINING, Stage.FOSSILIZED]
    names = ["block1", "block1.pool", "block2", "block2.pool", "block3"]
    network = CNN((1, 8, 8), 10, base=4, pools=2, slots=names, isolate=isolate)
    compute = measure_flops(network, images[:1])
    slots = list(slots_of(network).values())
    for slot, stage in zip(slots, stages, strict=True):
        grow(slot, stage, "conv_light")
    lifecycle = LifecycleConfig(isolation=isolation)
    growing = GrowingNetwork(network.train(), torch.optim.SGD(network.parameters()), horizon=1, lifecycle=lifecycle)

    with FlopCounterMode(display=False) as counter:
        functional.cross_entropy(growing.module(images), digits).backward()

    # A seed of one convolution whose input is detached needs no gradient of its input; the first layer needs none.
    needless = sum(compute.seed_flops(slot) for slot in slots if slot.live and (slot.isolated or isolate))
    first_layer = 2 * 9 * 4 * 8 * 8
    assert samples * (step_flops(compute, slots) - needless - first_layer) == counter.get_total_flops()


def test_a_host_that_has_stopped_costs_nothing(make_pool: MakePool) -> None:
    pool = make_pool(2)
    whole = play_episode(pool, "wait", WaitOnly(), rng_seeds=SEEDS)

    part = play_episode(pool, "wait", WaitOnly(), rng_seeds=SEEDS, tick_limits=[0, 4])
    more = play_episode(pool, "wait", WaitOnly(), rng_seeds=SEEDS, tick_limits=[6, 9])

    assert (part.flops / whole.flops).tolist() == [0.0, 4 / 6]
    assert (more.flops / whole.flops).tolist() == [1.0, 9 / 6]
    assert part.ticks.tolist() == [0, 4]
    assert more.ticks.tolist() == [6, 9]
    assert more.accuracy[0] == whole.accuracy[0], "it stopped where the others ended"


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], list[Tensor]]:
    """Return the samples that each host trained on, by RNG seed and tick, once per episode."""
    seen: dict[tuple[int, int], list[Tensor]] = {}
    draw = HostEnv.draw_batches

    def watched(env: HostEnv, samples: int) -> Any:
        batches = draw(env, samples)
        seen.setdefault((env.rng_seed, env.tick), []).append(batches.indices)
        return batches

    monkeypatch.setattr(HostEnv, "draw_batches", watched)
    return seen


@pytest.mark.parametrize("executor", ["loop", "threads", "fused"])
def test_all_controllers_see_the_same_data_whatever_they_do(
    make_pool: MakePool, orders: dict[tuple[int, int], list[Tensor]], executor: str
) -> None:
    pool = make_pool(2, executor=executor)
    controllers: list[Controller] = [WaitOnly(), RandomValid(0), RandomValid(1), StaticController([BARE, GROWN])]
    ops = [play_episode(pool, "one", controller, rng_seeds=SEEDS).trace.ops for controller in controllers]

    assert (ops[1] == Op.GERMINATE).any(), "or they would have seen the same anyhow"
    assert set(orders) == {(seed, tick) for seed in SEEDS for tick in range(6)}
    for met in orders.values():
        assert len(met) == 4
        assert all(torch.equal(met[0], other) for other in met[1:])
    assert len({tuple(met[0].flatten().tolist()) for met in orders.values()}) == 12, "and no two host epochs are alike"


def test_outside_of_a_comparison_a_germination_changes_the_data(
    make_pool: MakePool, orders: dict[tuple[int, int], list[Tensor]]
) -> None:
    pool = make_pool(2)
    for controller in (WaitOnly(), RandomValid(0)):
        pool.reset(SEEDS)
        for _ in range(6):
            pool.step(controller.act(pool))

    assert not all(torch.equal(*met) for met in orders.values())


def test_nothing_of_a_comparison_is_left_in_the_pool(make_pool: MakePool) -> None:
    pool = make_pool(2)
    play_episode(pool, "wait", WaitOnly(), rng_seeds=SEEDS)

    assert not [env for env in pool.envs if env.data_order is not None or env.on_batches is not None]
