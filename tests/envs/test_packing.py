"""Packed states compared with the states themselves, and damaged ones."""

import io
from typing import Any

import pytest
import torch
from hypothesis import given

from esper_lightning.envs.packing import pack, unpack
from esper_lightning.governor.snapshot import clone_tensors
from esper_lightning.growth.nested import iter_tensors
from tests.governor.states import STATES, memory, same


@given(STATES)
def test_a_packed_state_is_saved_and_unpacked_with_a_memory_for_each_data_type(state: Any) -> None:
    file = io.BytesIO()
    torch.save(pack(state), file)
    file.seek(0)
    unpacked = unpack(torch.load(file, weights_only=True))

    assert same(unpacked, state)
    assert not memory(pack(state)) & memory(state)
    assert len(memory(unpacked)) == len({tensor.dtype for tensor in iter_tensors(state) if tensor.numel()})
    images = [
        [tensor.is_contiguous(memory_format=torch.channels_last) for tensor in iter_tensors(one) if tensor.ndim == 4]
        for one in (unpacked, clone_tensors(state))
    ]
    assert images[0] == images[1], "memory formats stay"


def test_axes_keep_their_order_in_memory() -> None:
    image = torch.arange(48.0).view(2, 3, 2, 4).contiguous(memory_format=torch.channels_last)
    state = {"image": image, "turned": torch.arange(6.0).view(2, 3).T}
    unpacked = unpack(pack(state))
    assert same(unpacked, state)
    assert [one.stride() for one in iter_tensors(unpacked)] == [one.stride() for one in iter_tensors(state)]
    with_gaps = {"turned": torch.arange(24.0).view(4, 6)[:, ::2].T, "image": image[:, :, :, 1:3]}
    assert same(unpack(pack(with_gaps)), with_gaps)


WHOLE = {"weights": torch.arange(6.0).view(2, 3), "counts": [torch.tensor(3), 7], "empty": torch.empty(0, 5)}


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("template", {"weights": torch.empty(0)}),
        ("layout", None),
        ("layout", torch.tensor([0, 2, 2, 3, 3, 1, 1, 0])),
        ("layout", torch.tensor([0, 2, 2, 3, 4, 1, 1, 0, 0, 2, 0, 5, 5, 1])),
        ("layout", torch.tensor([0, 2, 2, 3, 3, 1, 1, 0, 0, 2, 0, 5, 5, 1, 0])),
        ("layout", torch.tensor([2, 2, 2, 3, 3, 1, 1, 0, 0, 2, 0, 5, 5, 1])),
        ("layout", torch.tensor([-1, 2, 2, 3, 3, 1, 1, 0, 0, 2, 0, 5, 5, 1])),
        ("numbers", {}),
        ("numbers", []),
        ("numbers", [torch.arange(6.0), 3]),
        ("numbers", [torch.zeros(1).expand(6), torch.tensor([3])]),
        ("numbers", [torch.arange(5.0), torch.tensor([3])]),
    ],
)
def test_a_damaged_state_is_refused_in_a_line(part: str, value: Any) -> None:
    packed = pack(WHOLE)
    assert same(unpack(packed), WHOLE)
    with pytest.raises(ValueError, match=r"^a host's|^the layout of a host's") as refused:
        unpack(packed | {part: value})
    assert len(str(refused.value).splitlines()) == 1


def test_a_state_without_a_part_is_refused() -> None:
    for part in ("template", "layout", "numbers"):
        packed = pack(WHOLE)
        del packed[part]
        with pytest.raises(ValueError, match=f"a host lacks {part}"):
            unpack(packed)
