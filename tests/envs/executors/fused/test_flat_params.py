"""Flat storage of stacked weights."""

from collections.abc import Callable
from itertools import chain

import pytest
import torch
from torch import nn

from esper_lightning.envs import HostPool
from esper_lightning.envs.device_transfer import copy_parts
from esper_lightning.envs.executors.fused import flat_params
from esper_lightning.envs.executors.fused.flat_params import Assignment, FlatParameters, StackedModule
from esper_lightning.envs.executors.fused.layers import stack_layers
from esper_lightning.envs.executors.fused.stacking import StackIndex
from tests.envs.executors.episodes import episode


def flat_weights(hosts: int) -> FlatParameters:
    """Return the flat weights of hosts with two linear layers."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))

    program = StackedModule(stack_layers(make(), StackIndex()))
    return FlatParameters([Assignment(program, [make() for _ in range(hosts)], range(hosts))])


def test_stacked_tensors_are_aligned_as_a_gpu_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(flat_params.ALIGNMENT_BYTES, "cpu", flat_params.ALIGNMENT_BYTES["cuda"])
    weights = flat_weights(hosts=3)

    views = list(chain.from_iterable(weights.views(weights.values)))
    assert [view.storage_offset() * 4 % 256 for view in views] == [0] * 4
    for view, parameters in zip(views, zip(*[iter(weights.parameters)] * 3, strict=True), strict=True):
        assert torch.equal(view, torch.stack(parameters))
    assert weights.values.sum().item() == pytest.approx(sum(p.sum().item() for p in weights.parameters), abs=1e-5)
    assert len(weights.sections[0].owner_of_number()) == len(weights.values)


def test_alignment_does_not_change_what_hosts_learn(
    monkeypatch: pytest.MonkeyPatch, make_pool: Callable[..., HostPool]
) -> None:
    plain = episode(make_pool(3, executor="fused", horizon=4))
    monkeypatch.setitem(flat_params.ALIGNMENT_BYTES, "cpu", 256)
    aligned = episode(make_pool(3, executor="fused", horizon=4))

    torch.testing.assert_close(aligned, plain, rtol=1e-4, atol=1e-4)


def test_parts_are_copied_into_tensors_of_any_memory_format() -> None:
    targets = [torch.zeros(2, 3), torch.zeros(3, 2).T, torch.zeros(()), torch.zeros(1, 2, 2, 2)]
    targets[3] = targets[3].contiguous(memory_format=torch.channels_last)
    copy_parts(torch.arange(21.0), targets)

    found = torch.cat([target.reshape(-1) for target in targets])
    assert torch.equal(found, torch.arange(21.0))
