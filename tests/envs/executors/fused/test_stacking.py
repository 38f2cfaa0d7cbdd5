"""Stacked features of many hosts, against the same features host by host."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from esper_lightning.envs.executors.fused import stacking
from esper_lightning.envs.executors.fused.stacking import (
    Partition,
    broadcast_per_entry,
    columns_to_rows,
    merge,
    rows_to_columns,
    select_entries,
    split,
    stack_inputs,
    unstack_outputs,
)
from tests.growth.grown import CPU, generator_of

SHAPES = {"image": (3, 4, 2), "sequence": (4, 3), "vector": (3,)}
"""Shapes of one sample: [C, H, W], [T, C], [C]."""

layouts = pytest.mark.parametrize("layout", SHAPES)

counts = st.integers(1, 5)

samples = st.integers(1, 3)


def features(layout: str, count: int, samples: int) -> Tensor:  # [V·B, …], entry by entry
    shape = (count * samples, *SHAPES[layout])
    return torch.randn(shape, generator=generator_of(), dtype=torch.float64, requires_grad=True)


def entries(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return the part of each entry of a stacked feature."""
    return (x if x.ndim != 4 else unstack_outputs(x, count, len(x))).chunk(count)


def assert_same_gradients(x: Tensor, ours: Tensor, theirs: Tensor) -> None:
    """Check that gradients are equal for a weighted sum of the outputs with different weights."""
    assert ours.shape == theirs.shape
    weights = torch.arange(float(theirs.numel()), dtype=theirs.dtype).view(theirs.shape)
    gradients = [torch.autograd.grad((out * weights).sum(), x, retain_graph=True)[0] for out in (ours, theirs)]
    assert torch.equal(ours, theirs)
    assert torch.equal(*gradients)


@layouts
@given(count=counts, samples=samples)
def test_what_is_stacked_can_be_taken_apart_again(layout: str, count: int, samples: int) -> None:
    x = features(layout, count, samples)

    assert_same_gradients(x, unstack_outputs(stack_inputs(x, count), count, samples), x)


@given(count=counts, samples=samples)
def test_what_an_image_leaves_behind_becomes_rows_and_columns_again(count: int, samples: int) -> None:
    x = features("image", count, samples)
    means = stack_inputs(x, count).mean((2, 3))

    assert means.shape == (samples, count * 3)
    assert_same_gradients(x, columns_to_rows(means, count), x.mean((2, 3)))
    assert_same_gradients(x, rows_to_columns(columns_to_rows(means, count), count), means)


@layouts
@given(count=counts, samples=samples, data=st.data())
def test_entries_are_selected_in_any_order_and_any_number(
    layout: str, count: int, samples: int, data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=7))
    x = features(layout, count, samples)
    ours = select_entries(stack_inputs(x, count), count, torch.tensor(chosen))

    assert_same_gradients(x, torch.cat(entries(ours, len(chosen))), torch.cat([x.chunk(count)[i] for i in chosen]))


@layouts
@given(count=counts, samples=samples, data=st.data())
def test_every_part_gets_its_own_entries_and_all_find_their_way_back(
    layout: str, count: int, samples: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(count)))
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    x = features(layout, count, samples)
    own, deal = x.chunk(count), Partition(parts, CPU)
    dealt = deal.split(stack_inputs(x, count))
    # Each part has a different function.
    changed = [part * (i + 2) for i, part in enumerate(dealt)]
    factor = {entry: i + 2 for i, part in enumerate(parts) for entry in part}

    for part, members in zip(dealt, parts, strict=True):
        assert all(torch.equal(a, own[i]) for a, i in zip(entries(part, len(members)), members, strict=True))
    together = torch.cat(entries(deal.merge(changed), count))
    assert_same_gradients(x, together, torch.cat([part * factor[i] for i, part in enumerate(own)]))


@layouts
@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3), samples=samples)
def test_neighbours_are_divided_and_united(layout: str, sizes: list[int], samples: int) -> None:
    x = stack_inputs(features(layout, sum(sizes), samples), sum(sizes))
    parts = split(x, sizes)

    assert torch.equal(merge(parts, sizes), x)
    assert torch.equal(torch.cat([e for p, n in zip(parts, sizes, strict=True) for e in entries(p, n)]),
                       torch.cat(entries(x, sum(sizes))))  # fmt: skip


@layouts
@given(count=counts, samples=samples)
def test_one_number_for_each_entry(layout: str, count: int, samples: int) -> None:
    x = features(layout, count, samples)
    numbers = torch.arange(1.0, count + 1, dtype=x.dtype)
    stacked = stack_inputs(x, count)
    ours = torch.cat(entries(stacked * broadcast_per_entry(numbers, stacked), count))

    assert_same_gradients(x, ours, torch.cat([part * n for part, n in zip(x.chunk(count), numbers, strict=True)]))


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_stacked_images_keep_the_memory_format_of_their_device(
    monkeypatch: pytest.MonkeyPatch, device_type: str
) -> None:
    monkeypatch.setitem(stacking.CHANNELS_LAST, "cpu", stacking.CHANNELS_LAST[device_type])
    expected = {"cpu": torch.channels_last, "cuda": torch.contiguous_format}[device_type]
    x = stack_inputs(features("image", 4, 2), 4)
    deal = Partition([[2, 0], [1, 3]], CPU)
    merged = deal.merge(deal.split(x))

    assert x.is_contiguous(memory_format=expected)
    assert merged.is_contiguous(memory_format=expected)
    assert torch.equal(merged, x)
    assert torch.equal(unstack_outputs(x, 4, 2), features("image", 4, 2))
