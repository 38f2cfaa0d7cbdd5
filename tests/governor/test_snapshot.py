"""Snapshots compared with an independent reference, deepcopy of torch."""

import io
from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from esper_lightning.envs.snapshot import Snapshot, pack, unpack
from esper_lightning.runtime.nested import iter_tensors
from tests.governor.states import STATES, memory, same
from tests.imitated_gpu import GPU, ImitatedGpu


@given(STATES)
def test_what_is_held_is_what_was_taken_whatever_it_was(state: Any) -> None:
    snapshot, reference = Snapshot(), deepcopy(state)
    snapshot.take(state)

    assert same(snapshot.view(), reference)
    assert same(snapshot.copy(), reference)
    assert not memory(snapshot.view()) & memory(state)
    for tensor in iter_tensors(state):
        if not tensor.is_complex() and 0 not in tensor.stride():
            tensor.zero_()  # changes of the original have no effect
    assert same(snapshot.view(), reference)


@given(st.lists(STATES, min_size=2, max_size=6))
def test_one_after_the_other_each_is_held_in_memory_that_only_grows(states: list[Any]) -> None:
    snapshot, most = Snapshot(), 0
    for state in states:
        before = snapshot.nbytes
        snapshot.take(state)
        assert same(snapshot.view(), deepcopy(state))
        assert all(tensor.untyped_storage().nbytes() == snapshot.nbytes for tensor in iter_tensors(snapshot.view()))
        sizes = Counter[torch.dtype]()
        for tensor in iter_tensors(state):
            sizes[tensor.dtype] += tensor.nbytes
        needed = sum(-(-size // 16) * 16 for size in sizes.values())
        most = max(most, needed)
        assert snapshot.nbytes == most, "of the largest so far"
        assert (snapshot.nbytes > before) == (needed > before)


def test_the_tensors_of_a_gpu_are_copied_by_one_transfer_for_each_data_type() -> None:
    with ImitatedGpu() as gpu:
        weights = [torch.arange(6.0).view(2, 3).to(GPU) + i for i in range(9)]
        image = torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last).to(GPU)
        state = {"weights": [*weights, weights[0].T], "image": image, "counts": [torch.ones(2, device=GPU).long()]}
        reference = deepcopy(state)
        snapshot = Snapshot(GPU)
        gpu.waits.clear()
        with Transfers() as transfers:
            snapshot.take(state)
        assert gpu.waits == {} and gpu.faults == {}
        assert transfers.count == 2
        for tensor in weights:
            tensor.zero_()
        restored = snapshot.view()
        for ours, theirs in zip(iter_tensors(restored), iter_tensors(reference), strict=True):
            assert torch.equal(ours, theirs.cpu())
        assert restored["image"].is_contiguous(memory_format=torch.channels_last)


class Transfers(TorchDispatchMode):
    """Counts copies into existing memory."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.count += function._schema.name == "aten::copy_"
        return function(*args, **(kwargs or {}))


@given(STATES)
def test_a_packed_state_is_saved_and_unpacked_with_a_memory_for_each_data_type(state: Any) -> None:
    torch.save(pack(state), file := io.BytesIO())
    file.seek(0)
    unpacked = unpack(torch.load(file, weights_only=True))

    assert same(unpacked, state)
    assert not memory(pack(state)) & memory(state)
    assert len(memory(unpacked)) == len({tensor.dtype for tensor in iter_tensors(state) if tensor.numel()})


def test_axes_keep_their_order_in_memory_and_a_damaged_state_is_refused() -> None:
    image = torch.arange(48.0).view(2, 3, 2, 4).contiguous(memory_format=torch.channels_last)
    state = {"image": image, "turned": torch.arange(6.0).view(2, 3).T}
    packed = pack(state)
    assert [one.stride() for one in iter_tensors(unpack(packed))] == [one.stride() for one in iter_tensors(state)]
    for part, value in (("layout", None), ("layout", packed["layout"][:-1]), ("numbers", [torch.zeros(3)])):
        with pytest.raises(ValueError, match=r"^the state of a host is damaged"):
            unpack(packed | {part: value})
