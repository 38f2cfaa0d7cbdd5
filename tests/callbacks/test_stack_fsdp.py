"""Stack under FSDP2, two processes on the CPU: equal to one process, and resumed from both kinds of checkpoints."""

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from esper_lightning.callbacks import Stack
from tests.callbacks import gpt
from tests.ranks import start_ranks

SAVED = (2, 5, 7)
"""Steps of ten after which the network is saved: before, at and after a change at half, and between the default's."""
AT_HALF = {"start": 2, "at": 0.5}


class Sharded(gpt.LitGPT):
    """Shards each block, and all else, as Lightning asks for."""

    def configure_model(self) -> None:
        if self.device_mesh is not None and not isinstance(self.net, FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            for block in self.net.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.net, mesh=mesh)


class Short(gpt.GPT):
    """Runs its first two blocks alone."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, *_ = self.blocks
        x = second(first(self.tokens(x) + self.positions.weight))
        return self.head(self.norm(x))


class Forgetful(Sharded):
    """Has a network that does not run new blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Short(4)


class Write(Callback):
    """Writes checkpoints on the way, and the whole weights at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if trainer.global_step in SAVED:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in pl_module.named_parameters()}
        torch.save({name: p.detach() for name, p in whole.items()}, self.folder / f"rank{trainer.global_rank}.pt")


def weights(
    folder: Path,
    processes: int,
    *beside: Callback,
    resume_from: Path | None = None,
    kind: type[Sharded] = Sharded,
    code: int = 0,
    growth: Mapping[str, Any] = AT_HALF,
    **sharding: Any,
) -> list[dict[str, Tensor]]:
    """Return the parameters with which each process ends."""
    folder.mkdir()

    def run() -> None:
        torch.manual_seed(0)
        module = kind().double()
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        several: dict[str, Any] = {}
        if processes > 1:
            sizes = {"data_parallel_size": processes, "tensor_parallel_size": 1} | sharding
            strategy: Any = ModelParallelStrategy(**sizes)
            several = {"devices": processes, "strategy": strategy, "use_distributed_sampler": False}
        try:
            grows = Stack("net.blocks", **growth)
            with warnings.catch_warnings(record=True, action="always") as said:
                made = gpt.train(module, grows, Write(folder), *beside, resume_from=resume_from, **several)
            (folder / f"warned{made.global_rank}").write_text("\n".join(str(one.message) for one in said))
            if processes > 1 and resume_from is None:
                (grown,) = made.validate(module, verbose=False)
                (earlier,) = made.validate(module, ckpt_path=folder / f"{SAVED[0]}.ckpt", verbose=False)
                assert earlier["val_loss"] > grown["val_loss"]
        except ValueError as error:
            assert "\n" not in str(error) and str(error).startswith("Stack: ")
            raise SystemExit(3) from None
        if processes > 1:  # a process that ends while another one waits would end that, too
            torch.distributed.barrier()

    with ExitStack() as stack:
        codes = [fork.wait() for fork in start_ranks(stack, processes, run)]
    assert codes == [code] * processes
    if code:
        return []
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(processes)]


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert list(one) == list(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize(("distributed", "growth"), [(True, AT_HALF), (False, AT_HALF), (True, {})])
def test_two_sharded_processes_stack_the_network_of_one_and_go_on_from_a_checkpoint(
    distributed: bool, growth: Mapping[str, Any], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"growth": growth, "save_distributed_checkpoint": distributed}
    (alone,) = weights(tmp_path / "alone", 1, growth=growth)
    whole, other = weights(tmp_path / "two", 2, **settings)

    assert "net.blocks.3.mlp.0.weight" in alone
    assert difference(whole, other) == 0.0
    assert difference(whole, alone) < 1e-7
    for step in SAVED:
        saved = tmp_path / "two" / f"{step}.ckpt"
        resumed, _ = weights(tmp_path / f"from {step}", 2, resume_from=saved, **settings)
        assert difference(resumed, whole) == 0.0, step
    assert weights(tmp_path / "other", 2, resume_from=saved, growth={"start": 3, "at": 0.5}, code=3) == []


@pytest.mark.slow
def test_sharded_blocks_that_the_forward_pass_does_not_run_are_warned_of_once(tmp_path: Path) -> None:
    for kind, times in (Sharded, 0), (Forgetful, 1):
        folder = tmp_path / kind.__name__
        weights(folder, 2, kind=kind)
        said = [(folder / f"warned{rank}").read_text() for rank in range(2)]
        assert [one.count("new blocks 2, 3 got no gradient before the next step") for one in said] == [times] * 2


@pytest.mark.slow
def test_layers_that_processes_share_are_refused_in_one_line(tmp_path: Path) -> None:
    assert weights(tmp_path / "two", 2, data_parallel_size=1, tensor_parallel_size=2, code=3) == []


@pytest.mark.slow
def test_a_search_for_the_learning_rate_which_lightning_does_not_undo_here_is_refused(tmp_path: Path) -> None:
    assert weights(tmp_path / "two", 2, gpt.RateSearch(), code=3) == []
