"""Snapshots compared with an independent reference, deepcopy of torch."""

from collections import Counter, OrderedDict
from copy import deepcopy
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from esper_lightning.governor.snapshot import Snapshot, clone_tensors, pack
from esper_lightning.growth.nested import iter_tensors
from tests.imitated_gpu import GPU, ImitatedGpu
from tests.runs import differences

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def any_tensor(draw: st.DrawFn) -> Tensor:
    """Make a tensor of random dtype and shape: contiguous, with gaps, broadcast, or a view of a larger one."""
    dtype = draw(st.sampled_from([*DTYPES, torch.complex128]))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensor = torch.randint(-9, 9, shape, generator=generator).to(dtype)
    form = draw(st.sampled_from(["as it is", "channels last", "transposed", "expanded", "strided", "part"]))
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


@given(STATES)
def test_a_copy_shares_no_memory_with_the_store(state: Any) -> None:
    snapshot = Snapshot()
    snapshot.take(state)
    reference, copy = deepcopy(state), snapshot.copy()

    assert not memory(copy) & (memory(snapshot.view()) | memory(state))
    # Its memory has its own size, so saving it saves nothing else.
    assert all(tensor.untyped_storage().nbytes() <= tensor.nbytes for tensor in iter_tensors(copy))
    snapshot.take({"another": torch.full((64,), 7.0)})
    assert same(copy, reference)


@given(STATES)
def test_a_packed_state_is_an_equal_one_with_a_memory_for_each_data_type(state: Any) -> None:
    packed = pack(state)

    assert same(packed, state)
    assert not memory(packed) & memory(state)
    assert len(memory(packed)) == len({tensor.dtype for tensor in iter_tensors(state) if tensor.numel()})
    images = [
        [tensor.is_contiguous(memory_format=torch.channels_last) for tensor in iter_tensors(one) if tensor.ndim == 4]
        for one in (packed, clone_tensors(state))
    ]
    assert images[0] == images[1], "memory formats stay"


def grown() -> tuple[nn.Module, torch.optim.Optimizer]:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)).to(
        memory_format=torch.channels_last
    )
    return network, torch.optim.AdamW(network.parameters(), lr=0.1)


def learn(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    network(torch.randn(2, 3, 5, 5)).square().sum().backward()
    optimizer.step()


def test_a_network_in_training_is_held_in_the_same_memory_again_and_again() -> None:
    network, optimizer = grown()
    snapshot, places = Snapshot(), []
    learn(network, optimizer)
    for _ in range(5):
        state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
        snapshot.take(state)
        places.append([tensor.data_ptr() for tensor in iter_tensors(snapshot.view())])
        reference = deepcopy(state)
        learn(network, optimizer)

        assert differences(snapshot.copy()["optimizer"], reference["optimizer"]) == []
        assert same(snapshot.view(), reference)
        weight = snapshot.view()["network"]["0.weight"]
        assert weight.stride() == network[0].weight.stride(), "no other order of numbers"
        assert not weight.requires_grad
    assert places == [places[0]] * 5


def test_a_smaller_state_uses_the_memory_of_a_larger_one() -> None:
    snapshot = Snapshot()
    snapshot.take([torch.arange(100.0), torch.ones(3, dtype=torch.bool)])
    place, size = snapshot.view()[0].data_ptr(), snapshot.nbytes
    snapshot.take([torch.arange(7)])

    assert snapshot.view()[0].tolist() == list(range(7))
    assert (snapshot.view()[0].data_ptr(), snapshot.nbytes) == (place, size)


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
