"""Manual growth keeps the optimizer consistent with the network and its seeds."""

import pytest
from torch import Tensor
from torch.optim import Adam

from esper_lightning.growth.counterfactual import contributions
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.growing_network import GrowingNetwork
from esper_lightning.growth.lifecycle import SeedEvent, count_parameters
from esper_lightning.growth.param_groups import group_names
from esper_lightning.growth.stages import Stage
from tests.growth.by_hand import BY_HAND, check_optimizer_matches, describe_events, epoch, growing, learn
from tests.growth.grown import batch_of, host_of


def test_a_seed_grown_by_hand_goes_through_its_whole_life_and_makes_the_network_better() -> None:
    host = host_of("image")
    optimizer = Adam(host.parameters(), lr=0.01)
    lifecycle = LifecycleConfig(training_ticks=3, min_contribution=None)
    network = GrowingNetwork(host, optimizer, horizon=20, lifecycle=lifecycle)
    batch, before = batch_of("image"), count_parameters(host)

    def right(outputs: Tensor, classes: Tensor) -> Tensor:
        return (outputs.argmax(1) == classes).double()

    assert describe_events([network.germinate("block2.pool", "conv_light", ticks=3, style="gate", curve="cosine")]) == [
        "block2.pool: GERMINATED"
    ]
    lived, losses = [], []
    for _ in range(8):
        losses.append(learn(host, optimizer, step=7))
        # Sixteen samples measure a contribution to 6 points, and its sign depends on the processor's rounding.
        measured = contributions(host, [batch], right)
        lived.append(describe_events(network.end_epoch(dict.fromkeys(measured, 1.0))))
    assert lived == [
        ["block2.pool: TRAINING"],
        [],
        [],
        ["block2.pool: BLENDING"],
        [],
        [],
        ["block2.pool: PROBATIONARY"],
        [],
    ]
    assert network.reasons_against_fossilizing("block2.pool") == []
    kept = network.fossilize("block2.pool")
    assert (kept.blueprint, kept.before, kept.after) == ("conv_light", Stage.PROBATIONARY, Stage.FOSSILIZED)
    for _ in range(8):
        losses.append(learn(host, optimizer, step=7))
        assert network.end_epoch() == []
    assert losses[-1] < 0.9 * losses[0]
    assert count_parameters(host) == before + (9 * 8 * 8 + 8) + (8 + 1) * 8 + 8 + 1  # 8 channels; the gate
    assert group_names(optimizer) == ["", "seed.block2.pool"]
    check_optimizer_matches(network)


def test_a_seed_that_does_not_help_is_culled_and_its_slot_opens_again() -> None:
    network = growing(LifecycleConfig(training_ticks=1, embargo_ticks=2, min_gradient_health=0.0))
    network.germinate("block1", "norm", ticks=1)
    lived = [describe_events(epoch(network, step, {"block1": -1.0})) for step in range(8)]
    assert lived == [
        ["block1: TRAINING"],
        ["block1: BLENDING"],
        ["block1: PROBATIONARY"],
        ["block1: CULLED"],
        ["block1: EMBARGOED"],
        [],
        ["block1: DORMANT"],
        [],
    ]
    assert group_names(network.optimizer) == [""]
    check_optimizer_matches(network)
    network.germinate("block1", "conv_small")


def test_seeds_in_several_slots_live_their_own_lives() -> None:
    network = growing(LifecycleConfig(training_ticks=1, min_gradient_health=0.0, auto_cull=False))
    network.germinate("block2.pool", "norm", ticks=1)
    epoch(network)
    network.germinate("block1", "attention", ticks=1)
    lived = [describe_events(epoch(network)) for _ in range(3)]
    assert lived == [
        ["block1: TRAINING", "block2.pool: BLENDING"],
        ["block1: BLENDING", "block2.pool: PROBATIONARY"],
        ["block1: PROBATIONARY"],
    ]


def test_where_it_is_switched_off_a_seed_advances_when_it_is_told_to() -> None:
    network = growing(BY_HAND)
    network.germinate("block1", "norm", ticks=2)
    assert [describe_events(epoch(network)) for _ in range(4)] == [["block1: TRAINING"], [], [], []]
    assert network.reasons_against_advancing("block1") == []
    assert network.advance("block1") == SeedEvent(
        "block1", "norm", before=Stage.TRAINING, after=Stage.BLENDING, cause="advance"
    )
    assert network.reasons_against_advancing("block1") == ["alpha at 0.00 of its target, below 0.95"]
    assert [describe_events(epoch(network)) for _ in range(4)] == [[]] * 4
    assert network.advance("block1") == SeedEvent(
        "block1", "norm", before=Stage.BLENDING, after=Stage.PROBATIONARY, cause="advance"
    )


@pytest.mark.parametrize(
    ("switch", "stuck"),
    [("auto_blend", Stage.TRAINING), ("auto_probation", Stage.BLENDING)],
    ids=lambda value: str(value),
)
def test_each_switch_stops_its_own_advance_alone(switch: str, stuck: Stage) -> None:
    network = growing(LifecycleConfig(training_ticks=0, min_gradient_health=0.0, auto_cull=False, **{switch: False}))
    network.germinate("block1", "norm", ticks=1)
    for _ in range(5):
        epoch(network)
    assert network.slots["block1"].stage is stuck
    network.advance("block1")
    for _ in range(2):
        epoch(network)
    assert network.slots["block1"].stage is Stage.PROBATIONARY
