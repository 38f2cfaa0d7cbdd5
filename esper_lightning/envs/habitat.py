"""A habitat: what a host lives in during an episode, by the facts of its family's member."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from esper_lightning.envs.family import Member, fails
from esper_lightning.envs.training import HostTraining
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.rewards import ObjectiveConfig, Prices
from esper_lightning.tasks import Batches, draw_choices


@dataclass(frozen=True)
class Habitat:
    """What all hosts of a member have in common, and how what they do not have in common is drawn from their seed."""

    member: Member
    training: HostTraining
    """How they learn."""
    variant: int
    """Number of their data among the variants of the family."""
    classes: int
    """That they learn to tell apart."""

    @property
    def chance(self) -> float:
        """Loss of guessing."""
        return math.log(self.classes)

    def prices(self, objective: ObjectiveConfig, seed: int) -> Prices:
        """What growth costs in the episode that begins with `seed`."""
        prices, own = objective.prices(seed), self.member.price
        return prices if own is None else prices._replace(parameters=own)

    def failing(self, slots: Sequence[SeedSlot], seed: int) -> list[SeedSlot]:
        """Slots whose seed gets no gradient: a graft that fails."""
        if not self.member.may_fail:
            return []
        chance = self.member.chance_to_fail
        return [
            slot for slot in slots if slot.occupied and fails(seed, slot.name, slot.blueprint, chance(slot.blueprint))
        ]

    def draw_batches(
        self, training: HostTraining, samples: int, seed: int, generator: torch.Generator
    ) -> Batches:  # [batches, B], on the generator's device
        """Minibatches of a tick: the host's training data in a new order, again and again if need be.

        Args:
            training: How many, and how images are varied.
            samples: Of each variant of the data; a host of few samples has its own, drawn from these.
            seed: Of the episode.
            generator: Draws the order.
        """
        size = training.batch_size
        needed = size * training.steps(samples)
        own = min(samples, self.member.variant.samples or samples)
        passes = math.ceil(needed / own)
        device = generator.device
        orders = [torch.randperm(own, generator=generator, device=device) for _ in range(passes)]
        indices = torch.cat(orders)[:needed].view(-1, size)
        if own < samples:
            chosen = torch.Generator(device).manual_seed(seed)  # another one: the same samples in every tick
            indices = torch.randperm(samples, generator=chosen, device=device)[indices]
        if self.variant:
            indices = indices + self.variant * samples
        return Batches(indices, draw_choices(training.augment, indices.shape, generator))
