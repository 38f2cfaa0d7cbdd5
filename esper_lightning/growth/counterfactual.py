"""Counterfactual outputs of a network with some seeds switched off, and what the seeds are worth.

Many combinations of seeds take one forward pass: they share the rows of the batch up to the first slot where they
differ, or up to the input if a shortcut bypasses it. There the batch is split in two. If rows of a batch see each other
(see `mixes_rows`), each combination takes a pass of its own. A seed that is not blended yet has no effect.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.slot import SeedSlot, SlotHook
from esper_lightning.growth.stages import Stage
from esper_lightning.runtime.nested import (
    BATCH_LENGTH_ERRORS,
    batch_size,
    evaluation_mode,
    is_equal_up_to_rounding,
    iter_tensors,
    map_tensors,
    preserved_buffers,
    repeat_rows,
)

SeedVariant = frozenset[str]  # names of the slots whose seed is active
Batch = tuple[Tensor | tuple[Tensor, ...], Tensor]  # inputs (one tensor, or several in a tuple) and targets

ScoreFunction = Callable[[Any, Tensor], Tensor]
"""Function of outputs [B, …] and targets [B, …] that returns one score per sample, [B]."""

TRIED_ROWS = 8  # most rows of a batch on which `mixes_rows` tries a network
COPIES_AHEAD = 4  # copies of the first row that go ahead of them, for each row: they fill places for which rows compete


def leave_one_out(slots: Iterable[str]) -> list[SeedVariant]:
    """Return K + 1 combinations: the seeds in all `slots`, then all except each one in turn."""
    all_slots = frozenset(slots)
    return [all_slots, *(all_slots - {slot} for slot in slots)]


def judge_seeds(slots: Collection[SeedSlot]) -> tuple[list[str], list[SeedVariant]]:
    """Return the slots of the seeds that are judged by their absence, and the combinations that judge them: all seeds,
    then all except each one in turn."""
    blended = frozenset(slot.name for slot in slots if slot.blended)
    judged = [slot.name for slot in slots if slot.blended and slot.is_judged]
    return judged, [blended, *(blended - {name} for name in judged)]


def fossilized_only(network: nn.Module) -> SeedVariant:
    """Return the combination of the fossilized seeds: what remains if no other seed is fossilized."""
    return frozenset(name for name, slot in slots_of(network).items() if slot.stage is Stage.FOSSILIZED)


def all_variants(slots: Sequence[str]) -> list[SeedVariant]:
    """Return all 2^k combinations of k slots, from none to all."""
    return [frozenset(chosen) for k in range(len(slots) + 1) for chosen in combinations(slots, k)]


@contextmanager
def active_seeds(slots: Mapping[str, SeedSlot], variant: SeedVariant) -> Iterator[None]:
    """Within this context the seeds named by `variant` are active, and all others switched off."""
    for name, slot in slots.items():
        if slot.occupied:
            slot.override = SeedSlot.blend_output if name in variant else (lambda slot, x: x)
    try:
        yield
    finally:
        for slot in slots.values():
            slot.override = None


class _BatchSplit:
    """Replacement of the slots' forward pass in one pass for all variants, with a chunk of the batch for each group.

    Variants of a group agree on all seeds so far. The first slot on which they differ splits their chunk in two.
    """

    def __init__(self, variants: Sequence[SeedVariant], slots: Iterable[SeedSlot]) -> None:
        self.variants = variants
        self.groups: list[list[int]] = [list(range(len(variants)))]  # indices of the variants of each chunk
        for slot in slots:
            if slot.blended and not slot.on_single_path:
                with_seed, without_seed = self._divide(slot)
                self.groups = [group for group in with_seed + without_seed if group]

    def _divide(self, slot: SeedSlot) -> tuple[list[list[int]], list[list[int]]]:
        """Return the variants of each group that have the seed in `slot`, and those that do not; either may be none."""
        with_seed, without_seed = [], []
        for group in self.groups:
            with_seed.append([v for v in group if slot.name in self.variants[v]])
            without_seed.append([v for v in group if slot.name not in self.variants[v]])
        return with_seed, without_seed

    def __call__(self, slot: SeedSlot, x: Tensor) -> Tensor:
        """Return the output of a slot for all chunks of its input `x`; afterwards there may be more chunks."""
        if not slot.blended:
            return x
        with_seed, without_seed = self._divide(slot)
        if not any(without_seed):
            return slot.blend_output(x)
        if not any(with_seed):
            return x
        chunks = x.chunk(len(self.groups))
        if all(not (a and b) for a, b in zip(with_seed, without_seed, strict=True)):
            # The batch is split already, at the input or by an earlier pass through this slot.
            return torch.cat([slot.blend_output(c) if group else c for c, group in zip(chunks, with_seed, strict=True)])
        blended = [slot.blend_output(c) for c, group in zip(chunks, with_seed, strict=True) if group]
        unchanged = [c for c, group in zip(chunks, without_seed, strict=True) if group]
        self.groups = [group for group in with_seed + without_seed if group]
        return torch.cat(blended + unchanged)


@torch.no_grad()
def mixes_rows(network: nn.Module, inputs: tuple[Any, ...]) -> bool:
    """Return True if what a network returns for a row depends on other rows of the batch, or on random numbers.

    Tests: half of the batch by itself; and a few rows behind copies of the first or the last one, which change
    statistics of the batch and fill the places for which rows compete. The network's forward hooks, other than those of
    slots, do not run.
    """
    rows = batch_size(inputs)
    few = min(rows, TRIED_ROWS)
    ahead = COPIES_AHEAD * few

    def take(choose: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        """Return the inputs with other rows: `choose` is applied to each tensor that has the rows of the batch."""
        return map_tensors(inputs, lambda x: choose(x) if x.ndim and len(x) == rows else x)

    hooks = [(part, part._forward_hooks) for part in network.modules() if part._forward_hooks]
    try:
        for part, all_hooks in hooks:
            part._forward_hooks = OrderedDict(item for item in all_hooks.items() if isinstance(item[1], SlotHook))
        with torch.autocast(next(iter_tensors(inputs)).device.type, enabled=False):
            whole, half, plain, *behind = (
                _isolated_pass(network, batch)
                for batch in (
                    inputs,
                    take(lambda x: x[: (rows + 1) // 2]),
                    take(lambda x: x[:few]),
                    take(lambda x: torch.cat([x[:1]] * ahead + [x[:few]])),
                    take(lambda x: torch.cat([x[few - 1 : few]] * ahead + [x[:few]])),
                )
            )
    except BATCH_LENGTH_ERRORS:
        return True
    finally:
        for part, all_hooks in hooks:
            part._forward_hooks = all_hooks

    def has_rows(longer: Any, shorter: Any, span: slice, *, length: int) -> bool:
        """Return True if outputs of `length` rows equal, in the rows of `span`, the outputs of a shorter batch."""
        pairs = zip(iter_tensors(longer), iter_tensors(shorter), strict=True)
        return all(a.ndim and b.ndim and len(a) == length and is_equal_up_to_rounding(a[span], b) for a, b in pairs)

    return not has_rows(whole, half, slice((rows + 1) // 2), length=rows) or not all(
        has_rows(longer, plain, slice(ahead, None), length=ahead + few) for longer in behind
    )


def _isolated_pass(network: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Return the network's outputs; its buffers and the random numbers stay as they are."""
    devices = {x.device for x in iter_tensors(inputs) if x.device.type == "cuda"}
    with torch.random.fork_rng(list(devices)), preserved_buffers(network):
        return network(*inputs)


