"""Flat storage of stacked weights."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from esper_lightning.envs import HostPool
from esper_lightning.envs.device_transfer import copy_parts
from esper_lightning.envs.execution.fused import flat_params
from esper_lightning.envs.execution.fused.flat_params import Assignment, FlatParameters, StackedModule
from esper_lightning.envs.execution.fused.layers import stack_layers
from esper_lightning.envs.execution.fused.stacking import StackIndex
from tests.envs.execution.episodes import episode


def flat_weights(hosts: int) -> FlatParameters:
    """Return the flat weights of hosts with two linear layers."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))

    program = StackedModule(stack_layers(make(), StackIndex()))
    return FlatParameters([Assignment(program, [program.layers_of(make()) for _ in range(hosts)])])


class Operations(TorchDispatchMode):
    """Records the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


def test_stacked_tensors_are_aligned_as_a_gpu_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(flat_params.ALIGNMENT_BYTES, "cpu", flat_params.ALIGNMENT_BYTES["cuda"])
    weights = flat_weights(hosts=3)

    views = list(chain.from_iterable(weights.views(weights.values)))
    assert [view.storage_offset() * 4 % 256 for view in views] == [0] * 4
    for view, parameters in zip(views, zip(*[iter(weights.parameters)] * 3, strict=True), strict=True):
        assert torch.equal(view, torch.stack(parameters))
    assert weights.values.sum().item() == pytest.approx(sum(p.sum().item() for p in weights.parameters), abs=1e-5)
    assert len(weights.group_of_number) == len(weights.values)


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


def test_numbers_of_all_hosts_are_copied_back_by_one_operation() -> None:
    names = []
    for hosts in (2, 8):
        weights = flat_weights(hosts)
        expected = weights.values.clone().mul_(2.0)
        with Operations() as operations:
            weights.scatter(expected, [p.detach() for p in weights.parameters])
        names.append([name for name in operations.names if "copy" in name])
        assert torch.equal(weights.gather(weights.parameters), expected)

    assert names == [["aten::split_with_sizes_copy"]] * 2
