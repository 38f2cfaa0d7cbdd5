"""What a run on another device needs, tried without one: precision, reductions by NCCL, memory, tables by device."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning import Trainer
from torch import backends

from esper_lightning.callbacks import RolloutState
from esper_lightning.datamodules import HostPoolData
from esper_lightning.envs import HostPool
from esper_lightning.envs.config import DEVICE_TYPES
from esper_lightning.envs.executors import LoopExecutor, loop
from esper_lightning.envs.executors.fused import executor, layers
from esper_lightning.envs.flops import plain_operators
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.module import TamiyoModule
from esper_lightning.ppo.policy import use_ieee_float32
from esper_lightning.runtime.machine import FLOAT32_PARTS, is_out_of_memory
from esper_lightning.runtime.nested import iter_tensors
from esper_lightning.runtime.ranks import Ranks
from esper_lightning.runtime.registry import find_config
from esper_lightning.tasks import Digits
from tests.conftest import SMALL, small_host
from tests.envs.executors.test_imitated_gpu import imitated_strategy
from tests.imitated_gpu import GPU, ImitatedGpu


def former(allow: bool) -> None:
    backends.cudnn.allow_tf32 = backends.cuda.matmul.allow_tf32 = allow


def newer(precision: str) -> None:
    backends.fp32_precision = precision


def newer_of_convolutions() -> None:
    backends.cudnn.conv.fp32_precision = "ieee"


CHOICES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "former on": lambda: former(True),
    "former off": lambda: former(False),
    "as Lightning advises": lambda: torch.set_float32_matmul_precision("medium"),
    "newer tf32": lambda: newer("tf32"),
    "newer ieee": lambda: newer("ieee"),
    "newer, of convolutions": newer_of_convolutions,
}
"""What a user may have chosen by the two interfaces of torch, which raises where one reads what the other has set."""


@pytest.fixture(params=CHOICES)
def choice(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make a user's choice, and then restore that of torch."""
    CHOICES[request.param]()
    yield
    former(False)
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32, backends.fp32_precision = True, "none"
    for part, precision in zip(FLOAT32_PARTS, ("none", "tf32", "tf32"), strict=True):
        part.fp32_precision = precision
    assert float32_state() == ["none", "tf32", "tf32", "none", "highest", "False", "True"]


def float32_state() -> list[str]:
    """Return all that torch tells about the precision of float32; where it refuses to tell, its refusal."""
    told = [part.fp32_precision for part in (*FLOAT32_PARTS, backends)]
    former: list[Callable[[], Any]] = [
        torch.get_float32_matmul_precision,
        lambda: backends.cuda.matmul.allow_tf32,
        lambda: backends.cudnn.allow_tf32,
    ]
    for tell in former:
        try:
            told.append(str(tell()))
        except RuntimeError as error:
            told.append(f"{error}"[:20])
    return told


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_hosts_round_to_tf32_only_if_it_is_set_and_the_users_choice_stays(precision: str, choice: None) -> None:
    before = float32_state()
    executor = LoopExecutor(Digits(), HostTraining(precision=precision))
    with executor.kernels_of_settings(torch.device("cuda")):
        assert {part.fp32_precision for part in FLOAT32_PARTS} == {"tf32" if precision == "tf32" else "ieee"}
    with executor.kernels_of_settings(torch.device("cpu")), plain_operators():
        assert float32_state() == before
    assert float32_state() == before


def test_a_policy_is_not_rounded_to_tf32_whatever_the_user_has_chosen(choice: None) -> None:
    use_ieee_float32()
    assert {part.fp32_precision for part in FLOAT32_PARTS} == {"ieee"}
    assert float32_state()[-3:] == ["highest", "False", "False"], "both interfaces agree"


@pytest.mark.slow
def test_a_validation_on_several_gpus_reduces_no_tensor_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduced: list[torch.device] = []
    with ImitatedGpu() as gpu:
        strategy = imitated_strategy()

        def reduce(tensor: torch.Tensor, group: Any = None, reduce_op: Any = "mean") -> torch.Tensor:
            reduced.append(gpu.device_of(tensor))
            return tensor

        monkeypatch.setattr(strategy, "reduce", reduce)
        settings: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        trainer = Trainer(strategy=strategy, default_root_dir=tmp_path, callbacks=[RolloutState()], **settings)
        monkeypatch.setattr(type(trainer._accelerator_connector), "is_distributed", property(lambda _: True))
        module, data = TamiyoModule(), HostPoolData(Digits(validation=100, test=100), small_host, SMALL, n_envs=2)
        monkeypatch.setattr(TamiyoModule, "ranks", property(lambda _: Ranks(world=2), lambda *_: None), raising=False)
        trainer.validate(module, datamodule=data, verbose=False)

    assert reduced and set(reduced) == {GPU}


@pytest.mark.parametrize(
    ("message", "memory"),
    [
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("FIND was unable to find an engine to execute this computation", True),
        ("Unable to find an engine to execute this computation", True),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", False),
    ],
)
def test_a_host_ends_and_not_the_run_where_cuda_or_its_libraries_are_out_of_memory(message: str, memory: bool) -> None:
    assert is_out_of_memory(RuntimeError(message)) == memory


def test_a_checkpoint_holds_the_hosts_of_a_gpu_on_the_cpu() -> None:
    task = Digits(validation=50, test=50)
    with ImitatedGpu() as gpu:
        pool = HostPool(task, task.load(), small_host, config=SMALL, n_envs=2, device=GPU)
        pool.reset([0, 1])
        tensors = list(iter_tensors(pool.state_dict()))
        assert {gpu.device_of(tensor) for tensor in tensors} == {torch.device("cpu")} and len(tensors) > 2


TABLES = [(loop, "MAX_VALIDATED_ELEMENTS"), (executor, "MAX_INPUT_ELEMENTS")]
TABLES += [(layers, "MAX_PRODUCT_HOSTS"), (layers, "CHANNELS_LAST")]


def test_every_table_by_type_of_device_has_those_of_hosts_and_others_are_refused_in_one_line() -> None:
    for module, name in TABLES:
        assert set(getattr(module, name)) == set(DEVICE_TYPES), name
    for config in ("cifar10", "synthetic"):  # they leave the device to Lightning
        assert "accelerator" not in yaml.safe_load(find_config(config).read_text())["trainer"]
    task = Digits(validation=50, test=50)
    with pytest.raises(
        ValueError, match=r"^hosts run on the CPU and on CUDA, not on mps:0; set trainer\.accelerator to cpu$"
    ):
        HostPool(task, task.load(), small_host, config=SMALL, n_envs=2, device=torch.device("mps", 0))