def forward_variants(
    network: nn.Module, variants: Sequence[SeedVariant], *inputs: Tensor, mixes: bool | None = None
) -> tuple[Any, list[int]]:
    """Run `network` on `inputs` once per distinct combination of active seeds.

    The first input is [B, …]. An input whose first axis is not B (a mask, say) is shared by all combinations.

    Args:
        network: Network with slots, in evaluation mode.
        variants: Names of the slots with an active seed, for each combination.
        inputs: Positional arguments of the network.
        mixes: Result of `mixes_rows`, to try it once for many batches. None: it is tried on these inputs.

    Returns:
        Outputs [G·B, …] of the G distinct combinations, one after the other, and for each variant its index in 0 … G-1.
    """
    slots = slots_of(network)
    blended = frozenset(name for name, slot in slots.items() if slot.blended)
    distinct: list[SeedVariant] = []
    for variant in variants:
        if variant & blended not in distinct:
            distinct.append(variant & blended)
    if len(distinct) > 1 and (mixes_rows(network, inputs) if mixes is None else mixes):
        outputs = []
        for variant in distinct:  # with the same random numbers
            with active_seeds(slots, variant):
                is_last = len(outputs) == len(distinct) - 1
                outputs.append(network(*inputs) if is_last else _isolated_pass(network, inputs))
        tensors_by_place = zip(*map(iter_tensors, outputs), strict=True)  # each with one tensor for each variant
        joined = (torch.cat([x if x.ndim else x[None] for x in tensors]) for tensors in tensors_by_place)
        return map_tensors(outputs[0], lambda _: next(joined)), [distinct.index(v & blended) for v in variants]
    split = _BatchSplit(variants, slots.values())
    if len(split.groups) > 1:
        inputs = repeat_rows(inputs, batch_size(inputs), len(split.groups))
    for slot in slots.values():
        slot.override = split
    try:
        outputs = network(*inputs)
    finally:
        for slot in slots.values():
            slot.override = None
    group_of_variant = {v: i for i, group in enumerate(split.groups) for v in group}
    return outputs, [group_of_variant[v] for v in range(len(variants))]


