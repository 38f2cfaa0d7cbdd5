"""Counterfactual outputs of a network with some seeds switched off, for many combinations in one forward pass.

Combinations share the rows of the batch up to the first slot where they differ. There the batch is split in two, and
later layers work on a longer batch. Combinations that differ in no blended seed share all rows.
If a shortcut bypasses a slot (`SeedSlot.on_single_path` is False), the batch is split for it at the network's input.
Every layer must treat the rows of a batch independently, so the network must be in evaluation mode.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from esper_lightning.growth.nested import map_tensors
from esper_lightning.growth.network import slots_of
from esper_lightning.growth.running import batch_size, evaluating, repeat_rows
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage

Variant = frozenset[str]
"""Names of the slots whose seed is active."""

Batch = tuple[Tensor | tuple[Tensor, ...], Tensor]
"""Inputs (one tensor, or several in a tuple) and targets."""

Score = Callable[[Any, Tensor], Tensor]
"""Function of outputs [B, …] and targets [B, …] that returns one score per sample, [B]."""


def leave_one_out(slots: Iterable[str]) -> list[Variant]:
    """Return K + 1 combinations: all seeds, then all seeds except each one in turn."""
    everything = frozenset(slots)
    return [everything, *(everything - {slot} for slot in slots)]


def committed_only(network: nn.Module) -> Variant:
    """Return the combination of the fossilized seeds: what remains if no other seed is fossilized."""
    return frozenset(name for name, slot in slots_of(network).items() if slot.stage is Stage.FOSSILIZED)


def full_family(slots: Sequence[str]) -> list[Variant]:
    """Return all 2^k combinations of k slots, from none to all."""
    return [frozenset(chosen) for k in range(len(slots) + 1) for chosen in combinations(slots, k)]


class _Split:
    """State of one forward pass: the batch consists of equal parts, each for a list of combinations."""

    def __init__(
        self, variants: Sequence[Variant], slots: Iterable[SeedSlot], watch: Callable[[int], None] | None
    ) -> None:
        self.variants = variants
        self.watch = watch
        self.parts: list[list[int]] = [list(range(len(variants)))]
        for slot in slots:
            if slot.blended and not slot.trunk:
                on, off = self._sides(slot)
                self.parts = [members for members in on + off if members]

    def _sides(self, slot: SeedSlot) -> tuple[list[list[int]], list[list[int]]]:
        on = [[v for v in part if slot.name in self.variants[v]] for part in self.parts]
        off = [[v for v in part if slot.name not in self.variants[v]] for part in self.parts]
        return on, off

    def __call__(self, slot: SeedSlot, x: Tensor) -> Tensor:
        if not slot.blended:
            return x
        on, off = self._sides(slot)
        if not any(off):
            return slot.express(x)
        if not any(on):
            return x
        chunks = x.chunk(len(self.parts))
        if all(not (a and b) for a, b in zip(on, off, strict=True)):
            # The batch is split already, at the input or by an earlier pass through this slot.
            return torch.cat([slot.express(c) if members else c for c, members in zip(chunks, on, strict=True)])
        with_seed = [slot.express(chunk) for chunk, members in zip(chunks, on, strict=True) if members]
        without = [chunk for chunk, members in zip(chunks, off, strict=True) if members]
        self.parts = [members for members in on + off if members]
        if self.watch is not None:
            self.watch(len(self.parts))
        return torch.cat(with_seed + without)


def forward_variants(
    network: nn.Module, variants: Sequence[Variant], *inputs: Tensor, watch: Callable[[int], None] | None = None
) -> tuple[Any, list[int]]:
    """Run `network` on `inputs` once per distinct combination of active seeds.

    The first input is [B, …]. An input whose first axis is not B (a mask, say) is shared by all combinations.

    Args:
        network: Network with slots, in evaluation mode.
        variants: Names of the slots with an active seed, for each combination. Seeds that are not blended are never
            active.
        inputs: Positional arguments of the network.
        on_split: Called with the current batch length as a multiple of B: at the beginning, and after every slot that
            makes the batch longer.

    Returns:
        Outputs [G·B, …] of the G distinct combinations, one after the other, and for each variant its index in 0 … G-1.
    """
    slots = slots_of(network).values()
    split = _Split(variants, slots, watch)
    if watch is not None:
        watch(len(split.parts))
    if len(split.parts) > 1:
        inputs = repeat_rows(inputs, batch_size(inputs), len(split.parts))
    for slot in slots:
        slot.branch = split
    try:
        outputs = network(*inputs)
    finally:
        for slot in slots:
            slot.branch = None
    place = {v: part for part, members in enumerate(split.parts) for v in members}
    return outputs, [place[v] for v in range(len(variants))]


@torch.no_grad()
def measure_variants(
    network: nn.Module, variants: Sequence[Variant], batches: Iterable[Batch], score: Score
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
    with evaluating(network):
        for inputs, targets in batches:
            given = inputs if isinstance(inputs, tuple) else (inputs,)
            outputs, places = forward_variants(network, variants, *given)
            sums = torch.stack([_sum(score, part, targets) for part in _groups(outputs, max(places) + 1)])[places]
            totals = sums if totals is None else totals + sums
            samples += len(targets)
    if totals is None:
        raise ValueError("there are no batches to measure on; an iterator may be used up")
    return totals / samples


def _groups(outputs: Any, groups: int) -> list[Any]:
    """Split the outputs into those of each distinct combination."""
    return [map_tensors(outputs, lambda x, group=group: x.chunk(groups)[group]) for group in range(groups)]


def _sum(score: Score, outputs: Any, targets: Tensor) -> Tensor:
    scores = score(outputs, targets)
    if scores.shape != (len(targets),):
        raise ValueError(f"a score is a number per sample, [{len(targets)}], and no mean; got {list(scores.shape)}")
    return scores.sum()


def contributions(network: nn.Module, batches: Iterable[Batch], score: Score) -> dict[str, float]:
    """Return the contribution of each blended seed by slot: 100·(score with all seeds - score without this seed).

    If the score is 1.0 for a correct prediction, contributions are accuracy points. Arguments: see `measure_variants`.
    """
    blended = [name for name, slot in slots_of(network).items() if slot.blended]
    if not blended:
        return {}
    whole, *without = measure_variants(network, leave_one_out(blended), batches, score).tolist()
    return {name: 100.0 * (whole - rest) for name, rest in zip(blended, without, strict=True)}
