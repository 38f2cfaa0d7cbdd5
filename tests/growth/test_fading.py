"""Changes of alpha by slow culls and new targets, checked by alpha in each host epoch."""

from itertools import pairwise

import pytest
from torch.optim import SGD

from esper_lightning.growth.alpha import CURVES, Curve, Ramp
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.growing_network import GrowingNetwork
from esper_lightning.growth.lifecycle import SeedEvent
from esper_lightning.growth.param_groups import group_names
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from tests.growth.grown import CALM, small_cnn

EAGER = LifecycleConfig(training_ticks=0, embargo_ticks=3, auto_cull=False)

UP = Ramp(start=0.0, target=1.0, ticks=4, curve="linear")

every_curve = pytest.mark.parametrize("curve", sorted(CURVES))


def growing(stage: Stage = Stage.PROBATIONARY, lifecycle: LifecycleConfig = EAGER, ticks: int = 1) -> GrowingNetwork:
    """Return a network with one seed that reached `stage` automatically."""
    host = small_cnn(["block1"])
    network = GrowingNetwork(host, SGD(host.parameters(), lr=0.1), horizon=1000, lifecycle=lifecycle)
    network.germinate("block1", "norm", ticks=ticks)
    while slot_of(network).stage is not stage:
        tick(network)
    return network


def slot_of(network: GrowingNetwork) -> SeedSlot:
    return network.slots["block1"]


def tick(network: GrowingNetwork, contribution: float = 2.0) -> list[SeedEvent]:
    return network.end_epoch({"block1": contribution}, {"block1": CALM})


def seen_until_gone(network: GrowingNetwork, contribution: float = 2.0) -> tuple[list[float], list[SeedEvent]]:
    """Return alpha in each host epoch until the seed is removed, and the last epoch's events; others must have none."""
    alphas = []
    while True:
        alphas.append(slot_of(network).alpha.item())
        events = tick(network, contribution)
        if not slot_of(network).occupied:
            return alphas, events
        assert events == []


@every_curve
@pytest.mark.parametrize("ticks", [2, 3, 5, 8])
def test_a_slow_cull_falls_along_its_curve_and_ends_when_nothing_is_left(curve: Curve, ticks: int) -> None:
    network = growing()
    event = network.cull("block1", ticks=ticks, curve=curve)
    assert event == SeedEvent(
        "block1", "norm", before=Stage.PROBATIONARY, after=Stage.PROBATIONARY, cause=f"alpha to 0 in {ticks} ticks"
    )
    alphas, events = seen_until_gone(network)
    assert alphas == pytest.approx([1.0 - CURVES[curve](k / ticks) for k in range(1, ticks)])
    assert alphas == sorted(alphas, reverse=True)
    assert alphas[-1] > 0.0
    assert events == [SeedEvent("block1", "norm", before=Stage.PROBATIONARY, after=Stage.CULLED, cause="faded out")]
    assert slot_of(network).alpha.item() == 0.0


def test_a_slow_cull_in_the_middle_of_the_rise_begins_where_alpha_is() -> None:
    network = growing(Stage.BLENDING, ticks=4)
    tick(network)
    tick(network)
    assert slot_of(network).alpha.item() == 0.75
    network.cull("block1", ticks=5)  # alpha was 0.5 in the last epoch
    alphas, events = seen_until_gone(network)
    assert alphas == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert events == [SeedEvent("block1", "norm", before=Stage.BLENDING, after=Stage.CULLED, cause="faded out")]


@pytest.mark.parametrize("ticks", [0, 1])
def test_a_cull_that_leaves_nothing_for_the_coming_epoch_is_at_once(ticks: int) -> None:
    network = growing()
    event = network.cull("block1", ticks=ticks)
    assert event == SeedEvent("block1", "norm", before=Stage.PROBATIONARY, after=Stage.CULLED, cause="cull")
    assert not slot_of(network).occupied
    assert group_names(network.optimizer) == [""]


def test_a_seed_that_has_faded_out_leaves_nothing_behind_and_its_slot_stays_closed() -> None:
    network = growing()
    network.cull("block1", ticks=2)
    assert group_names(network.optimizer) == ["", "seed.block1"]  # it is still trained
    tick(network)
    assert slot_of(network).stage is Stage.CULLED
    assert group_names(network.optimizer) == [""]
    assert list(slot_of(network).parameters()) == []
    assert network.measurements["block1"].contribution is None
    assert [[event.after.name for event in tick(network)] for _ in range(4)] == [["EMBARGOED"], [], [], ["DORMANT"]]


@pytest.mark.parametrize("stage", [Stage.GERMINATED, Stage.TRAINING], ids=lambda stage: stage.name)
def test_what_is_not_blended_has_nothing_to_fade_and_goes_at_once(stage: Stage) -> None:
    network = growing(stage, LifecycleConfig(training_ticks=9, min_cull_age=0))
    assert network.cull("block1", ticks=3) == SeedEvent(
        "block1", "norm", before=stage, after=Stage.CULLED, cause="cull"
    )
    assert group_names(network.optimizer) == [""]


