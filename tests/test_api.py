"""Python programs: a Trainer trains the same policy as the command line, and `grow` grows a network of one's own."""

import re
import signal
from collections.abc import Callable
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import esper_lightning
from esper_lightning import (
    EnvConfig,
    HostPoolData,
    HostTraining,
    PolicyConfig,
    PPOConfig,
    TamiyoModule,
    default_callbacks,
    grow,
)
from esper_lightning.api import GrownNetwork
from esper_lightning.cli.run_report import read_run
from esper_lightning.envs import ActionConfig
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.tasks import Digits
from esper_lightning.telemetry.events import Validated
from tests.callbacks.grow.trainings import Plan
from tests.conftest import small_host
from tests.decisions import germinate
from tests.runs import HORIZON, ROOT, Run, differences, fit, load, make_trainer, only_run


def hosts() -> HostPoolData:
    """Return the hosts of `tests.runs.TINY`."""
    env = EnvConfig(
        horizon=HORIZON,
        training=HostTraining(batches=2, lr=0.02, max_grad_norm=None),
        lifecycle=LifecycleConfig(
            isolation="straight_through", training_ticks=0, min_contribution=None, auto_cull=False, embargo_ticks=0
        ),
        actions=ActionConfig(tempos={"FAST": 2}),
    )
    return HostPoolData(Digits(), small_host, env, n_envs=2, val_hosts=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[TamiyoModule, Run]:
    data, root = hosts(), tmp_path_factory.mktemp("python")
    seed_everything(data.seed, verbose=False)
    module = TamiyoModule(PolicyConfig(width=64), PPOConfig(minibatches=2))
    make_trainer(root, *default_callbacks(), logger=TensorBoardLogger(root, name="")).fit(module, datamodule=data)
    return module, only_run(root)


def test_python_and_the_command_line_train_the_same_policy(trained: tuple[TamiyoModule, Run], tmp_path: Path) -> None:
    fit(tmp_path, "--trainer.max_epochs=2")

    ours, theirs = load(trained[1].last), load(only_run(tmp_path).last)
    for part in ("state_dict", "HostPoolData"):
        assert differences(ours[part], theirs[part]) == []
    assert (trained[1].folder / "events.jsonl").is_file()


def test_metrics_of_a_module_are_the_last_points_of_its_plots(trained: tuple[TamiyoModule, Run]) -> None:
    module, run = trained
    points = {tag: of_tag[-1][1] for tag, of_tag in run.scalars().items()}

    shared = points.keys() & module.metrics.keys()
    assert len(shared) > 20 and all(isnan(module.metrics[tag]) for tag in module.metrics.keys() - shared)
    documented = re.findall(r"`((?:rollout|train)/[\w./]+)`", (ROOT / "docs" / "guides" / "lightning.md").read_text())
    assert documented and set(documented) <= shared
    assert {tag: points[tag] for tag in shared} == pytest.approx({tag: module.metrics[tag] for tag in shared}, rel=1e-5)


def test_settings_that_do_not_fit_together_are_a_value_error(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"RewardConfig.gamma is 1.0 and PPOConfig.gamma 0.9; give both the same"):
        trainer.fit(TamiyoModule(ppo=PPOConfig(minibatches=2, gamma=0.9)), datamodule=hosts())


def network_of_digits() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def batches_of_digits() -> list[tuple[torch.Tensor, torch.Tensor]]:
    images, digits = (torch.tensor(array) for array in load_digits(return_X_y=True))
    return list(zip((images.float() / 16.0).view(-1, 1, 8, 8).split(64), digits.split(64), strict=True))


def grown(network: nn.Module, batches: int = 4, slot: str = "2", **settings: Any) -> GrownNetwork:
    """Grow a network of digits behind one layer, with so many training batches of 64."""
    data = batches_of_digits()
    return grow(network, data[:batches], data[20:24], [slot], accelerator="cpu", **settings)


def names(network: nn.Module) -> list[str]:
    return [name for name, _ in network.named_parameters()]


def test_a_network_of_ones_own_grows() -> None:
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10))
    modes = list[bool]()
    network.eval().register_forward_hook(lambda module, *_: modes.append(module.training))
    before = sum(parameter.numel() for parameter in network.parameters())

    result = grown(network, 10, epochs=4, lr=0.01, controller="periodic")

    assert result.network is network and len(result.accuracy) == 4
    assert list(result.seeds) == ["2"]
    assert sum(parameter.numel() for parameter in network.parameters()) > before
    assert result.accuracy[-1] > result.accuracy[0]
    assert any(modes), "it was left in evaluation mode, and is trained"


def test_a_control_gets_the_order_of_data_from_a_loader_that_the_grown_network_got() -> None:
    images, digits = (torch.cat(parts[:8]) for parts in zip(*batches_of_digits(), strict=True))
    shuffled = DataLoader(TensorDataset(images, digits), 64, shuffle=True, generator=torch.Generator().manual_seed(0))

    result = grow(
        network_of_digits(),
        shuffled,
        batches_of_digits()[20:24],
        ["2"],
        epochs=2,
        controller="wait",
        controls=True,
        accelerator="cpu",
    )

    assert result.controls["ungrown"] == result.accuracy


