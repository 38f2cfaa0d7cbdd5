"""Whatever is asked of a growing network, in whatever order: the transition table holds, and nothing is lost."""

import json
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper_lightning.blueprints import build_on, names
from esper_lightning.growth.alpha import CURVES, Ramp
from esper_lightning.growth.gates import Evidence, LifecycleConfig
from esper_lightning.growth.network import SeedEvent, advance, cull, fossilize, germinate, manifest, rebuild, slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from tests.growth.grown import CPU, seeded, small_batch, stir

POSSIBLE = {
    "germinate": {"DORMANT"},
    "cull": {"GERMINATED", "TRAINING", "BLENDING", "PROBATIONARY"},
    "fossilize": {"PROBATIONARY"},
}

FOLLOWERS = {
    "DORMANT": {"GERMINATED"},
    "GERMINATED": {"TRAINING", "CULLED"},
    "TRAINING": {"BLENDING", "CULLED"},
    "BLENDING": {"PROBATIONARY", "CULLED"},
    "PROBATIONARY": {"FOSSILIZED", "CULLED"},
    "FOSSILIZED": set(),
    "CULLED": {"EMBARGOED"},
    "EMBARGOED": {"DORMANT"},
}

EAGER = LifecycleConfig(training_ticks=0, embargo_ticks=0, min_contribution=None)

PATIENT = LifecycleConfig(training_ticks=2, embargo_ticks=2, probation_ticks=2)


class Wish(NamedTuple):
    """One thing to try."""

    operation: str
    slot: str
    blueprint: str
    ramp: Ramp
    contribution: float
    health: float


ramps = st.builds(
    Ramp,
    start=st.just(0.0),
    target=st.sampled_from([0.5, 0.7, 1.0]),
    ticks=st.integers(1, 3),
    curve=st.sampled_from(sorted(CURVES)),
)
wishes = st.builds(
    Wish,
    operation=st.sampled_from(["germinate", "cull", "fossilize", "fossilize", *["tick"] * 6]),
    slot=st.sampled_from(["block1.pool", "block2"]),
    blueprint=st.sampled_from(names("image")),
    ramp=ramps,
    contribution=st.sampled_from([3.0, 3.0, 3.0, 0.5, -1.0]),
    health=st.sampled_from([1.0, 1.0, 1.0, 0.3]),
)


def two_slots(seed: int = 0) -> CNN:
    return build_on(
        CPU, lambda: CNN((1, 8, 8), 10, base=2, blocks=2, kernel=1, slots=["block1.pool", "block2"]), seeded(seed)
    )


def fulfil(network: CNN, wish: Wish, config: LifecycleConfig) -> list[SeedEvent]:
    slot = slots_of(network)[wish.slot]
    if wish.operation == "germinate":
        event = germinate(slot, wish.blueprint, wish.ramp, seeded(1))
        stir(slot.seed, seed=2)
        return [event]
    if wish.operation != "tick":
        return [{"cull": cull, "fossilize": fossilize}[wish.operation](slot)]
    events = []
    for each in slots_of(network).values():
        each.tick()
        share = each.ramp.value(each.ticks_in_stage) / each.ramp.target
        seen = Evidence(each.ticks_in_stage, share, 1.0, wish.health, wish.contribution)
        events += advance(each, seen, config, horizon=10)
    return events


def check_alpha(network: CNN) -> None:
    for slot in slots_of(network).values():
        assert slot.alpha.item() == torch.tensor(slot.alpha_now).item()  # the buffer has float32
        if not slot.blended:
            assert slot.alpha_now == 0.0


@settings(max_examples=80, deadline=None)
@given(config=st.sampled_from([EAGER, PATIENT]), life=st.lists(wishes, min_size=12, max_size=40))
def test_no_sequence_of_operations_leaves_the_table_or_loses_the_structure(
    config: LifecycleConfig, life: list[Wish]
) -> None:
    network = two_slots()
    stages = dict.fromkeys(slots_of(network), "DORMANT")
    for wish in life:
        before = manifest(network)
        if stages[wish.slot] not in POSSIBLE.get(wish.operation, FOLLOWERS):
            with pytest.raises(ValueError, match=f"slot '{wish.slot}': {stages[wish.slot]} cannot become"):
                fulfil(network, wish, config)
            assert manifest(network) == before
            continue
        for event in fulfil(network, wish, config):
            assert event.before.name == stages[event.slot]  # no change goes unreported
            assert event.after.name in FOLLOWERS[event.before.name]
            stages[event.slot] = event.after.name
        assert {name: slot.stage.name for name, slot in slots_of(network).items()} == stages
        check_alpha(network)

    copy = two_slots(seed=9)
    rebuild(copy, json.loads(json.dumps(manifest(network))))
    copy.load_state_dict(network.state_dict())
    images, _ = small_batch()
    assert manifest(copy) == manifest(network)
    assert torch.equal(copy.eval()(images), network.eval()(images))
    assert torch.equal(copy.train()(images), network.train()(images))
    check_alpha(copy)


def test_a_ramp_that_starts_above_zero_does_so_from_birth() -> None:
    network = two_slots()
    slot = slots_of(network)["block2"]
    germinate(slot, "norm", Ramp(start=0.25, target=1.0, ticks=3, curve="linear"), seeded())
    for stage in (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED):
        if stage is not Stage.GERMINATED:
            slot.move_to(stage)
        assert slot.alpha.item() == torch.tensor(slot.alpha_now).item(), stage.name
