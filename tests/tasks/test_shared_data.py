"""One data set in memory serves every pool."""

import gc
import weakref
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from esper_lightning.datamodules.hosts import HostPoolData
from esper_lightning.tasks import Digits, TaskData
from tests.runs import tiny_host

CPU = torch.device("cpu")


def share_memory(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    """Return True if the tensors share their memory."""
    return all(a is b and a.data_ptr() == b.data_ptr() for a, b in zip(ours, theirs, strict=True))


def test_one_data_set_serves_every_pool_and_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """S5: a data set is loaded once, shared by all pools, and freed with them."""
    loads: list[Digits] = []
    real = Digits.load

    def counted(task: Digits) -> TaskData:
        loads.append(task)
        return real(task)

    monkeypatch.setattr(Digits, "load", counted)
    data = HostPoolData(Digits(), tiny_host, n_envs=2)
    data.build(CPU)
    other = data.make_pool(3)

    assert len(loads) == 1
    for ours, theirs in zip(data.pool.data[:3], other.data[:3], strict=True):
        assert share_memory(ours, theirs)
    kept = weakref.ref(data.pool.data.train.inputs)
    del data, other, ours, theirs
    gc.collect()
    assert kept() is None
