"""Counterfactual outputs of a network with some seeds switched off, for many combinations in one forward pass.

A seed that learns without an effect on the host's output is active, at full alpha, in the combinations that name it.

Combinations share the rows of the batch up to the first slot where they differ. There the batch is split in two, and
later layers work on a longer batch. Combinations that differ in no seed share all rows.
If a shortcut bypasses a slot (`SeedSlot.on_single_path` is False), the batch is split for it at the network's input.
Every layer must treat the rows of a batch independently, so the network must be in evaluation mode.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.nested import batch_size, evaluation_mode, map_tensors, repeat_rows
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage

SeedVariant = frozenset[str]
"""Names of the slots whose seed is active."""

Batch = tuple[Tensor | tuple[Tensor, ...], Tensor]
"""Inputs (one tensor, or several in a tuple) and targets."""

ScoreFunction = Callable[[Any, Tensor], Tensor]
"""Function of outputs [B, …] and targets [B, …] that returns one score per sample, [B]."""


def leave_one_out(slots: Iterable[str]) -> list[SeedVariant]:
    """Return K + 1 combinations: the seeds in all `slots`, then all except each one in turn."""
    all_slots = frozenset(slots)
    return [all_slots, *(all_slots - {slot} for slot in slots)]


def fossilized_only(network: nn.Module) -> SeedVariant:
    """Return the combination of the fossilized seeds: what remains if no other seed is fossilized."""
    return frozenset(name for name, slot in slots_of(network).items() if slot.stage is Stage.FOSSILIZED)


def all_variants(slots: Sequence[str]) -> list[SeedVariant]:
    """Return all 2^k combinations of k slots, from none to all."""
    return [frozenset(chosen) for k in range(len(slots) + 1) for chosen in combinations(slots, k)]


class _BatchSplit:
    """State of one forward pass: the batch consists of equal parts, each for a list of combinations."""

    def __init__(
        self, variants: Sequence[SeedVariant], slots: Iterable[SeedSlot], on_split: Callable[[int], None] | None
    ) -> None:
        self.variants = variants
        self.on_split = on_split
        self.parts: list[list[int]] = [list(range(len(variants)))]
        for slot in slots:
            if slot.occupied and not slot.on_single_path:
                active, inactive = self._split_parts(slot)
                self.parts = [variant_ids for variant_ids in active + inactive if variant_ids]

    def _split_parts(self, slot: SeedSlot) -> tuple[list[list[int]], list[list[int]]]:
        active = [[v for v in part if slot.name in self.variants[v]] for part in self.parts]
        inactive = [[v for v in part if slot.name not in self.variants[v]] for part in self.parts]
        return active, inactive

    def __call__(self, slot: SeedSlot, x: Tensor) -> Tensor:
        if not slot.occupied:
            return x
        active, inactive = self._split_parts(slot)
        if not any(inactive):
            return slot.active_output(x)
        if not any(active):
            return x
        chunks = x.chunk(len(self.parts))
        if all(not (a and b) for a, b in zip(active, inactive, strict=True)):
            # The batch is split already, at the input or by an earlier pass through this slot.
            return torch.cat(
                [slot.active_output(c) if variant_ids else c for c, variant_ids in zip(chunks, active, strict=True)]
            )
        with_seed = [
            slot.active_output(chunk) for chunk, variant_ids in zip(chunks, active, strict=True) if variant_ids
        ]
        without = [chunk for chunk, variant_ids in zip(chunks, inactive, strict=True) if variant_ids]
        self.parts = [variant_ids for variant_ids in active + inactive if variant_ids]
        if self.on_split is not None:
            self.on_split(len(self.parts))
        return torch.cat(with_seed + without)


def forward_variants(
    network: nn.Module, variants: Sequence[SeedVariant], *inputs: Tensor, on_split: Callable[[int], None] | None = None
) -> tuple[Any, list[int]]:
    """Run `network` on `inputs` once per distinct combination of active seeds.

    The first input is [B, …]. An input whose first axis is not B (a mask, say) is shared by all combinations.

    Args:
        network: Network with slots, in evaluation mode.
        variants: Names of the slots with an active seed, for each combination. A seed that is not blended yet is active
            at full alpha.
        inputs: Positional arguments of the network.
        on_split: Called with the current batch length as a multiple of B: at the beginning, and after every slot that
            makes the batch longer.

    Returns:
        Outputs [G·B, …] of the G distinct combinations, one after the other, and for each variant its index in 0 … G-1.
    """
    slots = slots_of(network).values()
    split = _BatchSplit(variants, slots, on_split)
    if on_split is not None:
        on_split(len(split.parts))
    if len(split.parts) > 1:
        inputs = repeat_rows(inputs, batch_size(inputs), len(split.parts))
    for slot in slots:
        slot.override = split
    try:
        outputs = network(*inputs)
    finally:
        for slot in slots:
            slot.override = None
    part_of_variant = {v: part for part, variant_ids in enumerate(split.parts) for v in variant_ids}
    return outputs, [part_of_variant[v] for v in range(len(variants))]


@torch.no_grad()
def measure_variants(
    network: nn.Module, variants: Sequence[SeedVariant], batches: Iterable[Batch], *, score: ScoreFunction
) -> Tensor:  # [V]
    """Return the mean score of every combination on the same data, in evaluation mode; restores the network's mode.

    Args:
        network: Network with slots.
        variants: See `forward_variants`.
        batches: Pairs of inputs [B, …] (a tuple if the network takes several) and targets [B, …].
        score: Function of outputs [B, …] and targets that returns one score per sample [B], for example 1.0 for a
            correct prediction.
    """
    totals, samples = None, 0
    with evaluation_mode(network):
        for inputs, targets in batches:
            network_inputs = inputs if isinstance(inputs, tuple) else (inputs,)
            outputs, variant_parts = forward_variants(network, variants, *network_inputs)
            score_sums = torch.stack(
                [_sum_scores(score, part, targets) for part in _split_outputs(outputs, max(variant_parts) + 1)]
            )[variant_parts]
            totals = score_sums if totals is None else totals + score_sums
            samples += len(targets)
    if totals is None:
        raise ValueError("there are no batches to measure on; an iterator may be used up")
    return totals / samples


def _split_outputs(outputs: Any, num_groups: int) -> list[Any]:
    """Split the outputs into those of each distinct combination."""
    return [map_tensors(outputs, lambda x, group=group: x.chunk(num_groups)[group]) for group in range(num_groups)]


def _sum_scores(score: ScoreFunction, outputs: Any, targets: Tensor) -> Tensor:
    scores = score(outputs, targets)
    if scores.shape != (len(targets),):
        raise ValueError(f"a score is a number per sample, [{len(targets)}], and no mean; got {list(scores.shape)}")
    return scores.sum()


def contributions(network: nn.Module, batches: Iterable[Batch], score: ScoreFunction) -> dict[str, float]:
    """Return the contribution of each blended seed by slot: 100·(score with all seeds - score without this seed).

    If the score is 1.0 for a correct prediction, contributions are accuracy points. Arguments: see `measure_variants`.
    """
    blended = [name for name, slot in slots_of(network).items() if slot.blended]
    if not blended:
        return {}
    score_with_all, *scores_without = measure_variants(network, leave_one_out(blended), batches, score=score).tolist()
    return {
        name: 100.0 * (score_with_all - score_without)
        for name, score_without in zip(blended, scores_without, strict=True)
    }


def potentials(network: nn.Module, batches: Iterable[Batch], score: ScoreFunction) -> dict[str, float]:
    """Return the potential of each seed that is not blended yet by slot: what its contribution would be at full alpha.

    It is 100·(score with this seed and all blended ones - score with all blended ones). Arguments: see
    `measure_variants`.
    """
    slots = slots_of(network)
    blended = frozenset(name for name, slot in slots.items() if slot.blended)
    isolated = [name for name, slot in slots.items() if slot.isolated]
    if not isolated:
        return {}
    variants = [blended, *(blended | {name} for name in isolated)]
    score_without, *scores = measure_variants(network, variants, batches, score=score).tolist()
    return {name: 100.0 * (score - score_without) for name, score in zip(isolated, scores, strict=True)}
