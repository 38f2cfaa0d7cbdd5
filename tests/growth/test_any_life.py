"""Random sequences of operations on a growing network obey the transition table and keep its state consistent."""

from copy import deepcopy
from typing import Any, NamedTuple, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from esper_lightning.growth.blend import Curve, Isolation
from esper_lightning.growth.blueprints import blueprint_names, build_on
from esper_lightning.growth.counterfactual import contributions
from esper_lightning.growth.gates import GradientStats, LifecycleConfig
from esper_lightning.growth.growing_network import GrowingNetwork, SeedMeasurements
from esper_lightning.growth.lifecycle import SeedEvent, slots_of
from esper_lightning.growth.slot import Layout
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from tests.growth.by_hand import check_optimizer_matches, trace
from tests.growth.grown import CPU, FOLLOWERS, LAYOUTS, TinyHost, add_noise, batch_of, generator_of, loss_on, same
from tests.tiers import rest_is_slow

POSSIBLE = {
    "germinate": {"DORMANT"},
    "cull": {"GERMINATED", "TRAINING", "BLENDING", "PROBATIONARY"},
    "fossilize": {"PROBATIONARY"},
}
"""Stages in which each operation may succeed, unless a gate refuses it."""

BUILDERS: list[type[Optimizer]] = [SGD, Adam, AdamW]


class Operation(NamedTuple):
    """One operation to try, with arguments of which each operation uses those it needs."""

    operation: str
    slot: int
    blueprint: int
    curve: str
    ticks: int
    hold: bool
    contribution: float | None
    gradient: GradientStats | None


lifecycles = st.builds(
    LifecycleConfig,
    birth=st.sampled_from(["identity", "random"]),
    isolation=st.sampled_from(get_args(Isolation)),
    training_ticks=st.integers(0, 2),
    min_gradient_health=st.sampled_from([0.0, 0.7]),
    min_contribution=st.sampled_from([None, 1.0]),
    auto_cull=st.booleans(),
    min_cull_age=st.integers(0, 2),
    embargo_ticks=st.integers(0, 2),
)

gradients = st.builds(
    GradientStats,
    norm=st.sampled_from([1.0, 1.0, 1e4]),
    rms=st.just(0.1),
    vanished=st.sampled_from([0.0, 0.0, 1.0]),
    exploded=st.just(0.0),
)

wishes = st.builds(
    Operation,
    operation=st.sampled_from(["germinate", "germinate", "cull", "fossilize", "fossilize", *["tick"] * 6]),
    slot=st.integers(0, 2),
    blueprint=st.integers(0, 20),
    curve=st.sampled_from(get_args(Curve)),
    ticks=st.integers(0, 3),
    hold=st.sampled_from([False, False, True]),
    contribution=st.sampled_from([None, 3.0, 3.0, 0.5, -1.0]),
    gradient=st.sampled_from([None, None]) | gradients,
)


@st.composite
def hosts(draw: st.DrawFn) -> tuple[Layout, dict[str, Any]]:
    """Draw a layout and the sizes of a small host."""
    layout = draw(st.sampled_from(LAYOUTS))
    isolate = draw(st.booleans())
    if layout != "image":
        return layout, {"width": draw(st.integers(2, 6)), "isolate": isolate}
    blocks = draw(st.integers(1, 3))
    pools = draw(st.integers(0, blocks))
    places = [f"block{i + 1}{end}" for i in range(blocks) for end in ("", ".pool") if i < pools or not end]
    slots = draw(st.lists(st.sampled_from(places), min_size=1, max_size=3, unique=True))
    sizes = {"base": draw(st.integers(1, 4)), "kernel": draw(st.sampled_from([1, 3]))}
    return layout, {"blocks": blocks, "pools": pools, "slots": slots, "isolate": isolate, **sizes}


def build(host: tuple[Layout, dict[str, Any]], seed: int = 0) -> nn.Module:
    layout, sizes = host
    if layout == "image":
        return build_on(CPU, lambda: CNN((1, 8, 8), 10, **sizes), generator_of(seed))
    return build_on(CPU, lambda: TinyHost(layout, **sizes), generator_of(seed))