def test_the_controls_are_trained_on_copies_and_change_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def result(**settings: Any) -> GrownNetwork:
        return grown(network_of_digits(), 8, epochs=6, lr=0.01, **settings)

    growing: dict[str, Any] = {"controller": Plan({3: germinate(0)}), "blueprints": ["lora"]}
    alone, ungrown = result(**growing), result(controller="wait")
    compared = result(**growing, controls=True, folder=tmp_path)

    assert ungrown.seeds == {} and names(ungrown.network) == names(network_of_digits())
    assert compared.accuracy == alone.accuracy and compared.seeds == alone.seeds and alone.controls == {}
    equal_flops = [f"{name}, equal FLOPs" for name in ("ungrown", "built in")]
    assert list(compared.controls) == ["ungrown", equal_flops[0], "built in", equal_flops[1]]
    assert compared.controls["ungrown"] == ungrown.accuracy
    whole, equal = compared.controls["built in"], compared.controls["built in, equal FLOPs"]
    longer = compared.controls["ungrown, equal FLOPs"]
    assert longer[:6] == ungrown.accuracy and len(longer) > 6, "the same training goes on"
    assert len(whole) == len(equal) == 6 and equal[:5] == whole[:5], "the same training, which ends within an epoch"
    compared.best.eval()
    right = [(compared.best(images).argmax(1) == digits).float() for images, digits in batches_of_digits()[20:24]]
    ends = [values[-1] for values in (compared.accuracy, *compared.controls.values())]
    assert float(torch.cat(right).mean()) == pytest.approx(max(ends))
    said = capsys.readouterr().out
    for name, values in {"grown": compared.accuracy, **compared.controls}.items():
        assert f"\n{name}: validation accuracy {values[-1]:.4f}\n" in said
    for name, folder in {"grown": "grown", "built in, equal FLOPs": "built_in_equal_FLOPs"}.items():
        validations = read_run(tmp_path / folder / "version_0").events[Validated]
        last = validations[-1].metrics["val_acc"]
        assert last == pytest.approx({"grown": compared.accuracy, **compared.controls}[name][len(validations) - 1])
    level = result(controller="wait", controls=True)
    assert list(level.controls) == ["ungrown"] and level.best is level.network, "the grown one, if both are equal"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epochs": 0}, "^epochs must be at least 1, got 0$"),
        ({"epochs": 2, "lr": 1e30}, "^grow: the training has diverged: .* lower lr, which is 1e.30$"),
        ({"slot": "layer1"}, "layer1"),
    ],
)
def test_a_training_without_a_result_is_a_value_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        grown(network_of_digits(), **options)


@pytest.mark.parametrize(
    ("outputs", "targets", "shapes"),
    [
        (1, lambda y: (y == 0).float(), r"\[64, 1\] and \[64\]"),
        (10, lambda y: y / 10, r"\[64, 10\] and \[64\]"),
        (10, lambda y: F.one_hot(y, 10), r"\[64, 10\] and \[64, 10\]"),
        (10, lambda y: y[:, None], r"\[64, 10\] and \[64, 1\]"),
    ],
)
def test_outputs_of_which_accuracy_would_be_a_constant_are_refused(
    outputs: int, targets: Callable[[torch.Tensor], torch.Tensor], shapes: str
) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, outputs))
    batches = [(torch.randn(64, 1, 8, 8), targets(torch.arange(64) % 10))]
    with pytest.raises(ValueError, match=f"grow: accuracy needs outputs .* got {shapes}; for other tasks"):
        grow(network, batches, batches, ["2"], loss=lambda outputs, _: outputs.square().mean())


@pytest.mark.parametrize("hidden", [1, 63, 64])
def test_accuracy_is_that_of_the_labels_that_the_loss_does_not_ignore(hidden: int) -> None:
    images, digits = batches_of_digits()[20]
    padded = torch.where(torch.arange(64) < hidden, -100, digits)
    part = [(images[32:], digits[32:])]
    network = network_of_digits()

    result = grow(network, batches_of_digits()[:4], [(images, padded), *part], ["2"], epochs=1, accelerator="cpu")

    seen, labels = torch.cat([images, images[32:]]), torch.cat([padded, digits[32:]])
    right = (network.eval()(seen).argmax(1) == labels)[labels >= 0]
    assert result.accuracy == pytest.approx([float(right.float().mean())])


def test_ctrl_c_reaches_the_program_that_grows_a_network_and_so_does_the_next_one() -> None:
    network, handler = network_of_digits(), signal.getsignal(signal.SIGINT)
    hook = network.register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            grown(network, epochs=2)

        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        hook.remove()
        signal.signal(signal.SIGINT, handler)


def test_every_name_of_the_package_is_there() -> None:
    for name in esper_lightning.EXPORTS:
        assert getattr(esper_lightning, name).__name__ == name and name in dir(esper_lightning)
    assert len(esper_lightning.EXPORTS) == 17
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        esper_lightning.trian  # noqa: B018
