"""Transfers between device and CPU in one environment step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from esper_lightning.envs import HostPool, Masks
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.envs.measurements import download
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.losses import PPOConfig
from esper_lightning.ppo.policy import Policy
from esper_lightning.ppo.running_norm import RunningMeanStd, make_norm
from esper_lightning.runtime.nested import iter_tensors
from esper_lightning.tasks import Digits
from esper_lightning.telemetry.observer import observe
from tests.conftest import SMALL, small_host

READING = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__", "nonzero"}


class Reads(TorchFunctionMode):
    """Records reads of tensors that would be on the device.

    Those are all tensors except those created from Python numbers, downloaded, or computed from such tensors only.
    """

    def __init__(self, patch: pytest.MonkeyPatch, pool: HostPool) -> None:
        super().__init__()
        self.known: dict[int, Tensor] = {}  # by id; the reference prevents reuse of the id
        self.reads: list[str] = []
        self.downloads: list[tuple[int, ...]] = []  # shapes
        # On the CPU both names share memory.
        pool.masks = pool.observation_builder.masks = Masks(*(mask.clone() for mask in pool.masks_on_cpu))
        self.know(list(pool.masks_on_cpu))
        patch.setattr("esper_lightning.envs.host_pool.download", self.download)
        for module in ("host_pool", "observation"):
            patch.setattr(f"esper_lightning.envs.{module}.copy_to_device", self.send)

    def know(self, value: Any) -> None:
        self.known |= {id(tensor): tensor for tensor in iter_tensors(value)}

    def download(self, tensor: Tensor) -> Tensor:
        self.downloads.append(tuple(tensor.shape))
        self.know(copy := tensor.clone())
        return copy

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        sent = tensor.clone()
        self.known.pop(id(sent), None)
        return sent

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = [*iter_tensors(args), *iter_tensors(kwargs or {})]
        name = getattr(function, "__name__", str(function))
        if all(id(tensor) in self.known for tensor in given):
            if given or function is torch.tensor:
                self.know(result)
        elif name in READING:
            self.reads.append(name)
        return result


def test_a_tick_reads_the_device_twice(
    make_loop: Callable[..., RolloutCollector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3: a step reads the actions in one transfer and all measurements in another, and nothing else from the device,
    from one call of `RolloutCollector.step` to the next."""
    loop = make_loop(3)
    pool = loop.pool
    loop.reset()
    reads = Reads(monkeypatch, pool)
    with reads:
        for _ in range(pool.config.horizon):
            observe(pool, loop.step(), loop.ticks)

    heads, slots = len(loop.buffer.steps.action), len(pool.space.slot)
    measured = 3 + 4 * (1 + slots) + 2 * (slots + 2)
    assert reads.downloads == [(heads, 3), (3, measured)] * pool.config.horizon
    assert reads.reads == []
    assert loop.buffer.steps.action.op.any(), "something was done"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("executor", ["loop", "streams", "fused"])
def test_nothing_in_a_tick_waits_for_the_gpu_but_the_two_reads(
    monkeypatch: pytest.MonkeyPatch, make_policy: Callable[..., Policy], executor: str
) -> None:
    """S3: a step waits for the GPU only in its two transfers. Torch raises an error at any other synchronisation, also
    at copies from pageable memory."""
    gpu, task = torch.device("cuda", 0), Digits(validation=100, test=100)
    config, governor = replace(SMALL, executor=executor), GovernorConfig()
    pool = HostPool(task, task.load(), small_host, config=config, n_envs=3, device=gpu, governor=governor)
    norms = make_norm(pool.rows).to(gpu), RunningMeanStd((), clip=float("inf")).to(gpu)
    loop = RolloutCollector(
        pool,
        make_policy(pool).to(gpu),
        observation_norm=norms[0],
        value_norm=norms[1],
        config=PPOConfig(),
        run_rng_seed=7,
    )
    loop.reset()
    loop.step()  # creates what is cached
    shapes = []

    def read(tensor: Tensor) -> Tensor:
        torch.cuda.set_sync_debug_mode("default")
        shapes.append(tuple(tensor.shape))
        numbers = download(tensor)
        torch.cuda.set_sync_debug_mode("error")
        return numbers

    monkeypatch.setattr("esper_lightning.envs.host_pool.download", read)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(pool.config.horizon - 1):
            observe(pool, loop.step(), loop.ticks)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert [len(shape) for shape in shapes] == [2, 2] * (pool.config.horizon - 1)
    assert loop.buffer.steps.action.op.any(), "something was done"
