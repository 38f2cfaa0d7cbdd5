"""Episodes of controllers on the same hosts and data, their compute, and static networks in their place."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from esper_lightning.cli.commands import fossilized_copy
from esper_lightning.controllers.learned import Controller
from esper_lightning.controllers.rules import FossilizedSeed, RandomValid, StaticController, Topology, WaitOnly
from esper_lightning.envs import Action, HostPool, Op
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.rewards import ObjectiveConfig
from esper_lightning.evaluation.play import affordable_ticks, epoch_rng_seed, play_episode, play_static
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.tasks import Batches
from tests.conftest import SMALL
from tests.decisions import WAIT, act, fossilize, germinate
from tests.envs.breaking import ONLY_NAN_DIVERGES, breaking_epoch
from tests.tiers import rest_is_slow

MakePool = Callable[..., HostPool]

SEEDS = [11, 13]
BARE: Topology = ()
GROWN: Topology = (FossilizedSeed("block1.pool", "conv_light"), FossilizedSeed("block3", "norm"))
TOPOLOGIES: list[Topology] = [GROWN, (FossilizedSeed("block2.pool", "conv_small"),)]

FIRST_LAYER = 2 * 4 * 1 * 8 * 8
"""FLOPs per sample of the small host's first layer, a 1×1 convolution from 1 to 4 channels without an input
gradient."""


@pytest.fixture(scope="module")
def pool(make_pool: MakePool) -> HostPool:
    return make_pool(2, training=HostTraining(lr=0.02, batches=6), objective=ObjectiveConfig(price=0.5))


class OnlyGerminates(WaitOnly):
    """Germinates in all slots, and fossilizes the seeds of the first `keep` slots."""

    def __init__(self, keep: int) -> None:
        self.keep = keep

    def act(self, pool: HostPool) -> Action:
        possible = pool.masks.slot[0].tolist()
        row = WAIT
        for slot in range(3):
            if possible[Op.GERMINATE][slot]:
                row = germinate(slot, 1)
                break
            if slot < self.keep and possible[Op.FOSSILIZE][slot]:
                row = fossilize(slot)
        return act(*[row] * pool.n_envs)


@pytest.mark.parametrize(("keep", "parameters"), [(0, 390), (2, 390 + 20 + 72)])
def test_only_fossilized_seeds_are_tested_and_rewarded(pool: HostPool, keep: int, parameters: int) -> None:
    played = play_episode(pool, "grower", OnlyGerminates(keep), rng_seeds=[1, 3])

    inputs, targets = pool.data.test
    for i, env in enumerate(pool.envs):
        outputs = fossilized_copy(env)(inputs)
        assert played.score[i] == pytest.approx((outputs.argmax(1) == targets).float().mean().item())
        assert played.loss[i] == pytest.approx(F.cross_entropy(outputs, targets).item(), rel=1e-4)
    assert played.ops.shape == (pool.horizon, 2) and (played.ops == Op.FOSSILIZE).sum(0).tolist() == [keep] * 2
    assert played.parameters.tolist() == [parameters] * 2 and played.fossils.tolist() == [keep] * 2
    rent = 0.5 * np.log(1 + (parameters - 390) / 390)
    np.testing.assert_allclose(played.objective, played.score - rent, atol=1e-6)


def test_an_episode_is_reproducible_whatever_was_played_before(pool: HostPool) -> None:
    first = play_episode(pool, "random", RandomValid(0), rng_seeds=[1, 3])
    other = play_episode(pool, "random", RandomValid(0), rng_seeds=[7, 9])
    again = play_episode(pool, "random", RandomValid(0), rng_seeds=[1, 3])

    for column in ("score", "loss", "parameters", "objective", "flops", "ticks", "fossils", "rollbacks"):
        assert np.array_equal(getattr(first, column), getattr(again, column)), column
    assert np.array_equal(first.ops, again.ops)
    assert first.topologies == again.topologies
    assert not np.array_equal(first.score, other.score)


def test_rollbacks_are_counted_host_by_host(make_pool: MakePool) -> None:
    pool = make_pool(2, governor=ONLY_NAN_DIVERGES)
    with breaking_epoch(pool, [1]):
        assert play_episode(pool, "waits", WaitOnly(), rng_seeds=[1, 3]).rollbacks.tolist() == [0, 1]


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


@pytest.mark.parametrize("topologies", [[BARE, BARE], [BARE, GROWN]], ids=["bare", "of two kinds"])
def test_training_compute_is_what_pytorch_counts(
    make_pool: MakePool, topologies: list[Topology], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(2, training=HostTraining(batches=2, batch_size=16))
    with counted_training(pool, monkeypatch) as counts:
        played = play_episode(pool, "static", StaticController(topologies), rng_seeds=SEEDS)

    counted = np.array(counts).reshape(-1, 2).sum(0)  # [T, H] -> [H]
    assert played.flops.tolist() == (counted + 6 * 2 * 16 * FIRST_LAYER).tolist()
    assert played.ticks.tolist() == [6, 6]


def test_a_host_that_has_stopped_costs_nothing(make_pool: MakePool) -> None:
    pool = make_pool(2)
    whole, part, more = (
        play_episode(pool, "wait", WaitOnly(), rng_seeds=SEEDS, tick_limits=limits) for limits in (None, [0, 4], [6, 9])
    )

    assert (part.flops / whole.flops).tolist() == [0.0, 4 / 6] and part.ticks.tolist() == [0, 4]
    assert (more.flops / whole.flops).tolist() == [1.0, 9 / 6] and more.ticks.tolist() == [6, 9]
    assert more.score[0] == whole.score[0], "it stopped where the others ended"


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


@pytest.mark.parametrize("executor", rest_is_slow(["loop", "threads", "fused"], {"fused"}))
def test_all_controllers_see_the_same_data_whatever_they_do(
    make_pool: MakePool, orders: dict[tuple[int, int], list[Tensor]], executor: str
) -> None:
    pool = make_pool(2, executor=executor)
    controllers: list[Controller] = [WaitOnly(), RandomValid(0), RandomValid(1), StaticController([BARE, GROWN])]
    ops = [play_episode(pool, "one", controller, rng_seeds=SEEDS).ops for controller in controllers]

    assert (ops[1] == Op.GERMINATE).any(), "or they would have seen the same anyhow"
    assert set(orders) == {(seed, tick) for seed in SEEDS for tick in range(6)}
    for met in orders.values():
        assert len(met) == 4 and all(torch.equal(met[0], other) for other in met[1:])
    assert len({tuple(met[0].flatten().tolist()) for met in orders.values()}) == 12, "and no two host epochs are alike"
    assert not [env for env in pool.envs if env.data_order is not None or env.on_batches is not None]


class RecordsInitialNetworks(StaticController):
    """Keeps copies of the networks before they train, in which every slot is replaced by its seed or nothing."""

    def reset(self, pool: HostPool) -> None:
        super().reset(pool)
        self.plain = [deepcopy(env.network) for env in pool.envs]
        for network in self.plain:
            for slot in slots_of(network).values():
                (path,) = [path for path, module in network.named_modules() if module is slot]
                parent, _, child = path.rpartition(".")
                setattr(network.get_submodule(parent), child, slot.seed)


def test_a_static_host_is_the_plain_network_trained_by_hand(make_pool: MakePool) -> None:
    # SGD, because Adam would turn gradients that are only rounding errors into full steps.
    training = HostTraining(optimizer="sgd", lr=0.05, batches=3, batch_size=16, max_grad_norm=None)
    pool = make_pool(2, training=training, lifecycle=replace(SMALL.lifecycle, birth="random"))
    topologies: list[Topology] = [GROWN, TOPOLOGIES[1]]
    controller = RecordsInitialNetworks(topologies)
    played = play_episode(pool, "static", controller, rng_seeds=SEEDS)

    inputs, targets = pool.data.train
    for i, (network, seed) in enumerate(zip(controller.plain, SEEDS, strict=True)):
        assert not slots_of(network)
        optimizer = torch.optim.SGD(network.parameters(), lr=training.lr, momentum=0.9)
        network.train()
        for tick in range(6):
            order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch_rng_seed(seed, tick)))
            for batch in order[: 3 * 16].view(3, 16):
                optimizer.zero_grad()
                F.cross_entropy(network(inputs[batch]), targets[batch]).backward()
                optimizer.step()
        with torch.no_grad():
            said = network.eval()(pool.data.test.inputs)
        right = (said.argmax(1) == pool.data.test.targets).float().mean().item()
        assert played.score[i] == pytest.approx(right, abs=0.011)  # one image of a hundred may differ by rounding
        assert played.loss[i] == pytest.approx(F.cross_entropy(said, pool.data.test.targets).item(), rel=1e-3)
        assert played.parameters[i] == sum(p.numel() for p in network.parameters())


def test_static_hosts_are_the_same_hosts_with_fossils_from_the_first_tick_to_the_last(make_pool: MakePool) -> None:
    pool = make_pool(2)
    pool.reset(SEEDS)
    bare = [{name: value.clone() for name, value in env.network.named_parameters()} for env in pool.envs]
    StaticController(TOPOLOGIES).reset(pool)
    for env, weights in zip(pool.envs, bare, strict=True):
        grown = env.network.state_dict()
        assert weights and all(torch.equal(grown[name], value) for name, value in weights.items())
        assert all(slot.alpha.item() == 1.0 for slot in env.slots if slot.occupied)
        learned = {id(p) for group in env.optimizer.param_groups for p in group["params"]}
        assert {id(p) for p in env.network.parameters()} <= learned
        env.roll_back(stop=False, cause="test")
        assert sum(slot.stage is Stage.FOSSILIZED for slot in env.slots) > 0, "a rollback goes back to this network"

    played = play_episode(pool, "static", StaticController(TOPOLOGIES), rng_seeds=SEEDS)

    assert played.topologies == TOPOLOGIES


def test_a_static_host_with_equal_compute_trains_as_long_as_the_budget_allows(make_pool: MakePool) -> None:
    pool, seeds = make_pool(4), [1, 3, 5, 7]
    grown = play_episode(pool, "random", RandomValid(0), rng_seeds=seeds)
    whole, equal = play_static(pool, "static", grown, rng_seeds=seeds)

    per_tick = whole.flops / 6
    assert (equal.flops <= grown.flops).all() and (equal.flops + per_tick > grown.flops).all()
    assert len(set(equal.ticks.tolist())) > 1, "every host has a budget of its own"
    assert equal.parameters.tolist() == whole.parameters.tolist() == grown.parameters.tolist()
    assert affordable_ticks(whole._replace(flops=0 * whole.flops), grown.flops) == [0] * 4, "its cost is unknown"


def test_a_learning_rate_that_falls_does_so_within_the_epochs_that_equal_compute_buys(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(2, training=HostTraining(lr=0.02, batches=1, lr_schedule="cosine"))
    rates: list[list[float]] = [[], []]
    draw_batches = HostEnv.draw_batches

    def draw(env: HostEnv, samples: int) -> Batches:
        rates[pool.envs.index(env)].append(env.lr_share)
        return draw_batches(env, samples)

    monkeypatch.setattr(HostEnv, "draw_batches", draw)
    play_episode(pool, "wait", WaitOnly(), rng_seeds=SEEDS, tick_limits=[3, 9])

    for found, limit in zip(rates, (3, 9), strict=True):
        assert found == pytest.approx([0.5 + 0.5 * math.cos(math.pi * tick / limit) for tick in range(limit)])
    assert [env.lr_share for env in pool.envs] == [0.0, 0.0], "other episodes have their horizon"
