"""Context of a host during an episode: data variant, training settings, prices and failing seeds."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from esper_lightning.envs.context.distribution import Context, seed_fails
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.rewards import ObjectiveConfig, Prices
from esper_lightning.tasks import Batches, draw_augment_params


@dataclass(frozen=True)
class HostContext:
    """Settings of all hosts in one context, and the draws that depend on the RNG seed of an episode."""

    context: Context
    _: KW_ONLY
    training: HostTraining
    """Training settings of the hosts."""
    variant_index: int
    """Index of the hosts' data among the data variants of the pool."""
    num_classes: int
    """Number of classes."""
    horizon: int
    """Length of an episode in environment steps."""

    @property
    def chance_loss(self) -> float:
        """Loss of uniform guessing, ln(classes)."""
        return math.log(self.num_classes)

    def prices(self, objective: ObjectiveConfig, rng_seed: int) -> Prices:
        """Return the prices of growth in the episode with this RNG seed."""
        prices, own_price = objective.prices(rng_seed), self.context.price
        return prices if own_price is None else prices._replace(parameters=own_price)

    def failing_slots(self, slots: Sequence[SeedSlot], rng_seed: int) -> list[SeedSlot]:
        """Return the slots whose seed fails, that is, receives no gradient, in the episode with this RNG seed."""
        if not self.context.seeds_may_fail:
            return []
        probability = self.context.failure_probability
        return [
            slot
            for slot in slots
            if slot.occupied
            and slot.blueprint is not None
            and seed_fails(rng_seed, slot.name, slot.blueprint, probability=probability(slot.blueprint))
        ]

    def draw_batches(
        self, training: HostTraining, samples: int, rng_seed: int, *, generator: torch.Generator
    ) -> Batches:  # [batches, B], on the generator's device
        """Draw the minibatches of one epoch: shuffled passes over the host's training data, as many as needed.

        Args:
            training: Batch size, number of batches and data augmentation.
            samples: Number of samples of each data variant. A context with fewer samples uses a fixed subset of them.
            rng_seed: RNG seed of the episode, which determines the subset.
            generator: Generator of the order.
        """
        size = training.batch_size
        needed = size * training.steps_per_epoch(samples)
        num_own = min(samples, self.context.variant.samples or samples)
        passes = math.ceil(needed / num_own)
        device = generator.device
        orders = [torch.randperm(num_own, generator=generator, device=device) for _ in range(passes)]
        indices = torch.cat(orders)[:needed].view(-1, size)
        if num_own < samples:
            # A separate generator, so that every epoch uses the same subset.
            subset_generator = torch.Generator(device).manual_seed(rng_seed)
            indices = torch.randperm(samples, generator=subset_generator, device=device)[indices]
        if self.variant_index:
            indices = indices + self.variant_index * samples
        return Batches(indices, draw_augment_params(training.augment, indices.shape, generator))
