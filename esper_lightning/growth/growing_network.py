"""GrowingNetwork: a network, its optimizer and the measurements of its seeds.

Manual growth, rules and learned controllers use the same operations. Each raises ValueError with the gates' reasons if
it is not allowed, updates the optimizer's parameter groups, and returns a SeedEvent.
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper_lightning.growth import gates
from esper_lightning.growth import lifecycle as lifecycle_ops
from esper_lightning.growth.blend import Curve, Ramp
from esper_lightning.growth.block_optimizers import join_groups
from esper_lightning.growth.blueprints import suggest_name
from esper_lightning.growth.depth import DepthSlot
from esper_lightning.growth.gates import Evidence, GradientStats, LifecycleConfig, gradient_stats
from esper_lightning.growth.lifecycle import SeedEvent, check_slot_names, slots_of
from esper_lightning.growth.param_groups import (
    SEED_GROUP_PREFIX,
    add_group,
    check_optimizer,
    group_names,
    has_group,
    hooked_optimizers,
    host_groups,
    optimizers_in,
    order_groups,
    remove_group,
    remove_parameters,
    reset_optimizer_state,
    seed_group_name,
)
from esper_lightning.growth.probe import reasons_of_cache
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from esper_lightning.runtime.serialization import check_generator_state

RNG_SEED_MASK = 0x5EED
"""XOR mask for torch's RNG seed, so that seeds and a host built right after `manual_seed` draw different numbers."""


@dataclass
class SeedMeasurements:
    """Measurements of the seed in a slot. None: not measured."""

    contribution: float | None = None  # points of 100
    previous_contribution: float | None = None
    gradient: GradientStats | None = None


