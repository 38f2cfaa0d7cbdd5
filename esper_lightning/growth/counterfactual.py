"""What would the network have said without this seed? Many on/off combinations of seeds in one forward pass.

Rows of the batch are shared up to the first slot where two combinations differ: there the batch splits in two, and what
follows works on a longer batch. A combination that differs from another in no blended seed costs nothing.
Where a shortcut leads around a slot (`SeedSlot.trunk` is False) the batch is split for it at the network's input.
Every layer must treat the rows of a batch independently: call it on a network in evaluation mode.
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
"""The slots whose seed takes part."""

Batch = tuple[Tensor | tuple[Tensor, ...], Tensor]
"""Inputs and targets."""

Score = Callable[[Any, Tensor], Tensor]
"""Outputs and targets -> a number per sample."""


def leave_one_out(slots: Iterable[str]) -> list[Variant]:
    """All seeds, then all but each in turn: K + 1 combinations."""
    everything = frozenset(slots)
    return [everything, *(everything - {slot} for slot in slots)]


def committed_only(network: nn.Module) -> Variant:
    """The fossilized seeds alone: what remains of the network if nothing else is kept."""
    return frozenset(name for name, slot in slots_of(network).items() if slot.stage is Stage.FOSSILIZED)


def full_family(slots: Sequence[str]) -> list[Variant]:
    """Every combination of k slots, from none to all: 2^k."""
    return [frozenset(chosen) for k in range(len(slots) + 1) for chosen in combinations(slots, k)]


class _Split:
    """The state of one pass: which combinations each equal part of the batch stands for."""

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
            # Split already, at the input or when the data came through here before: the parts stay where they are.
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
    """Runs `network` on `inputs` once per distinct combination of active seeds.

    The first input is [B, …]; another one with another first axis (a mask, say) serves all combinations as it is.

    Args:
        variants: For each combination, the names of the slots whose seed takes part. Seeds that are not blended never
            take part.
        watch: Told how many times as long the batch is from now on: at the beginning, and behind every slot that makes
            it longer.

    Returns:
        Outputs [G·B, …] of the G distinct combinations, one after the other, and for each variant its place in 0 … G-1.
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
    """Mean score of every combination over the same data, in evaluation mode; the network's own mode is restored.

    Args:
        variants: See `forward_variants`.
        batches: Pairs of inputs [B, …] (a tuple where the network takes several) and targets [B, …].
        score: Outputs [B, …] and targets -> a number per sample [B]: 1.0 where the answer is right, say.
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
    """The outputs of each distinct combination."""
    return [map_tensors(outputs, lambda x, group=group: x.chunk(groups)[group]) for group in range(groups)]


def _sum(score: Score, outputs: Any, targets: Tensor) -> Tensor:
    scores = score(outputs, targets)
    if scores.shape != (len(targets),):
        raise ValueError(f"a score is a number per sample, [{len(targets)}], and no mean; got {list(scores.shape)}")
    return scores.sum()


def contributions(network: nn.Module, batches: Iterable[Batch], score: Score) -> dict[str, float]:
    """What each blended seed contributes, by slot: 100·(score with all seeds - score without this one).

    With the share of right answers as the score these are accuracy points. Arguments: see `measure_variants`.
    """
    blended = [name for name, slot in slots_of(network).items() if slot.blended]
    if not blended:
        return {}
    whole, *without = measure_variants(network, leave_one_out(blended), batches, score).tolist()
    return {name: 100.0 * (whole - rest) for name, rest in zip(blended, without, strict=True)}
