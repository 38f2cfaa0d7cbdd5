"""GrowingNetwork: a network, its optimizer and the measurements of its seeds.

Manual growth, rules and learned controllers use the same operations. Each raises ValueError with the gates' reasons if
it is not allowed, updates the optimizer's parameter groups, and returns a SeedEvent.
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
"""XOR mask for torch's RNG seed, so that seeds and a host built right after `manual_seed` draw different numbers."""

CHANGES = frozenset({Stage.GERMINATED, Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED, Stage.CULLED})
"""Stages entered by germination, advance, fossilization or cull: they reset the optimizer if `carry_over` is off."""


@dataclass
class SeedRecord:
    """Measurements of the seed in a slot. None: not measured."""

    contribution: float | None = None  # accuracy points of 100
    previous_contribution: float | None = None
    gradient: GradientStats | None = None


class Refusals(NamedTuple):
    """Reasons why the seed in a slot cannot be advanced, fossilized or culled now; an empty list means it can."""

    advancing: list[str]
    fossilizing: list[str]
    culling: list[str]


class GrowingNetwork:
    """Any network with slots, in training.

    Args:
        module: Network with slots, either built in or attached by `attach_slots`.
        optimizer: Optimizer of the network's parameters. Each seed is a parameter group from germination to cull.
        horizon: Total number of host epochs of the training.
        lifecycle: Conditions under which seeds change their stage.
        seed_options: Options of the seeds' parameter groups (lr, weight_decay …); all others are copied from the first
            group at germination.
        carry_over: Keep the optimizer's state when the network changes. False resets all of it, as an ablation.
        generator: Generator of the seeds' weights. None: one on the network's device, seeded from `torch.manual_seed`.
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
        """Give each seed its own group and drop other seed groups: network or optimizer may have been loaded."""
        seeds = {group_of(name): slot.seed for name, slot in self.slots.items() if slot.occupied}
        for name in group_names(self.optimizer):
            if name.startswith(SEED) and not (name in seeds and holds(self.optimizer, name, seeds[name])):
                remove_group(self.optimizer, name)
        for name, seed in seeds.items():
            if not holds(self.optimizer, name, seed):
                add_group(self.optimizer, name, seed, **self.seed_options)

    def clear(self) -> None:
        """Remove every seed and reset the optimizer's momenta and step counts."""
        for name in self.slots:
            self.remove(name)
        forget(self.optimizer)

    def remove(self, slot: str) -> None:
        """Remove the seed in `slot`, even a fossilized one, without gates or embargo; the slot is open at once."""
        place = self._slot(slot)
        if place.occupied:
            self._forget_seed(slot, place.seed)
            if not self.carry_over:
                forget(self.optimizer)
        place.empty()

    def germinate(
        self, slot: str, blueprint: str, *, ticks: int = 5, style: Style = "add", curve: Curve = "linear"
    ) -> SeedEvent:
        """Put a new seed in an empty slot; from BLENDING on, alpha rises over `ticks` host epochs."""
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
        """Move a seed from TRAINING to BLENDING, or from BLENDING to PROBATIONARY, if that is not automatic."""
        self._allow("advanced", slot, self.against_advancing(slot))
        return self._changed(network.advance(self.slots[slot]))

    def set_alpha(self, slot: str, target: float, *, ticks: int = 5, curve: Curve = "linear") -> SeedEvent:
        """Move alpha of a blended seed to another target above 0, over `ticks` host epochs."""
        if not 0.0 < target <= 1.0:
            raise ValueError(f"slot {slot!r}: alpha's target must lie in (0, 1], got {target}; to remove it, cull")
        return network.aim(self._slot(slot), target, ticks, curve)

    def fossilize(self, slot: str) -> SeedEvent:
        """Make a probationary seed a permanent part of the network."""
        self._allow("fossilized", slot, self.against_fossilizing(slot))
        return self._changed(replace(network.fossilize(self.slots[slot]), contribution=self._contribution(slot)))

    def cull(self, slot: str, *, ticks: int = 0, curve: Curve = "linear") -> SeedEvent:
        """Remove a live seed at once, or after its alpha has fallen to 0 over `ticks` host epochs.

        A seed whose alpha is 0 already, or would be in the coming epoch, is removed at once. A seed that fades already
        keeps its ramp.
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
        """Return the last contribution of the seed; None while it fades, because its alpha is then below its target."""
        return None if self.slots[slot].fading else self.records[slot].contribution

    def standing(self, slot: str) -> SeedEvent:
        """Return the present state of the seed as an event that changes nothing."""
        place = self._slot(slot)
        kind, stage = place.blueprint or "", place.stage
        return SeedEvent(slot, kind, stage, stage, "", place.ticks_in_stage, place.age, self._contribution(slot))

    def cull_live(self, cause: str) -> list[SeedEvent]:
        """Remove every live seed (not fossilized) at once, without asking the gates."""
        return [self._cull_now(name, cause) for name, slot in self.slots.items() if slot.live]

    def tick(
        self,
        contributions: Mapping[str, float] | None = None,
        gradients: Mapping[str, GradientStats] | None = None,
        hold: bool = False,
    ) -> list[SeedEvent]:
        """End a host epoch: store its measurements, move alpha and apply the automatic changes of stage.

        Args:
            contributions: Contributions of blended seeds by slot, in accuracy points (of 100); see the function
                `contributions`.
            gradients: Gradient statistics of each seed by slot. None: computed now from the gradients of the last
                backward pass, so call this before `zero_grad`.
            pause_auto_advance: Suppress automatic advances of seeds in this call.
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
        """Return the measurements by which the gates judge the seed in `slot`."""
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
        """Return the reasons why `advance` is not possible now; empty if it is."""
        place = self._slot(slot)
        if place.fading:
            return ["it is being culled"]
        if place.stage is Stage.TRAINING:
            return gates.against_blending(self.evidence(slot), self.lifecycle)
        if place.stage is Stage.BLENDING:
            return gates.against_probation(self.evidence(slot), self.lifecycle)
        return [f"nothing to advance in {place.stage.name}"]

    def against_fossilizing(self, slot: str) -> list[str]:
        """Return the reasons why `fossilize` is not possible now; empty if it is."""
        place = self._slot(slot)
        if place.stage is not Stage.PROBATIONARY:
            return [f"{place.stage.name} is not PROBATIONARY"]
        return gates.against_fossilizing(self.evidence(slot), self.lifecycle)

    def against_culling(self, slot: str) -> list[str]:
        """Return the reasons why `cull` is not possible now; empty if it is."""
        place = self._slot(slot)
        if not place.live:
            return [f"no live seed in {place.stage.name}"]
        return gates.against_culling(self.evidence(slot), self.lifecycle)

    def refusals(self) -> list[Refusals]:
        """Return for each of the K slots the gates' reasons against every change of its seed."""
        return [
            Refusals(self.against_advancing(name), self.against_fossilizing(name), self.against_culling(name))
            for name in self.slots
        ]

    def gradient_tensors(self) -> Tensor:  # [1 + K, 4] on the device: GradientStats of the host, then of each slot
        """Return statistics of the present gradients without waiting for the device; NO_GRADIENT for an empty slot."""
        own = {id(p) for slot in self.slots.values() for p in slot.seed.parameters()}
        host = gradient_stats([p for p in self.module.parameters() if id(p) not in own])
        seeds = [gradient_stats(slot.seed.parameters(), host.device).to(host) for slot in self.slots.values()]
        return torch.stack([host, *seeds])

    def gradients(self) -> dict[str, GradientStats]:
        """Return statistics of the present gradients by slot, for seeds with a gradient; needs one device transfer."""
        _, *rows = self.gradient_tensors().tolist()
        return {
            name: GradientStats(*row)
            for (name, slot), row in zip(self.slots.items(), rows, strict=True)
            if any(parameter.grad is not None for parameter in slot.seed.parameters())
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the full state of growth, including the network, in types that `weights_only=True` loads."""
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
        """Restore a state: the same seeds in the same slots, with their optimizer state.

        Raises ValueError if the state belongs to another network or is damaged.
        """
        check_parts(
            "the network's growth", state, ("manifest", "network", "groups", "optimizer", "records", "generator")
        )
        rebuild(self.module, state["manifest"])
        load_module(self.module, state["network"])
        for name in group_names(self.optimizer):
            if name.startswith(SEED):
                remove_group(self.optimizer, name)
        # In the order of the saved groups, because an optimizer's state refers to parameters by index.
        seeds = {group_of(name): slot.seed for name, slot in self.slots.items() if slot.occupied}
        if sorted(state["groups"]) != sorted([*group_names(self.optimizer), *seeds]):
            raise ValueError(
                f"the optimizer's groups are {state['groups']}, which do not match the seeds of the manifest"
            )
        for name in state["groups"]:
            if name in seeds:
                add_group(self.optimizer, name, seeds[name], **self.seed_options)
        load_optimizer(self.optimizer, deepcopy(state["optimizer"]))  # the optimizer would share its tensors
        for name, record in zip(self.slots, state["records"], strict=True):
            contribution, previous, gradient = record
            check_numbers("what is known of a seed", [n for n in (contribution, previous) if n is not None])
            if gradient is not None:
                gradient = GradientStats(*check_numbers("a seed's gradient", gradient, len(GradientStats._fields)))
            self.records[name] = SeedRecord(contribution, previous, gradient)
        generator = check_like("the generator's state", state["generator"].cpu(), self.generator.get_state())
        self.generator.set_state(generator.clone())  # torch reads the storage from its start, which is wrong for a view

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