class RefusalReasons(NamedTuple):
    """Reasons why the seed in a slot cannot be blended, fossilized or culled now; an empty list means it can."""

    blending: list[str]
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
        generator: torch.Generator | None = None,
    ) -> None:
        check_optimizer(optimizer)
        self.module = module
        self.optimizer = optimizer
        self.horizon = horizon
        self.lifecycle = lifecycle
        self.seed_options = dict(seed_options or {})
        for name in self.seed_options:
            known = [key for key in host_groups(optimizer)[0] if key != "params"]
            if name not in known:
                raise ValueError(f"seed_options: the optimizer has no {name!r}; {suggest_name(name, known)}")
        self.slots: dict[str, SeedSlot] = slots_of(module)
        if not self.slots:
            raise ValueError("the network has no slots; give it some with attach_slots, or build SeedSlots in")
        for slot in self.slots.values():
            slot.isolation = lifecycle.isolation
        device = next(iter(self.slots.values())).alpha.device
        self.generator = generator or torch.Generator(device).manual_seed(torch.initial_seed() ^ RNG_SEED_MASK)
        self.measurements = {name: SeedMeasurements() for name in self.slots}
        self._in_lists: set[nn.Parameter] = set()  # parameters of lists that grow in depth
        self.sync_seed_groups()
        growing = weakref.ref(self)  # the optimizer must not hold the network, whose memory would be released late

        def sort_groups(optimizer: Optimizer, state: dict[str, Any]) -> None:
            """Sort parameter groups as a state that is about to be loaded has them, by name."""
            if (network := growing()) is not None and any(optimizer is own for own in optimizers_in(network.optimizer)):
                network.sync_seed_groups()  # the network may have been loaded before its optimizer
                order_groups(optimizer, [group.get("name", "") for group in state["param_groups"]])

        if not (hooked := hooked_optimizers(optimizer)):
            raise ValueError(
                f"{type(optimizer).__name__} runs no hooks; let its __init__ call that of torch.optim.Optimizer"
            )
        for part in hooked:
            part.register_load_state_dict_pre_hook(sort_groups)

    def sync_seed_groups(self) -> None:
        """Give each seed its own parameter group and drop the groups of seeds that are gone.

        Blocks of a list that grows are in the group of its first one, as if the network had been built with them. Call
        it after `module.load_state_dict` if no state is loaded into the optimizer, which would do the same.
        """
        growing = [slot for slot in self.slots.values() if slot.occupied and slot.is_judged]
        seeds = {seed_group_name(slot.name): slot.seed for slot in growing}
        for name in group_names(self.optimizer):
            is_of_seed = name.startswith(SEED_GROUP_PREFIX)
            if is_of_seed and not (name in seeds and has_group(self.optimizer, name, seeds[name])):
                remove_group(self.optimizer, name)
        for name, seed in seeds.items():
            if not has_group(self.optimizer, name, seed):
                add_group(self.optimizer, name, seed, **self.seed_options)
        self._sync_blocks()

    def _sync_blocks(self) -> None:
        """Put new blocks of lists that grow into the groups of their first block, and take removed ones out."""
        lists = [
            slot.block_list.blocks for slot in self.slots.values() if isinstance(slot, DepthSlot) and not slot.earlier
        ]
        in_lists = set(nn.ModuleList(chain.from_iterable(lists)).parameters())
        remove_parameters(self.optimizer, self._in_lists - in_lists)
        self._in_lists = in_lists
        held = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        for blocks in lists:
            origins = [blocks[0] if held.isdisjoint(block.parameters()) else block for block in blocks]
            join_groups(self.optimizer, origins, blocks)

    # Operations.

    def germinate(
        self,
        slot: str,
        blueprint: str,
        *,
        ticks: int = 5,
        curve: Curve = "linear",
        stage: Literal["GERMINATED", "BLENDING"] = "GERMINATED",
    ) -> SeedEvent:
        """Put a new seed in an empty slot; from BLENDING on, alpha rises over `ticks` host epochs.

        With stage BLENDING the seed is blended from the start: it has no time to learn alone, and no gate is asked.
        Copies of blocks, in a depth slot, are fossilized at once; they have the optimizer state of their sources.
        """
        if stage not in ("GERMINATED", "BLENDING"):
            raise ValueError(f"a seed cannot begin in {stage!r}; choose GERMINATED or BLENDING")
        seed_slot = self._slot(slot)
        if reasons := reasons_of_cache(self.module, seed_slot, blueprint):
            raise ValueError(f"blueprint {blueprint!r} cannot grow in slot {slot!r}: {'; '.join(reasons)}")
        event = lifecycle_ops.germinate(
            seed_slot,
            blueprint,
            Ramp(ticks, curve),
            generator=self.generator,
            birth=self.lifecycle.birth,
            optimizers=[self.optimizer],
        )
        try:
            self.sync_seed_groups()
        except (TypeError, ValueError):  # an option that the optimizer does not accept
            seed_slot.empty()
            raise
        self.measurements[slot] = SeedMeasurements()
        if stage == "BLENDING" and seed_slot.live:
            for next_stage in (Stage.TRAINING, Stage.BLENDING):
                seed_slot.move_to(next_stage)
            event = event._replace(after=Stage.BLENDING)
        return event

    def fossilize(self, slot: str) -> SeedEvent:
        """Make a probationary seed a permanent part of the network."""
        self._check_allowed("fossilized", slot, self.reasons_against_fossilizing(slot))
        event = lifecycle_ops.move(self.slots[slot], Stage.FOSSILIZED, "fossilize")
        return event._replace(contribution=self.measurements[slot].contribution)

    def cull(self, slot: str) -> SeedEvent:
        """Remove a live seed; the slot then stays closed for the embargo."""
        self._check_allowed("culled", slot, self.reasons_against_culling(slot))
        return self._cull(slot, "cull")

    def cull_live_seeds(self, cause: str) -> list[SeedEvent]:
        """Remove every live seed (not fossilized) at once, without asking the gates."""
        return [self._cull(name, cause) for name, slot in self.slots.items() if slot.live]

    def _cull(self, slot: str, cause: str) -> SeedEvent:
        seed, contribution = self.slots[slot].seed, self.measurements[slot].contribution
        event = lifecycle_ops.cull(self.slots[slot], cause)
        self._drop_seed(slot, seed)
        return event._replace(contribution=contribution)

    def remove_seed(self, slot: str) -> None:
        """Remove the seed in `slot`, even a fossilized one, without gates or embargo; the slot is open at once.

        With the blocks of a depth slot those of all later slots of the list are removed.
        """
        seed_slot = self._slot(slot)
        later = [other for other in self.slots.values() if isinstance(other, DepthSlot) and seed_slot in other.earlier]
        for emptied in (seed_slot, *later):
            if emptied.occupied:
                self._drop_seed(emptied.name, emptied.seed)
            emptied.empty()
        if isinstance(seed_slot, DepthSlot):
            self._sync_blocks()

    def clear(self) -> None:
        """Remove every seed and reset the optimizer's momenta and step counts."""
        for name in self.slots:
            self.remove_seed(name)
        reset_optimizer_state(self.optimizer)

    def end_epoch(
        self,
        contributions: Mapping[str, float] | None = None,
        gradients: Mapping[str, GradientStats] | None = None,
        *,
        hold: bool = False,
    ) -> list[SeedEvent]:
        """End a host epoch: store its measurements, move alpha and apply the automatic changes of stage.

        Args:
            contributions: Contributions of blended seeds by slot, in points (of 100); see the function
                `contributions`.
            gradients: Gradient statistics of each seed by slot. None: computed now from the gradients of the last
                backward pass, so call this before `zero_grad`.
            hold: Advance no seed in this call.
        """
        contributions = contributions or {}
        gradients = self.measure_gradients() if gradients is None else gradients
        check_slot_names([*{*contributions, *gradients}], self.slots)
        events = []
        for name, slot in self.slots.items():
            measured = self.measurements[name]
            if slot.occupied:
                measured.gradient = gradients.get(name)
            if slot.blended and name in contributions:
                measured.previous_contribution, measured.contribution = measured.contribution, contributions[name]
            slot.end_epoch()
            seed, evidence = slot.seed, self.evidence(name)
            changes = lifecycle_ops.auto_transition(slot, evidence, self.lifecycle, horizon=self.horizon, hold=hold)
            if any(event.after is Stage.CULLED for event in changes):
                self._drop_seed(name, seed)
            events += [event._replace(contribution=evidence.contribution) for event in changes]
        return events

    # Reasons of the gates.

    def evidence(self, slot: str) -> Evidence:
        """Return the measurements by which the gates judge the seed in `slot`."""
        seed_slot, measured = self._slot(slot), self.measurements[slot]
        return Evidence(
            age=seed_slot.age,
            ticks_in_stage=seed_slot.ticks_in_stage,
            # Only a germinated seed may still wait for its group; to compare groups takes time at every tick.
            in_optimizer=seed_slot.stage is not Stage.GERMINATED
            or has_group(self.optimizer, seed_group_name(slot), seed_slot.seed),
            alpha=seed_slot.alpha_before,
            gradient=measured.gradient,
            contribution=measured.contribution,
        )

    def reasons_against_fossilizing(self, slot: str) -> list[str]:
        """Return the reasons why `fossilize` is not possible now; empty if it is."""
        return self.refusal_reasons(slot).fossilizing

    def reasons_against_culling(self, slot: str) -> list[str]:
        """Return the reasons why `cull` is not possible now; empty if it is."""
        return self.refusal_reasons(slot).culling

    def refusal_reasons(self, slot: str) -> RefusalReasons:
        """Return why the seed in `slot` is not blended yet, and cannot be fossilized or culled now."""
        evidence, seed_slot = self.evidence(slot), self._slot(slot)
        stage = seed_slot.stage
        blending, fossilizing = [f"{stage.name} is not TRAINING"], [f"{stage.name} is not PROBATIONARY"]
        culling = [f"no live seed in {stage.name}"]
        if stage is Stage.TRAINING:
            blending = gates.reasons_against_blending(evidence, self.lifecycle)
        if stage is Stage.PROBATIONARY:
            fossilizing = gates.reasons_against_fossilizing(evidence, self.lifecycle)
        if seed_slot.live:
            culling = gates.reasons_against_culling(evidence, self.lifecycle)
        return RefusalReasons(blending, fossilizing, culling)

    # Measurements.

    def gradient_stats_tensor(self) -> Tensor:  # [1 + K, 4] on the device: GradientStats of the host, then of each slot
        """Return statistics of the present gradients without waiting for the device; NO_GRADIENT for an empty slot."""
        by_slot = [list(slot.seed.parameters()) for slot in self.slots.values()]
        seed_parameter_ids = set(map(id, chain.from_iterable(by_slot)))
        host = gradient_stats([p for p in self.module.parameters() if id(p) not in seed_parameter_ids])
        empty = torch.zeros_like(host)  # NO_GRADIENT
        seeds = [gradient_stats(parameters, host.device).to(host) if parameters else empty for parameters in by_slot]
        return torch.stack([host, *seeds])

    def measure_gradients(self) -> dict[str, GradientStats]:
        """Return statistics of the present gradients by slot, for seeds with a gradient; needs one device transfer."""
        _, *rows = self.gradient_stats_tensor().tolist()
        return {
            name: GradientStats(*row)
            for (name, slot), row in zip(self.slots.items(), rows, strict=True)
            if any(parameter.grad is not None for parameter in slot.seed.parameters())
        }

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return the full state of growth, including the network, in types that `weights_only=True` loads."""
        return {
            "network": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **self.measurement_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state: the same seeds in the same slots. As in torch, the optimizer takes over its tensors."""
        self.module.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.load_measurement_state(state)

    def measurement_state(self) -> dict[str, Any]:
        """Return the measurements of all seeds and the generator's state: what network and optimizer do not hold."""
        return {
            "records": [
                [seed.contribution, seed.previous_contribution, list(seed.gradient) if seed.gradient else None]
                for seed in self.measurements.values()
            ],
            "generator": self.generator.get_state(),
        }

    def load_measurement_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `measurement_state`, when network and optimizer are restored."""
        for name, record in zip(self.slots, state["records"], strict=True):
            contribution, previous, gradient = record
            gradient = None if gradient is None else GradientStats(*gradient)
            self.measurements[name] = SeedMeasurements(contribution, previous, gradient)
        self.generator.set_state(check_generator_state(state["generator"], self.generator))

    def _slot(self, name: str) -> SeedSlot:
        if name not in self.slots:
            check_slot_names([name], self.slots)  # raises ValueError with a suggestion
        return self.slots[name]

    def _check_allowed(self, change: str, slot: str, reasons: list[str]) -> None:
        if reasons:
            raise ValueError(f"slot {slot!r} cannot be {change}: {'; '.join(reasons)}")

    def _drop_seed(self, slot: str, seed: nn.Module) -> None:
        remove_group(self.optimizer, seed_group_name(slot), seed.parameters())
        self.measurements[slot] = SeedMeasurements()
