"""Executor auto: the rule by which it stands for another executor."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from esper_lightning.datamodules import HostPoolData
from esper_lightning.envs import HostFactory, HostPool, host_pool
from esper_lightning.hosts import CNN
from esper_lightning.tasks import Digits
from tests.conftest import SMALL, small_host
from tests.imitated_gpu import GPU, ImitatedGpu

MakePool = Callable[..., HostPool]


def with_dropout(input_shape: Sequence[int], outputs: int) -> nn.Module:
    """Return a host that cannot be stacked, because it draws random numbers."""
    host = CNN(input_shape, outputs, base=4, pools=2)
    host.add_module("head", nn.Sequential(nn.Dropout(0.5), host.head))
    return host


@pytest.mark.parametrize(
    ("host", "n_envs", "cores", "expected"),
    [
        (small_host, 2, 2, "fused"),
        (small_host, 2, 1, "fused"),
        (small_host, 1, 2, "loop"),
        (with_dropout, 2, 2, "threads"),
        (partial(CNN, base=32), 2, 2, "threads"),
        (partial(CNN, base=32), 2, 1, "fused"),
        (partial(CNN, base=64), 2, 1, "loop"),
    ],
)
def test_auto_is_the_executor_that_fits_hosts_and_cores(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, host: HostFactory, n_envs: int, cores: int, expected: str
) -> None:
    monkeypatch.setattr(host_pool, "usable_cores", lambda: cores)

    assert make_pool(n_envs, host, executor="auto").executor_choice == expected


@pytest.mark.parametrize(("n_envs", "expected"), [(1, "streams"), (2, "fused")])
def test_auto_is_fused_for_several_small_hosts_on_a_gpu_and_else_streams(n_envs: int, expected: str) -> None:
    task = Digits(validation=50, test=50)
    config = replace(SMALL, executor="auto")
    with ImitatedGpu():
        pool = HostPool(task, task.load(), small_host, config=config, n_envs=n_envs, device=GPU)
    assert pool.executor_choice == expected


def test_other_pools_of_a_run_are_executed_alike() -> None:
    data = HostPoolData(Digits(), small_host, replace(SMALL, executor="auto"), n_envs=2)
    data.build(torch.device("cpu"))

    assert data.make_pool(1).executor_choice == data.pool.executor_choice == "fused"


def test_threads_say_that_dropout_makes_runs_differ_and_say_nothing_else(
    make_pool: MakePool, capsys: pytest.CaptureFixture[str]
) -> None:
    make_pool(2, small_host, executor="threads")
    torch.manual_seed(0)
    make_pool(2, with_dropout, executor="loop")
    state = torch.get_rng_state()
    assert capsys.readouterr().out == ""

    torch.manual_seed(0)
    make_pool(2, with_dropout, executor="threads")

    assert "hosts draw random numbers in training (dropout)" in capsys.readouterr().out
    assert torch.equal(torch.get_rng_state(), state)
