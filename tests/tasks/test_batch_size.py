"""The configured batch size is used."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from esper_lightning.envs import Action, HostPool, StepResult
from esper_lightning.tasks import Measures, Task
from tests.runs import CONFIGS, cli
from tests.tasks.stored import write_cifar10
from tests.tiers import rest_is_slow

MakePool = Callable[..., HostPool]

HOSTS = 2


@pytest.fixture
def minibatch_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the sizes of all minibatches in the last tick, whether hosts train one by one or stacked."""
    samples: list[int] = []
    measure, step = Task.measure, HostPool.step

    def begun(pool: HostPool, action: Action) -> StepResult:
        samples.clear()  # drop calls before the tick, when seeds are tried out
        return step(pool, action)

    def watched(task: Task, outputs: Tensor, targets: Tensor) -> Measures:
        if outputs.requires_grad:
            samples.append(len(targets))
        return measure(task, outputs, targets)

    monkeypatch.setattr(Task, "measure", watched)
    monkeypatch.setattr(HostPool, "step", begun)
    return samples


def expected_sizes(executor: str, size: int, number: int) -> list[int]:
    """Return the sizes of `number` minibatches of `size` samples for each host, in the form an executor uses."""
    return [HOSTS * size] * number if executor == "fused" else [size] * (HOSTS * number)


@pytest.mark.parametrize(
    ("executor", "size"), rest_is_slow([("loop", 60), ("fused", 60), ("fused", 128)], {("fused", 60)})
)
def test_the_configured_batch_size_runs_on_cifar10(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minibatch_sizes: list[int], executor: str, size: int
) -> None:
    """F17: configs/cifar10.yaml trains with minibatches of its 128 samples, or of the given number."""
    write_cifar10(tmp_path, monkeypatch, each=30)
    built = cli(
        *("--config", str(CONFIGS / "cifar10.yaml"), "--trainer.default_root_dir", str(tmp_path / "runs")),
        *("--data.task.init_args.root", str(tmp_path), "--data.task.init_args.validation", "10"),
        *("--trainer.accelerator", "cpu", "--trainer.max_epochs", "1", "--model.evaluation.hosts", "0"),
        *("--data.n_envs", str(HOSTS), "--model.ppo.minibatches", "1", "--data.env.horizon", "1"),
        *("--data.env.executor", executor, "--trainer.enable_progress_bar", "false"),
        *(("--data.env.training.batch_size", str(size)) if size != 128 else ()),
    )

    assert built.datamodule.env.training.batch_size == size
    assert minibatch_sizes == expected_sizes(executor, size, number=140 // size)
