"""GrowingNetwork: a network, the optimizer that trains it, and what is known of its seeds.

Growing by hand, under a rule or under a learned controller goes through the same operations: each is refused with the
gates' reasons where it is not possible, keeps the optimizer in step, and returns what happened.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper_lightning.blueprints import nearest
from esper_lightning.growth import gates, network
from esper_lightning.growth.alpha import Curve, Ramp, check_ramp
from esper_lightning.growth.blend import Style
from esper_lightning.growth.gates import Evidence, LifecycleConfig
from esper_lightning.growth.gradients import GradientStats, gradient_stats
from esper_lightning.growth.manifest import manifest, rebuild
from esper_lightning.growth.network import SeedEvent, check_slot_names, slots_of
from esper_lightning.growth.optimizer import (
    SEED,
    add_group,
    forget,
    group_names,
    group_of,
    holds,
    remove_group,
    take_out,
)
from esper_lightning.growth.restoring import check_like, check_numbers, check_parts, load_module, load_optimizer
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage

SEED_MASK = 0x5EED
"""Turns torch's seed into another one: a host built right after `manual_seed` must not share its draws with seeds."""

CHANGES = frozenset({Stage.GERMINATED, Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED, Stage.CULLED})
"""Stages whose beginning is a germination, an advance, a fossilization or a cull."""


@dataclass
class SeedRecord:
    """What has been measured of the seed in a slot."""

    contribution: float | None = None  # accuracy points of 100
    previous_contribution: float | None = None
    gradient: GradientStats | None = None


class Refusals(NamedTuple):
    """Reasons why the seed in a slot cannot be changed now; an empty list: it can."""

    advancing: list[str]
    fossilizing: list[str]
    culling: list[str]


