"""Snapshots compared with an independent reference, deepcopy of torch."""

import io
from collections import Counter, OrderedDict
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from esper_lightning.envs.snapshot import Snapshot, pack, unpack
from esper_lightning.runtime.nested import iter_tensors
from tests.imitated_gpu import GPU, ImitatedGpu

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def any_tensor(draw: st.DrawFn) -> Tensor:
    """Make a tensor of random dtype and shape: contiguous, with gaps, broadcast, or a view of a larger one."""
    dtype = draw(st.sampled_from([*DTYPES, torch.complex128]))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensor = torch.randint(-9, 9, shape, generator=generator).to(dtype)
    forms = st.sampled_from(["as it is", "channels last", "transposed", "expanded", "strided", "part"])
    return in_form(in_form(tensor, draw(forms)), draw(forms))


def in_form(tensor: Tensor, form: str) -> Tensor:
    """Return the tensor, or a view or a copy of it with another layout in memory."""
    if form == "channels last" and tensor.ndim == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    if form == "transposed" and tensor.ndim > 1:
        return tensor.transpose(0, -1)
    if form == "expanded":
        return tensor[None].expand(3, *tensor.shape)
    if form == "strided" and tensor.ndim:
        return tensor[::2]
    if form == "part":
        return torch.stack([tensor, tensor])[1]
    return tensor


PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3))

STATES = st.recursive(
    st.one_of(any_tensor(), PLAIN),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.integers(0, 9), st.text(max_size=2)), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
).filter(lambda state: state is not None)


def same(a: Any, b: Any) -> bool:
    """Return True if two states are equal in types, keys and values, with tensors equal bit for bit."""
    if isinstance(a, Tensor):
        equal = isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return equal and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def memory(state: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in iter_tensors(state) if tensor.numel()}


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
        assert gpu.waits != {}, "the copies have finished"
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
