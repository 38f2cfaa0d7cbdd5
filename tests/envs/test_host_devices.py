"""Devices of hosts: which are chosen, which names are refused, and hosts on several imitated GPUs."""

import pytest
import torch

from esper_lightning.envs.host_devices import find_host_devices
from tests.envs.executors.fused import hosts
from tests.imitated_gpu import CPU, GPU, ImitatedGpu
from tests.tiers import rest_is_slow

GPUS = [torch.device("cuda", i) for i in range(3)]


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.usefixtures("three_gpus")
def test_streams_take_every_gpu_and_other_executors_one() -> None:
    assert find_host_devices(None, "streams", GPUS[0]) == GPUS
    assert find_host_devices(None, "streams", GPUS[1]) == [GPUS[1], GPUS[0], GPUS[2]]
    assert find_host_devices(None, "streams", torch.device("cuda")) == [torch.device("cuda"), *GPUS[1:]]
    assert find_host_devices(None, "loop", GPUS[0]) == find_host_devices(None, "auto", GPUS[0]) == GPUS[:1]
    assert find_host_devices(None, "loop", CPU) == [CPU]


@pytest.mark.usefixtures("three_gpus")
def test_every_executor_takes_the_named_gpus_which_need_not_be_the_policys() -> None:
    for executor in ("loop", "streams", "fused", "auto"):
        assert find_host_devices(["cuda:1", "cuda:2"], executor, GPUS[0]) == GPUS[1:]


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "names no device"),
        (["gpu"], "'gpu' is no device; use names such as cuda:0"),
        (["cpu"], "hosts on cpu and the policy on cuda:0; use trainer.accelerator"),
        (["cuda:3"], "'cuda:3', but there are the GPUs 0 to 2"),
        (["cuda:1", "cuda:1"], "names a device twice"),
    ],
)
def test_names_that_cannot_be_used_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_host_devices(names, "fused", GPUS[0])


@pytest.mark.usefixtures("three_gpus")
def test_each_of_several_processes_has_its_own_gpu() -> None:
    assert find_host_devices(None, "streams", GPUS[1], alone=False) == GPUS[1:2]
    with pytest.raises(ValueError, match="each process has its own device"):
        find_host_devices(["cuda:1"], "fused", GPUS[0], alone=False)


@pytest.mark.parametrize("executor", rest_is_slow(["loop", "streams", "fused"], {"fused"}))
def test_hosts_on_several_gpus_live_as_on_one(executor: str) -> None:
    pools = []
    for devices in ([GPU], GPUS[1:]):
        with ImitatedGpu(count=3) as gpu:
            pools.append(pool := hosts.make(executor, "mlp", 3, device=GPU, host_devices=devices))
            hosts.play(pool, ticks=6)
            homes = [env.slots[0].alpha.device for env in pool.envs]
            assert homes == [devices[i % len(devices)] for i in range(3)]
            assert pool.observation.features.device == GPU
            assert gpu.faults == {}
    if executor == "fused":
        assert hosts.distance(*pools) < 1e-9
    else:
        assert hosts.distance(*pools) == 0.0
