"""Context of a host during an episode: data variant, training settings, prices and failing seeds."""

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
    """Settings of all hosts in one context, and the draws that depend on the RNG seed of an episode."""

    member: Member
    training: HostTraining
    """Training settings of the hosts."""
    variant: int
    """Index of the hosts' data among the data variants of the pool."""
    classes: int
    """Number of classes."""

    @property
    def chance(self) -> float:
        """Loss of uniform guessing, ln(classes)."""
        return math.log(self.classes)

    def prices(self, objective: ObjectiveConfig, seed: int) -> Prices:
        """Return the prices of growth in the episode with this RNG seed."""
        prices, own = objective.prices(seed), self.member.price
        return prices if own is None else prices._replace(parameters=own)

    def failing(self, slots: Sequence[SeedSlot], seed: int) -> list[SeedSlot]:
        """Return the slots whose seed fails, that is, receives no gradient, in the episode with this RNG seed."""
        if not self.member.may_fail:
            return []
        chance = self.member.chance_to_fail
        return [
            slot for slot in slots if slot.occupied and fails(seed, slot.name, slot.blueprint, chance(slot.blueprint))
        ]

    def draw_batches(
        self, training: HostTraining, samples: int, seed: int, generator: torch.Generator
    ) -> Batches:  # [batches, B], on the generator's device
        """Draw the minibatches of one epoch: shuffled passes over the host's training data, as many as needed.

        Args:
            training: Batch size, number of batches and data augmentation.
            samples: Number of samples of each data variant. A context with fewer samples uses a fixed subset of them.
            seed: RNG seed of the episode, which determines the subset.
            generator: Generator of the order.
        """
        size = training.batch_size
        needed = size * training.steps(samples)
        own = min(samples, self.member.variant.samples or samples)
        passes = math.ceil(needed / own)
        device = generator.device
        orders = [torch.randperm(own, generator=generator, device=device) for _ in range(passes)]
        indices = torch.cat(orders)[:needed].view(-1, size)
        if own < samples:
            chosen = torch.Generator(device).manual_seed(seed)  # a separate generator: the same subset in every epoch
            indices = torch.randperm(samples, generator=chosen, device=device)[indices]
        if self.variant:
            indices = indices + self.variant * samples
        return Batches(indices, draw_choices(training.augment, indices.shape, generator))