class TrackedNetwork:
    """Growing network, with its state as inferred from events alone."""

    def __init__(self, host: tuple[Layout, dict[str, Any]], make: type[Optimizer], lifecycle: LifecycleConfig) -> None:
        self.layout = host[0]
        module = build(host)
        self.network = GrowingNetwork(
            module, make(module.parameters(), lr=0.01), horizon=20, lifecycle=lifecycle, generator=generator_of(1)
        )
        self.stages = dict.fromkeys(self.network.slots, "DORMANT")
        self.seen = dict.fromkeys(self.network.slots, 0.0)  # alpha in the last host epoch

    def fulfil(self, wish: Operation) -> None:
        slot = list(self.network.slots)[wish.slot % len(self.network.slots)]
        if wish.operation == "tick":
            self.take_in(self.tick(wish))
            return
        possible, before = self.stages[slot] in POSSIBLE[wish.operation], trace(self.network)
        try:
            event = self.operate(wish, slot)
        except ValueError as refusal:
            assert f"slot '{slot}'" in str(refusal)
            assert not (possible and wish.operation == "germinate"), "no gate refuses it"
            assert trace(self.network) == before
            return
        assert possible
        self.take_in([event])
        if wish.operation == "germinate":
            add_noise(self.network.slots[slot].seed, seed=2, scale=0.1)

    def operate(self, wish: Operation, slot: str) -> SeedEvent:
        if wish.operation == "germinate":
            known = blueprint_names(self.layout)
            blueprint = known[wish.blueprint % len(known)]
            return self.network.germinate(slot, blueprint, ticks=wish.ticks, curve=wish.curve)
        return {"cull": self.network.cull, "fossilize": self.network.fossilize}[wish.operation](slot)

    def tick(self, wish: Operation) -> list[SeedEvent]:
        self.network.module.train()
        self.network.optimizer.zero_grad()
        loss_on(self.network.module, batch_of(self.layout, samples=6)).backward()
        self.network.optimizer.step()
        contribution = None if wish.contribution is None else dict.fromkeys(self.stages, wish.contribution)
        gradient = None if wish.gradient is None else dict.fromkeys(self.stages, wish.gradient)
        self.seen = {name: slot.alpha.item() for name, slot in self.network.slots.items()}
        return self.network.end_epoch(contribution, gradient, hold=wish.hold)

    def take_in(self, events: list[SeedEvent]) -> None:
        for event in events:
            assert event.before.name == self.stages[event.slot]  # no change goes unreported
            if event.after is event.before:
                assert event.cause.startswith("stuck: ") and event.before is Stage.TRAINING
                continue
            assert event.after.name in FOLLOWERS[event.before.name]
            self.stages[event.slot] = event.after.name

    def check(self) -> None:
        network = self.network
        assert {name: slot.stage.name for name, slot in network.slots.items()} == self.stages
        for name, slot in network.slots.items():
            assert slot.alpha.item() == torch.tensor(slot.alpha_now).item()  # the buffer has float32
            assert 0.0 <= slot.alpha_now <= 1.0
            assert slot.blended or slot.alpha_now == 0.0
            assert not slot.blended or slot.alpha_before == pytest.approx(self.seen[name], abs=1e-6)
            assert slot.occupied == bool([*slot.parameters()])
            assert slot.occupied or network.measurements[name] == SeedMeasurements()
        check_optimizer_matches(network)


def check_rebuilt(life: TrackedNetwork, host: tuple[Layout, dict[str, Any]]) -> None:
    network, copy = deepcopy(life.network.module), build(host, seed=9)
    copy.load_state_dict(network.state_dict())
    assert [s.alpha.item() for s in slots_of(copy).values()] == [s.alpha.item() for s in slots_of(network).values()]
    assert same(network, copy, batch_of(life.layout)[0])


def check_nothing_at_alpha_0(life: TrackedNetwork) -> None:
    def right(outputs: Tensor, classes: Tensor) -> Tensor:
        return (outputs.argmax(1) == classes).double()

    network, batch = life.network.module.eval(), batch_of(life.layout, samples=12)
    for name, slot in life.network.slots.items():
        if slot.ramping:
            alpha = slot.alpha.item()
            slot.alpha.zero_()
            at_0 = network(batch[0])
            assert contributions(network, [batch], right)[name] == 0.0
            slot.override = lambda _, x: x
            assert torch.equal(at_0, network(batch[0]))
            slot.override = None
            slot.alpha.fill_(alpha)


@pytest.mark.parametrize("lives", rest_is_slow([50, 500], {50}))
def test_no_sequence_of_operations_leaves_the_table_or_loses_the_structure(lives: int) -> None:
    reached: set[str] = set()

    @settings(max_examples=lives)
    @given(hosts(), st.sampled_from(BUILDERS), lifecycles, st.lists(wishes, min_size=15, max_size=45))
    def stays_in_the_table(
        host: tuple[Layout, dict[str, Any]], make: type[Optimizer], lifecycle: LifecycleConfig, wished: list[Operation]
    ) -> None:
        life = TrackedNetwork(host, make, lifecycle)
        for wish in wished:
            life.fulfil(wish)
            life.check()
            reached.update(life.stages.values())
        check_rebuilt(life, host)
        check_nothing_at_alpha_0(life)
        life.network.clear()
        life.stages = dict.fromkeys(life.stages, "DORMANT")
        life.check()

    stays_in_the_table()
    assert reached == FOLLOWERS.keys()