def test_a_seed_of_which_the_host_has_seen_nothing_yet_goes_at_once() -> None:
    network = growing(Stage.BLENDING, ticks=4)
    assert slot_of(network).alpha_before == 0.0
    assert network.cull("block1", ticks=3).after is Stage.CULLED


def test_a_slow_cull_also_waits_until_a_seed_is_old_enough() -> None:
    network = growing(lifecycle=LifecycleConfig(training_ticks=0, auto_cull=False, min_cull_age=4))
    with pytest.raises(ValueError, match=r"^slot 'block1' cannot be culled: 2 ticks old, younger than 4$"):
        network.cull("block1", ticks=3)
    assert not slot_of(network).fading


def test_a_fading_seed_cannot_be_fossilized_at_any_moment() -> None:
    network = growing()
    assert network.reasons_against_fossilizing("block1") == []
    network.cull("block1", ticks=4)
    for _ in range(3):
        assert network.reasons_against_fossilizing("block1") == ["alpha is still moving"]
        with pytest.raises(ValueError, match=r"slot 'block1' cannot be fossilized: alpha is still moving"):
            network.fossilize("block1")
        tick(network)
    assert not slot_of(network).occupied


def test_alpha_at_zero_is_no_rest_for_a_fading_seed() -> None:
    network = growing()
    network.cull("block1", ticks=2)
    for _ in range(2):
        slot_of(network).end_epoch()  # without automatic transitions, so that it is not culled
    assert slot_of(network).alpha_before == slot_of(network).ramp.target == 0.0
    assert network.reasons_against_fossilizing("block1") == ["alpha is still moving"]


def test_events_tell_what_a_seed_contributed_at_the_alpha_that_it_was_meant_to_have() -> None:
    culled, kept, faded = growing(), growing(), growing()
    for network in (culled, kept, faded):
        tick(network, contribution=3.0)
        assert network.status_event("block1").contribution == 3.0
    assert culled.cull("block1").contribution == kept.fossilize("block1").contribution == 3.0

    faded.cull("block1", ticks=3)
    tick(faded, contribution=-5.0)
    assert faded.status_event("block1").contribution is None
    _, (gone,) = seen_until_gone(faded, contribution=-5.0)
    assert gone.contribution is None


def test_a_fading_seed_can_be_rescued_and_kept() -> None:
    network = growing()
    network.cull("block1", ticks=4)
    tick(network)
    assert slot_of(network).alpha.item() == 0.5
    event = network.set_alpha("block1", 1.0, ticks=2)
    assert event == SeedEvent(
        "block1", "norm", before=Stage.PROBATIONARY, after=Stage.PROBATIONARY, cause="alpha to 1 in 2 ticks"
    )
    assert not slot_of(network).fading
    assert slot_of(network).alpha.item() == 0.875  # alpha was 0.75 in the last epoch
    assert [tick(network) for _ in range(9)] == [[]] * 9
    assert slot_of(network).alpha.item() == 1.0
    assert network.fossilize("block1").after is Stage.FOSSILIZED


def test_a_seed_rescued_while_blending_goes_on_to_probation() -> None:
    network = growing(Stage.BLENDING, ticks=3)
    tick(network)
    network.cull("block1", ticks=3)
    network.set_alpha("block1", 0.6, ticks=2)
    events = [event for _ in range(3) for event in tick(network)]
    assert [event.after for event in events] == [Stage.PROBATIONARY]
    assert slot_of(network).alpha.item() == pytest.approx(0.6)


def test_automatic_culling_does_not_cut_a_fade_short() -> None:
    config = LifecycleConfig(training_ticks=0, probation_ticks=1, probation_share=0.0)
    network = growing(lifecycle=config)
    network.cull("block1", ticks=4)
    alphas, events = seen_until_gone(network, contribution=-5.0)
    assert alphas == pytest.approx([0.75, 0.5, 0.25])
    assert [event.cause for event in events] == ["faded out"]


def test_automatic_culling_comes_back_after_a_rescue() -> None:
    network = growing(lifecycle=LifecycleConfig(training_ticks=0))
    network.cull("block1", ticks=4)
    assert tick(network, contribution=-5.0) == []
    network.set_alpha("block1", 1.0, ticks=3)
    for _ in range(2):
        assert tick(network, contribution=-5.0) == []  # alpha is still changing
    (event,) = tick(network, contribution=-5.0)
    assert event.cause == "contribution -5.00 points is not positive"


