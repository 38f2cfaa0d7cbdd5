"""Arbitrary nested states of dicts, lists, numbers and tensors, and comparisons of them."""

from collections import OrderedDict
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from esper_lightning.runtime.nested import iter_tensors

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
