"""Manual germination and blending of seeds: random numbers, layouts and ramps."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from esper_lightning.blueprints import build_seed
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.growing_network import GrowingNetwork
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.slot import Layout, SeedSlot
from esper_lightning.growth.stages import Stage
from tests.growth.by_hand import EAGER, check_optimizer_matches, describe_events, epoch, growing, learn
from tests.growth.grown import CALM, CPU, LAYOUTS, STYLES, generator_of, host_of, small_cnn


def seed_weights(network: GrowingNetwork, slot: str = "block1") -> list[Tensor]:
    network.germinate(slot, "conv_heavy", style="gate")
    return [p.detach().clone() for p in network.slots[slot].seed.parameters()]


def test_by_default_seeds_follow_torchs_seed_and_leave_its_generator_alone() -> None:
    weights = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        torch.rand(seed)  # the number of earlier draws has no effect
        before = torch.get_rng_state()
        weights.append(seed_weights(growing(generator=None)))
        assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
    assert not torch.equal(weights[0][0], weights[2][0])


def test_by_default_a_negative_seed_will_do() -> None:
    torch.manual_seed(-1)
    assert seed_weights(growing(generator=None))
    torch.manual_seed(0)


def test_by_default_a_seed_does_not_repeat_the_hosts_first_weights() -> None:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 12), SeedSlot("end", "vector", 12))
    network = GrowingNetwork(host, SGD(host.parameters(), lr=0.1), horizon=3)
    network.germinate("end", "mlp_small")  # its first layer is a Linear(12, 24) too
    assert not torch.equal(network.slots["end"].seed.body[0].weight, host[0].weight)


def test_seeds_come_from_the_generator_that_was_given() -> None:
    network = growing(generator=generator_of(11))
    network.germinate("block1", "conv_heavy")
    expected = build_seed("conv_heavy", "image", 4, device=CPU, generator=generator_of(11))
    assert all(
        torch.equal(a, b) for a, b in zip(network.slots["block1"].seed.parameters(), expected.parameters(), strict=True)
    )


@pytest.mark.parametrize("birth", ["identity", "random"])
def test_seeds_are_born_as_the_lifecycle_says(birth: str) -> None:
    network = growing(LifecycleConfig(birth=birth))
    network.germinate("block1", "conv_heavy")
    x = torch.randn(2, 4, 8, 8, generator=generator_of(2))
    assert torch.equal(network.slots["block1"].seed(x), x) is (birth == "identity")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_grows_by_hand(layout: Layout, style: str) -> None:
    host = host_of(layout)
    optimizer = Adam(host.parameters(), lr=0.01)
    network = GrowingNetwork(host, optimizer, horizon=9, lifecycle=EAGER)
    slot = next(iter(slots_of(host)))
    network.germinate(slot, "norm", ticks=2, style=style, curve="sigmoid6")
    for step in range(4):
        learn(host, optimizer, step, layout)
        network.end_epoch({slot: 1.0})
    assert network.fossilize(slot).after is Stage.FOSSILIZED
    check_optimizer_matches(network)


def test_a_target_of_the_lifecycle_is_where_alpha_rises_to() -> None:
    network = growing(LifecycleConfig(training_ticks=0, alpha_target=0.6, min_gradient_health=0.0, auto_cull=False))
    network.germinate("block1", "norm", ticks=3)
    alphas = []
    for _ in range(6):
        epoch(network)
        alphas.append(network.slots["block1"].alpha.item())
    assert alphas == pytest.approx([0.2, 0.4, 0.6, 0.6, 0.6, 0.6])


def test_a_ramp_without_ticks_is_all_there_at_once() -> None:
    network = growing(EAGER)
    network.germinate("block1", "norm", ticks=0)
    assert describe_events(epoch(network)) == ["block1: TRAINING", "block1: BLENDING"]
    assert network.slots["block1"].alpha.item() == 1.0
    assert describe_events(epoch(network)) == ["block1: PROBATIONARY"]


def test_probation_times_out_by_the_networks_horizon() -> None:
    def ticks_on_probation(horizon: int) -> int:
        host = small_cnn(["block1"])
        config = LifecycleConfig(training_ticks=0)
        network = GrowingNetwork(host, SGD(host.parameters(), lr=0.1), horizon=horizon, lifecycle=config)
        network.germinate("block1", "norm", ticks=0)
        ticks = 0
        while network.slots["block1"].occupied:
            ticks += network.slots["block1"].stage is Stage.PROBATIONARY
            network.end_epoch({"block1": 0.5}, {"block1": CALM})
        return ticks

    assert [ticks_on_probation(horizon) for horizon in (10, 50, 200)] == [5, 5, 20]


def test_a_seed_may_be_blended_from_the_start_without_any_gate() -> None:
    network = growing(LifecycleConfig(training_ticks=9, min_potential=50.0))
    event = network.germinate("block1", "conv_light", ticks=2, stage="BLENDING")
    assert (event.before, event.after) == (Stage.DORMANT, Stage.BLENDING)
    assert network.slots["block1"].alpha.item() == 0.5
    assert describe_events(epoch(network)) == []
    assert describe_events(epoch(network)) == ["block1: PROBATIONARY"]
    check_optimizer_matches(network)


def test_a_seed_cannot_begin_in_a_later_stage() -> None:
    network = growing()
    with pytest.raises(ValueError, match="cannot begin in 'FOSSILIZED'; choose GERMINATED or BLENDING"):
        network.germinate("block1", "norm", stage="FOSSILIZED")
    assert not network.slots["block1"].occupied
