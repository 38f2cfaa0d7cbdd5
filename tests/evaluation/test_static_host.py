"""Static controls, compared with plain modules that are built and trained by hand."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from esper_lightning.controllers.random import RandomValid, WaitOnly
from esper_lightning.envs import HostPool
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.evaluation.flops_meter import epoch_rng_seed
from esper_lightning.evaluation.play import FossilizedSeed, Topology, play_episode
from esper_lightning.evaluation.static_host import StaticController, affordable_ticks, build_topology
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from tests.conftest import SMALL

MakePool = Callable[..., HostPool]

SEEDS = [11, 13]
TOPOLOGIES: list[Topology] = [
    (FossilizedSeed("block1.pool", "conv_light", "add"), FossilizedSeed("block3", "norm", "add")),
    (FossilizedSeed("block2.pool", "conv_small", "add"),),
]
TRAINING = HostTraining(optimizer="sgd", lr=0.05, batches=3, batch_size=16, max_grad_norm=None)
"""Training with SGD: Adam would turn gradients that are only rounding errors into full steps."""


def plain_copy(network: nn.Module) -> nn.Module:
    """Return a copy in which every slot is replaced by its seed, or by the identity."""
    copy = deepcopy(network)
    for name, slot in slots_of(copy).items():
        (path,) = [path for path, module in copy.named_modules() if module is slot]
        parent, _, child = path.rpartition(".")
        setattr(copy.get_submodule(parent), child, slot.seed)
        assert name not in slots_of(copy)
    return copy


class RecordsInitialNetworks(StaticController):
    """Saves a copy of the networks before they train."""

    def reset(self, pool: HostPool) -> None:
        super().reset(pool)
        self.plain = [plain_copy(env.network) for env in pool.envs]


def test_a_static_host_is_the_plain_network_trained_by_hand(make_pool: MakePool) -> None:
    pool = make_pool(2, training=TRAINING, lifecycle=replace(SMALL.lifecycle, birth="random"))
    controller = RecordsInitialNetworks(TOPOLOGIES)
    played = play_episode(pool, "static", controller, rng_seeds=SEEDS)

    inputs, targets = pool.data.train
    for i, (network, seed) in enumerate(zip(controller.plain, SEEDS, strict=True)):
        assert not slots_of(network)
        optimizer = torch.optim.SGD(network.parameters(), lr=TRAINING.lr, momentum=0.9)
        network.train()
        for tick in range(6):
            order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch_rng_seed(seed, tick)))
            for batch in order[: 3 * 16].view(3, 16):
                optimizer.zero_grad()
                F.cross_entropy(network(inputs[batch]), targets[batch]).backward()
                optimizer.step()
        network.eval()
        with torch.no_grad():
            said = network(pool.data.test.inputs)
        right = (said.argmax(1) == pool.data.test.targets).float().mean().item()
        assert played.accuracy[i] == pytest.approx(right, abs=0.011)  # one image of a hundred may differ by rounding
        assert played.loss[i] == pytest.approx(F.cross_entropy(said, pool.data.test.targets).item(), rel=1e-3)
        assert played.parameters[i] == sum(p.numel() for p in network.parameters())


def test_hosts_begin_with_the_weights_that_they_always_begin_with(make_pool: MakePool) -> None:
    pool = make_pool(2)
    pool.reset(SEEDS)
    bare = [deepcopy(env.network).state_dict() for env in pool.envs]
    StaticController(TOPOLOGIES).reset(pool)

    for env, weights in zip(pool.envs, bare, strict=True):
        grown = env.network.state_dict()
        assert all(torch.equal(grown[name], value) for name, value in weights.items())


def test_seeds_are_fossils_at_full_alpha_from_the_first_tick_to_the_last(make_pool: MakePool) -> None:
    played = play_episode(make_pool(2), "static", StaticController(TOPOLOGIES), rng_seeds=SEEDS)

    assert played.topologies == TOPOLOGIES
    assert played.fossils.tolist() == [2, 1]
    fossil = int(Stage.FOSSILIZED)
    assert (played.trace.stages[:, 0] == [fossil, 0, fossil]).all()
    assert (played.trace.stages[:, 1] == [0, fossil, 0]).all()


def test_alpha_is_one_and_every_seed_is_in_the_optimizer(make_pool: MakePool) -> None:
    pool = make_pool(2)
    pool.reset(SEEDS)
    build_topology(pool.envs[0], TOPOLOGIES[0])

    env = pool.envs[0]
    assert [slot.alpha.item() for slot in env.slots if slot.occupied] == [1.0, 1.0]
    learned = {id(p) for group in env.optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in env.network.parameters()} <= learned


def test_a_rollback_goes_back_to_the_static_network(make_pool: MakePool) -> None:
    pool = make_pool(2)
    pool.reset(SEEDS)
    StaticController(TOPOLOGIES).reset(pool)
    for env in pool.envs:
        env.roll_back(ended=False, cause="test")

    stages = [[slot.stage is Stage.FOSSILIZED for slot in env.slots] for env in pool.envs]
    assert stages == [[True, False, True], [False, True, False]]


def test_nothing_built_in_is_the_host_that_never_grows(make_pool: MakePool) -> None:
    pool = make_pool(2)
    static, wait = (play_episode(pool, "one", one, rng_seeds=SEEDS) for one in (StaticController([(), ()]), WaitOnly()))

    assert np.array_equal(static.accuracy, wait.accuracy)
    assert np.array_equal(static.loss, wait.loss)


def test_a_static_host_with_equal_compute_trains_as_long_as_the_budget_allows(make_pool: MakePool) -> None:
    pool = make_pool(4)
    seeds = [1, 3, 5, 7]
    grown = play_episode(pool, "random", RandomValid(0), rng_seeds=seeds)
    whole = play_episode(pool, "static", StaticController(grown.topologies), rng_seeds=seeds)
    ticks = affordable_ticks(whole, grown.flops)
    equal = play_episode(pool, "equal", StaticController(grown.topologies), rng_seeds=seeds, tick_limits=ticks)

    per_tick = whole.flops / 6
    assert equal.ticks.tolist() == ticks
    assert (equal.flops <= grown.flops).all()
    assert (equal.flops + per_tick > grown.flops).all()
    assert len(set(ticks)) > 1, "every host has a budget of its own"
    assert equal.parameters.tolist() == whole.parameters.tolist() == grown.parameters.tolist()