class GrowingNetwork:
    """Any network with slots, while it trains.

    Args:
        module: The network; its slots may be its own, or attached by `attach_slots`.
        optimizer: Holds the network's parameters. Seeds are parameter groups of it from germination to cull.
        horizon: Host epochs (ticks) that training will take in all.
        lifecycle: When seeds advance.
        seed_options: Of the seeds' parameter groups (lr, weight_decay …); the rest is as the first group has it then.
        carry_over: Keep the optimizer's state when the network changes. False resets all of it: an ablation.
        generator: Draws the seeds' weights. None: one on the network's device that follows `torch.manual_seed`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        *,
        horizon: int,
        lifecycle: LifecycleConfig = LifecycleConfig(),
        seed_options: Mapping[str, Any] | None = None,
        carry_over: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.horizon = horizon
        self.lifecycle = lifecycle
        self.seed_options = dict(seed_options or {})
        for name in self.seed_options:
            if name not in optimizer.defaults:
                raise ValueError(
                    f"seed_options: the optimizer has no {name!r}; {nearest(name, list(optimizer.defaults))}"
                )
        self.carry_over = carry_over
        self.slots: dict[str, SeedSlot] = slots_of(module)
        if not self.slots:
            raise ValueError("the network has no slots; give it some with attach_slots, or build SeedSlots in")
        device = next(iter(self.slots.values())).alpha.device
        self.generator = generator or torch.Generator(device).manual_seed(torch.initial_seed() ^ SEED_MASK)
        self.records = {name: SeedRecord() for name in self.slots}
        self._regroup()

    def _regroup(self) -> None:
        """Gives every seed the group that is its own: the network or the optimizer may have been loaded."""
        seeds = {group_of(name): slot.seed for name, slot in self.slots.items() if slot.occupied}
        for name in group_names(self.optimizer):
            if name.startswith(SEED) and not (name in seeds and holds(self.optimizer, name, seeds[name])):
                remove_group(self.optimizer, name)
        for name, seed in seeds.items():
            if not holds(self.optimizer, name, seed):
                add_group(self.optimizer, name, seed, **self.seed_options)

    def clear(self) -> None:
        """Takes every seed out, and forgets all momentum: as before anything grew."""
        for name in self.slots:
            self.remove(name)
        forget(self.optimizer)

    def remove(self, slot: str) -> None:
        """Takes out whatever grows in `slot`, fossils too, outside of the lifecycle; the slot is open at once."""
        place = self._slot(slot)
        if place.occupied:
            self._forget_seed(slot, place.seed)
            if not self.carry_over:
                forget(self.optimizer)
        place.empty()

    def germinate(
        self, slot: str, blueprint: str, *, ticks: int = 5, style: Style = "add", curve: Curve = "linear"
    ) -> SeedEvent:
        """Puts a new seed in an empty slot; once it may be blended, alpha will rise over `ticks` host epochs."""
        place = self._slot(slot)
        ramp = Ramp(0.0, self.lifecycle.alpha_target, ticks, curve)
        event = network.germinate(place, blueprint, ramp, self.generator, style, self.lifecycle.birth)
        with ExitStack() as undo:
            undo.callback(place.empty)
            self._regroup()
            undo.pop_all()
        self.records[slot] = SeedRecord()
        return self._changed(event)

    def advance(self, slot: str) -> SeedEvent:
        """TRAINING to BLENDING, or BLENDING to PROBATIONARY, where that does not happen by itself."""
        self._allow("advanced", slot, self.against_advancing(slot))
        return self._changed(network.advance(self.slots[slot]))

    def set_alpha(self, slot: str, target: float, *, ticks: int = 5, curve: Curve = "linear") -> SeedEvent:
        """Sends alpha of a blended seed to another target, above 0."""
        if not 0.0 < target <= 1.0:
            raise ValueError(f"slot {slot!r}: alpha's target must lie in (0, 1], got {target}; to remove it, cull")
        return network.aim(self._slot(slot), target, ticks, curve)

    def fossilize(self, slot: str) -> SeedEvent:
        """Keeps a probationary seed for good."""
        self._allow("fossilized", slot, self.against_fossilizing(slot))
        return self._changed(replace(network.fossilize(self.slots[slot]), contribution=self._contribution(slot)))

    def cull(self, slot: str, *, ticks: int = 0, curve: Curve = "linear") -> SeedEvent:
        """Removes a live seed: at once, or by letting its alpha fall to 0 over `ticks` host epochs first.

        A seed whose alpha is 0 already, or would be in the coming epoch, goes at once; one that fades already goes on.
        """
        place = self._slot(slot)
        self._allow("culled", slot, self.against_culling(slot))
        check_ramp(Ramp(0.0, 0.0, ticks, curve))
        if ticks > 1 and place.fading:
            return SeedEvent(slot, place.blueprint, place.stage, place.stage, "fading already")
        if ticks > 1 and place.ramping and place.alpha_before > 0.0:
            return network.aim(place, 0.0, ticks, curve)
        return self._cull_now(slot, "cull")

    def _cull_now(self, slot: str, cause: str) -> SeedEvent:
        place, contribution = self.slots[slot], self._contribution(slot)
        seed = place.seed
        event = network.cull(place, cause)
        self._forget_seed(slot, seed)
        return self._changed(replace(event, contribution=contribution))

    def _contribution(self, slot: str) -> float | None:
        """Of the seed at the alpha that it is meant to have: while it fades, that says nothing of it."""
        return None if self.slots[slot].fading else self.records[slot].contribution

    def standing(self, slot: str) -> SeedEvent:
        """Where a seed is, as a change that has yet to happen."""
        place = self._slot(slot)
        kind, stage = place.blueprint or "", place.stage
        return SeedEvent(slot, kind, stage, stage, "", place.ticks_in_stage, place.age, self._contribution(slot))

    def cull_live(self, cause: str) -> list[SeedEvent]:
        """Removes every seed that is neither kept nor gone, at once and whatever the gates say."""
        return [self._cull_now(name, cause) for name, slot in self.slots.items() if slot.live]

    def tick(
        self,
        contributions: Mapping[str, float] | None = None,
        gradients: Mapping[str, GradientStats] | None = None,
        hold: bool = False,
    ) -> list[SeedEvent]:
        """A host epoch has passed: takes in what it showed, and lets time pass for the seeds.

        Args:
            contributions: Accuracy points (of 100) that blended seeds contribute, by slot; see `counterfactual`.
            gradients: Of each seed, by slot. None: measured now, from the gradients of the last backward pass; so call
                it before `zero_grad`.
            hold: No seed advances by itself this time.
        """
        lifecycle = replace(self.lifecycle, auto_blend=False, auto_probation=False) if hold else self.lifecycle
        check_slot_names(list(contributions or ()), self.slots)
        gradients = self.gradients() if gradients is None else gradients
        check_slot_names(list(gradients), self.slots)
        events = []
        for name, slot in self.slots.items():
            record = self.records[name]
            if slot.occupied:
                record.gradient = gradients.get(name)
            if slot.blended and contributions is not None and name in contributions:
                record.previous_contribution, record.contribution = record.contribution, contributions[name]
            slot.tick()
            seed, contribution = slot.seed, self._contribution(name)
            happened = network.elapse(slot, self.evidence(name), lifecycle, self.horizon)
            if any(event.after is Stage.CULLED for event in happened):
                self._forget_seed(name, seed)
            events += [self._changed(replace(event, contribution=contribution)) for event in happened]
        return events

    def evidence(self, slot: str) -> Evidence:
        """What the gates may judge the seed in `slot` by."""
        place, record = self._slot(slot), self.records[slot]
        return Evidence(
            age=place.age,
            ticks_in_stage=place.ticks_in_stage,
            in_optimizer=holds(self.optimizer, group_of(slot), place.seed),
            alpha_share=place.alpha_share,
            alpha_rests=place.alpha_before == place.ramp.target and not place.fading,
            gradient=record.gradient,
            contribution=record.contribution,
        )

    def against_advancing(self, slot: str) -> list[str]:
        """Why `advance` is not possible now; empty: it is."""
        place = self._slot(slot)
        if place.fading:
            return ["it is being culled"]
        if place.stage is Stage.TRAINING:
            return gates.against_blending(self.evidence(slot), self.lifecycle)
        if place.stage is Stage.BLENDING:
            return gates.against_probation(self.evidence(slot), self.lifecycle)
        return [f"nothing to advance in {place.stage.name}"]

    def against_fossilizing(self, slot: str) -> list[str]:
        """Why `fossilize` is not possible now; empty: it is."""
        place = self._slot(slot)
        if place.stage is not Stage.PROBATIONARY:
            return [f"{place.stage.name} is not PROBATIONARY"]
        return gates.against_fossilizing(self.evidence(slot), self.lifecycle)

    def against_culling(self, slot: str) -> list[str]:
        """Why `cull` is not possible now; empty: it is."""
        place = self._slot(slot)
        if not place.live:
            return [f"no live seed in {place.stage.name}"]
        return gates.against_culling(self.evidence(slot), self.lifecycle)

    def refusals(self) -> list[Refusals]:
        """What the gates have against every change of the seed in each slot, [K]."""
        return [
            Refusals(self.against_advancing(name), self.against_fossilizing(name), self.against_culling(name))
            for name in self.slots
        ]

    def gradient_tensors(self) -> Tensor:  # [1 + K, 4] on the device: GradientStats of the host, then of each slot
        """Statistics of the gradients at hand; nothing is read back. An empty slot has NO_GRADIENT."""
        own = {id(p) for slot in self.slots.values() for p in slot.seed.parameters()}
        host = gradient_stats([p for p in self.module.parameters() if id(p) not in own])
        seeds = [gradient_stats(slot.seed.parameters(), host.device).to(host) for slot in self.slots.values()]
        return torch.stack([host, *seeds])

    def gradients(self) -> dict[str, GradientStats]:
        """Statistics of the gradients at hand, by slot, of seeds that have any: one transfer."""
        _, *rows = self.gradient_tensors().tolist()
        return {
            name: GradientStats(*row)
            for (name, slot), row in zip(self.slots.items(), rows, strict=True)
            if any(parameter.grad is not None for parameter in slot.seed.parameters())
        }

    def state_dict(self) -> dict[str, Any]:
        """All that growing goes on from, the network included, in types that `weights_only=True` loads."""
        return {
            "manifest": manifest(self.module),
            "network": self.module.state_dict(),
            "groups": group_names(self.optimizer),
            "optimizer": self.optimizer.state_dict(),
            "records": [
                [r.contribution, r.previous_contribution, list(r.gradient) if r.gradient else None]
                for r in self.records.values()
            ],
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state_dict` was taken: seeds grow again in the same slots, with their momentum.

        Raises ValueError if the state is of another network, or damaged.
        """
        check_parts(
            "the network's growth", state, ("manifest", "network", "groups", "optimizer", "records", "generator")
        )
        rebuild(self.module, state["manifest"])
        load_module(self.module, state["network"])
        for name in group_names(self.optimizer):
            if name.startswith(SEED):
                remove_group(self.optimizer, name)
        # In the order of the saved groups: an optimizer's state knows parameters by their place.
        seeds = {group_of(name): slot.seed for name, slot in self.slots.items() if slot.occupied}
        if sorted(state["groups"]) != sorted([*group_names(self.optimizer), *seeds]):
            raise ValueError(
                f"the optimizer's groups are {state['groups']}, which are not those of the seeds that grow"
            )
        for name in state["groups"]:
            if name in seeds:
                add_group(self.optimizer, name, seeds[name], **self.seed_options)
        load_optimizer(self.optimizer, deepcopy(state["optimizer"]))  # which would share its tensors
        for name, record in zip(self.slots, state["records"], strict=True):
            contribution, previous, gradient = record
            check_numbers("what is known of a seed", [n for n in (contribution, previous) if n is not None])
            if gradient is not None:
                gradient = GradientStats(*check_numbers("a seed's gradient", gradient, len(GradientStats._fields)))
            self.records[name] = SeedRecord(contribution, previous, gradient)
        generator = check_like("the generator's state", state["generator"].cpu(), self.generator.get_state())
        self.generator.set_state(generator.clone())  # torch takes the state from the storage's beginning: not of a view

    def _slot(self, name: str) -> SeedSlot:
        check_slot_names([name], self.slots)
        return self.slots[name]

    def _allow(self, what: str, slot: str, against: list[str]) -> None:
        if against:
            raise ValueError(f"slot {slot!r} cannot be {what}: {'; '.join(against)}")

    def _forget_seed(self, slot: str, seed: nn.Module) -> None:
        take_out(self.optimizer, group_of(slot), seed)
        self.records[slot] = SeedRecord()

    def _changed(self, event: SeedEvent) -> SeedEvent:
        if not self.carry_over and event.after in CHANGES:
            forget(self.optimizer)
        return event