@pytest.mark.parametrize("reached", [0.0, 0.95])
def test_a_seed_that_fades_while_blending_never_gets_to_probation_by_itself(reached: float) -> None:
    network = growing(
        Stage.BLENDING, LifecycleConfig(training_ticks=0, min_alpha_reached=reached, auto_cull=False), ticks=2
    )
    slot_of(network).end_epoch()  # an epoch at alpha 1/2, without automatic transitions
    network.cull("block1", ticks=6)
    alphas, events = seen_until_gone(network)
    assert len(alphas) == 5
    assert [event.before for event in events] == [Stage.BLENDING]


@pytest.mark.parametrize("reached", [0.0, 0.95])
def test_a_seed_that_fades_while_blending_cannot_be_advanced(reached: float) -> None:
    by_hand = LifecycleConfig(training_ticks=0, min_alpha_reached=reached, auto_probation=False)
    network = growing(Stage.BLENDING, by_hand, ticks=2)
    tick(network)
    network.cull("block1", ticks=6)
    assert network.reasons_against_advancing("block1") == ["it is being culled"]
    with pytest.raises(ValueError, match=r"^slot 'block1' cannot be advanced: it is being culled$"):
        network.advance("block1")
    assert slot_of(network).stage is Stage.BLENDING


@every_curve
@pytest.mark.parametrize("ticks", [1, 3, 6])
def test_a_resting_alpha_goes_to_its_new_target_along_the_curve(curve: Curve, ticks: int) -> None:
    network = growing()
    network.set_alpha("block1", 0.5, ticks=ticks, curve=curve)
    alphas = []
    for _ in range(ticks + 2):
        rests = alphas[-1:] == [0.5]  # measurements of the last epoch were made at the target
        assert network.reasons_against_fossilizing("block1") == ([] if rests else ["alpha is still moving"])
        alphas.append(slot_of(network).alpha.item())
        tick(network)
    expected = [1.0 - 0.5 * CURVES[curve](min(1.0, k / ticks)) for k in range(1, ticks + 3)]
    assert alphas == pytest.approx(expected)
    assert slot_of(network).stage is Stage.PROBATIONARY


def test_a_new_target_without_ticks_holds_from_the_coming_epoch_on() -> None:
    network = growing()
    network.set_alpha("block1", 0.3, ticks=0)
    assert slot_of(network).alpha.item() == pytest.approx(0.3)
    assert network.reasons_against_fossilizing("block1") == ["alpha is still moving"]  # not yet measured at 0.3
    tick(network)
    assert network.reasons_against_fossilizing("block1") == []


@every_curve
@pytest.mark.parametrize("target", [0.1, 0.5, 0.8])
def test_a_new_target_in_the_middle_of_a_ramp_makes_alpha_turn_and_never_jump(curve: Curve, target: float) -> None:
    network = growing(Stage.BLENDING, ticks=4)
    begin = slot_of(network).alpha.item()
    tick(network)
    network.set_alpha("block1", target, ticks=20, curve=curve)
    alphas = [begin]
    for _ in range(21):
        alphas.append(slot_of(network).alpha.item())
        tick(network)
    steps = [later - earlier for earlier, later in pairwise(alphas)]
    assert all(step * (target - begin) >= 0.0 for step in steps)  # monotone
    assert max(map(abs, steps)) <= 0.35 * abs(target - begin) + 1e-6  # sigmoid24 is the steepest curve
    assert alphas[-1] == pytest.approx(target)


def test_asking_twice_for_a_target_between_two_epochs_is_asking_once() -> None:
    once, twice = growing(Stage.BLENDING, ticks=4), growing(Stage.BLENDING, ticks=4)
    for network, times in ((once, 1), (twice, 2)):
        tick(network)
        for _ in range(times):
            network.set_alpha("block1", 1.0, ticks=4)
    assert slot_of(once).alpha.item() == slot_of(twice).alpha.item() == 0.25 + 0.75 / 4


@pytest.mark.parametrize("target", [0.0, -0.5, 1.5, float("nan")])
def test_a_target_is_a_share_of_the_seed(target: float) -> None:
    network = growing()
    with pytest.raises(
        ValueError, match=r"slot 'block1': alpha's target must lie in \(0, 1\], got .*use cull\(\) to remove the seed"
    ):
        network.set_alpha("block1", target)
    assert slot_of(network).ramp.target == 1.0


def test_a_fossil_that_was_kept_at_a_part_stays_there() -> None:
    network = growing()
    network.set_alpha("block1", 0.5, ticks=2)
    tick(network)
    with pytest.raises(ValueError, match=r"^slot 'block1' cannot be fossilized: alpha is still moving$"):
        network.fossilize("block1")  # although alpha reaches its target in the coming epoch
    tick(network)
    network.fossilize("block1")
    assert [tick(network) for _ in range(3)] == [[]] * 3
    assert slot_of(network).alpha.item() == 0.5
    with pytest.raises(ValueError, match="alpha does not move in FOSSILIZED"):
        network.set_alpha("block1", 0.7)