@torch.no_grad()
def measure_variants(
    network: nn.Module, variants: Sequence[SeedVariant], batches: Iterable[Batch], *, score: ScoreFunction
) -> Tensor:  # [V]
    """Return the mean score of every combination on the same data, in evaluation mode; restores the network's mode.

    Args:
        network, variants: See `forward_variants`.
        batches: Pairs of inputs [B, …] (a tuple if the network takes several) and targets [B, …].
        score: Function of outputs and targets that returns one score per sample [B], as 1.0 for a correct prediction.
    """
    totals, samples, mixes = None, 0, None
    with evaluation_mode(network):
        for inputs, targets in batches:
            arguments = inputs if isinstance(inputs, tuple) else (inputs,)
            if mixes is None:
                mixes = len(variants) > 1 and mixes_rows(network, arguments)
            outputs, group_of_variant = forward_variants(network, variants, *arguments, mixes=mixes)
            groups = max(group_of_variant) + 1
            sums = []
            for group in range(groups):
                scores = score(map_tensors(outputs, lambda x, i=group: x.chunk(groups)[i]), targets)  # noqa: B023
                if scores.shape != (len(targets),):
                    raise ValueError(
                        f"a score is a number per sample, [{len(targets)}], and no mean; got {list(scores.shape)}"
                    )
                sums.append(scores.sum())
            total = torch.stack([sums[group] for group in group_of_variant])
            totals = total if totals is None else totals + total
            samples += len(targets)
    if totals is None:
        raise ValueError("there are no batches to measure on; an iterator may be used up")
    return totals / samples


def contributions(network: nn.Module, batches: Iterable[Batch], score: ScoreFunction) -> dict[str, float]:
    """Return the contribution of each blended seed by slot: 100·(score with all seeds - score without this seed).

    Copies of blocks have none. If the score is 1.0 for a correct prediction, contributions are points. Arguments: see
    `measure_variants`.
    """
    judged, variants = judge_seeds(slots_of(network).values())
    if not judged:
        return {}
    whole, *without = measure_variants(network, variants, batches, score=score).tolist()
    return {name: 100.0 * (whole - other) for name, other in zip(judged, without, strict=True)}


def shapley_values(coalition_values: Mapping[SeedVariant, float], players: Sequence[str]) -> dict[str, float]:
    """Return exact Shapley values from the values of all 2^k coalitions (Shapley 1953, doi:10.1515/9781400881970-018).

    The value of a coalition is the score of the network with these seeds. A Shapley value is the mean marginal value of
    a player over all orders of joining. They sum to v(all) - v(none).
    """
    k, v = len(players), coalition_values
    return {
        player: math.fsum(
            (v[s | {player}] - v[s]) / (k * math.comb(k - 1, len(s)))
            for s in all_variants([other for other in players if other != player])
        )
        for player in players
    }
