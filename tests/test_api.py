"""Functions for Python programs: the same policy and comparison as on the command line, and growth of a network."""

import random
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import esper_lightning
from esper_lightning import EnvConfig, HostPoolData, HostTraining, PolicyConfig, PPOConfig, evaluate, grow, train
from esper_lightning.api import GrownNetwork, TrainedRun
from esper_lightning.controllers.learned import Hosts
from esper_lightning.controllers.rules import RandomValid
from esper_lightning.datamodules.hosts import TaskConfig
from esper_lightning.envs import Action, ActionConfig
from esper_lightning.evaluation.comparison import Comparison, EvaluationConfig
from esper_lightning.evaluation.search import SearchConfig
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.hosts import CNN, MLP
from esper_lightning.run_report import read_run
from esper_lightning.tasks import Digits, Tabular
from tests.callbacks.grow.trainings import Plan
from tests.decisions import germinate
from tests.runs import HORIZON, ROOT, Run, differences, fit, load, only_run

HOST = partial(
    CNN, base=4, kernel=1, pools=2, slots=["block1.pool", "block2.pool", "block3"], isolate=False, channels_last=False
)
PPO = PPOConfig(minibatches=2)


def alone(**settings: Any) -> EvaluationConfig:
    """Return the settings of a comparison of two hosts without controls."""
    return EvaluationConfig(**{"hosts": 2, "controls": False} | settings)


PERIODIC = alone(against=["periodic"])


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
    return HostPoolData(Digits(), HOST, env, n_envs=2, val_hosts=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    root = tmp_path_factory.mktemp("python")
    return train(hosts(), rollouts=2, policy=PolicyConfig(width=64), ppo=PPO, folder=root, accelerator="cpu")


def test_python_and_the_command_line_train_the_same_policy(run: TrainedRun, tmp_path: Path) -> None:
    fit(tmp_path, "--trainer.max_epochs=2")

    ours, theirs = load(run.checkpoint), load(only_run(tmp_path).last)
    for part in ("state_dict", "HostPoolData"):
        assert differences(ours[part], theirs[part]) == []
    assert (run.folder / "events.jsonl").is_file()


def test_metrics_of_a_run_are_the_last_points_of_its_plots(run: TrainedRun) -> None:
    points = {tag: of_tag[-1][1] for tag, of_tag in Run(run.folder).scalars().items()}

    shared = points.keys() & run.metrics.keys()
    assert points.keys() - {"hparams", "hp_metric"} >= run.metrics.keys() == shared
    documented = re.findall(
        r"`((?:rollout|train|reward)/[\w./]+)`", (ROOT / "docs" / "guides" / "lightning.md").read_text()
    )
    assert documented and set(documented) <= shared
    assert {tag: points[tag] for tag in shared} == pytest.approx({tag: run.metrics[tag] for tag in shared}, rel=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint(run: TrainedRun) -> None:
    longer = train(
        hosts(),
        rollouts=3,
        policy=PolicyConfig(width=64),
        ppo=PPO,
        accelerator="cpu",
        resume=run.checkpoint,
    )

    assert longer.folder == run.folder
    assert load(longer.checkpoint)["epoch"] == 2
    with pytest.raises(ValueError, match="has had its 3 rollouts already; give more rollouts"):
        train(hosts(), rollouts=3, policy=PolicyConfig(width=64), ppo=PPO, accelerator="cpu", resume=run.checkpoint)


@pytest.mark.slow
def test_a_run_and_its_checkpoint_are_compared_alike(
    run: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(load(run.checkpoint), tmp_path / "copy.ckpt")
    results = [
        evaluate(TrainedRun(*run), config=PERIODIC),
        evaluate(run.checkpoint, hosts(), PERIODIC, folder=tmp_path / "tables"),
    ]

    assert [entry.name for entry in results[0].entries] == ["tamiyo", "periodic"]
    for ours, theirs in zip(*(result.entries for result in results), strict=True):
        assert ours.values("objective").tolist() == theirs.values("objective").tolist()
    assert "test accuracy" in capsys.readouterr().out
    assert (tmp_path / "tables" / "evaluation.csv").is_file()


class Gambling(RandomValid):
    """Controller that draws from the global generators of Python, numpy and torch."""

    def __init__(self) -> None:
        super().__init__(rng_seed=0)

    def act(self, pool: Hosts) -> Action:
        drawn = random.random() + np.random.rand() + float(torch.rand(()))
        self.generator.manual_seed(int(1e12 * drawn))
        return super().act(pool)


@pytest.mark.slow
def test_the_number_of_processes_changes_no_number_of_a_comparison() -> None:
    expected, found = (evaluate("tamiyo", hosts(), EvaluationConfig(hosts=4, jobs=jobs)) for jobs in (1, 2))

    assert [entry.name for entry in found.entries] == [entry.name for entry in expected.entries]
    for ours, theirs in zip(found.entries, expected.entries, strict=True):
        for column in ("objective", "loss", "parameters", "flops", "ticks"):
            assert np.array_equal(ours.values(column), theirs.values(column)), (ours.name, column)
    assert found.schedules == expected.schedules and found.notes == expected.notes


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_controller_draws_the_same_numbers_in_every_comparison(jobs: int) -> None:
    compare = partial(evaluate, None, hosts())
    own = f"{__name__}.Gambling"
    (first,) = compare(alone(against=[own])).entries
    *_, again = compare(alone(against=["random", own], jobs=jobs)).entries

    assert again.name == own
    assert again.values("objective").tolist() == first.values("objective").tolist()


def test_a_search_whose_schedules_are_no_rows_of_the_comparison_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    data = hosts()
    data.build(torch.device("cpu"))
    make_pool, made = data.make_pool, list[int]()
    monkeypatch.setattr(data, "make_pool", lambda n_envs, **given: made.append(n_envs) or make_pool(n_envs, **given))

    comparison = Comparison(alone(against=["random"], search=SearchConfig(steps=999_999)))
    (row,) = comparison.run(data, []).entries

    assert row.name == "random" and made == [2], "no pool for a search"


def test_the_policy_of_the_package_is_compared_on_any_hosts(run: TrainedRun) -> None:
    result = evaluate("tamiyo", hosts(), alone(against=["small static"]))

    assert [entry.name for entry in result.entries] == ["tamiyo", "small static"]
    assert [policy.source for policy in result.policies] == ["tamiyo"]
    own, copied = (evaluate(policy, data, alone(against=[])) for policy, data in ((run, None), (run, hosts())))
    assert np.array_equal(own.reference.values("objective"), copied.reference.values("objective"))
    slow = HostPoolData(Digits(), CNN, EnvConfig(training=HostTraining(batches=2)), n_envs=2)
    with pytest.raises(ValueError, match=r'set data.env.actions as in its training: \{"tempos": \{"FAST": 2\}\}'):
        evaluate("tamiyo", slow, alone(against=[]))


def test_of_several_tasks_one_is_named_and_played() -> None:
    data = HostPoolData(
        Digits(), HOST, hosts().env, n_envs=2, also={"wine": TaskConfig(task=Tabular("wine"), host=MLP, n_envs=2)}
    )

    with pytest.raises(ValueError, match="returns the result of one task; give task: Digits, wine"):
        evaluate(None, data, alone(against=["small static"]))
    (row,) = evaluate(None, data, alone(against=["small static"]), task="wine").entries

    assert row.values("objective").mean() > 0.2


def test_what_does_not_fit_together_is_a_value_error(run: TrainedRun) -> None:
    with pytest.raises(ValueError, match=r"RewardConfig.gamma is 1.0 and PPOConfig.gamma 0.9; give both the same"):
        train(hosts(), ppo=PPOConfig(minibatches=2, gamma=0.9))
    with pytest.raises(ValueError, match="rollouts must be at least 1, got 0"):
        train(hosts(), rollouts=0)
    with pytest.raises(ValueError, match="evaluate needs hosts; give data"):
        evaluate(run.checkpoint)
    with pytest.raises(ValueError, match="unknown controller 'climbin'; did you mean 'climbing'"):
        evaluate(run, config=alone(against=["climbin"]))


def batches(size: int) -> list[tuple[Tensor, Tensor]]:
    images, digits = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = (images.float() / 16.0).view(-1, 1, 8, 8)
    return list(zip(images.split(size), digits.split(size), strict=True))


def test_a_network_of_ones_own_grows() -> None:
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10))
    data = batches(64)
    before = sum(parameter.numel() for parameter in network.parameters())

    grown = grow(network, data[:10], data[20:24], ["2"], epochs=4, lr=0.01, controller="periodic", accelerator="cpu")

    assert grown.network is network and len(grown.accuracy) == 4
    assert list(grown.seeds) == ["2"]
    assert sum(parameter.numel() for parameter in network.parameters()) > before
    assert grown.accuracy[-1] > grown.accuracy[0]
    with pytest.raises(ValueError, match="layer1"):
        grow(network, data[:10], data[20:24], ["layer1"])


def test_a_network_that_was_left_in_evaluation_mode_is_trained() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)).eval()
    modes = []
    network.register_forward_hook(lambda module, *_: modes.append(module.training))

    grow(network, batches(64)[:4], batches(64)[20:22], ["2"], epochs=1, accelerator="cpu")

    assert any(modes)


def network_of_digits() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def test_the_ungrown_control_of_a_network_has_its_parameters_alone() -> None:
    network = network_of_digits()
    names = [name for name, _ in network.named_parameters()]

    grown = grow(network, batches(64)[:4], batches(64)[20:22], ["2"], epochs=3, controller="wait", accelerator="cpu")

    assert grown.seeds == {} and [name for name, _ in network.named_parameters()] == names


def test_the_controls_are_trained_on_copies_and_change_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def grown(**settings: Any) -> GrownNetwork:
        data = batches(64)
        return grow(network_of_digits(), data[:8], data[20:22], ["2"], epochs=6, lr=0.01, accelerator="cpu", **settings)

    growing: dict[str, Any] = {"controller": Plan({3: germinate(0)}), "blueprints": ["lora"]}
    alone, ungrown = grown(**growing), grown(controller="wait")
    compared = grown(**growing, controls=True, folder=tmp_path)

    assert compared.accuracy == alone.accuracy and compared.seeds == alone.seeds and alone.controls == {}
    assert list(compared.controls) == ["ungrown", "built in", "built in, equal FLOPs"]
    assert compared.controls["ungrown"] == ungrown.accuracy
    whole, equal = compared.controls["built in"], compared.controls["built in, equal FLOPs"]
    assert len(whole) == len(equal) == 6 and equal[:5] == whole[:5], "the same training, which ends within an epoch"
    said = capsys.readouterr().out
    for name, values in {"grown": compared.accuracy, **compared.controls}.items():
        assert f"\n{name}: validation accuracy {values[-1]:.4f}\n" in said
    for name, folder in {"grown": "grown", "built in, equal FLOPs": "built_in_equal_FLOPs"}.items():
        run = read_run(tmp_path / folder / "version_0")
        last = run.validations[-1].metrics["val_acc"]
        assert last == pytest.approx({"grown": compared.accuracy, **compared.controls}[name][len(run.validations) - 1])
    assert list(grown(controller="wait", controls=True).controls) == ["ungrown"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epochs": 0}, "^epochs must be at least 1, got 0$"),
        ({"epochs": 2, "lr": 1e30}, "^grow: the training has diverged: .* lower lr, which is 1e.30$"),
    ],
)
def test_a_training_without_a_result_is_a_value_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        grow(network_of_digits(), batches(64)[:4], batches(64)[20:22], ["2"], accelerator="cpu", **options)


def test_ctrl_c_reaches_the_program_that_grows_a_network_and_so_does_the_next_one() -> None:
    network, handler = network_of_digits(), signal.getsignal(signal.SIGINT)
    hook = network.register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            grow(network, batches(64)[:4], batches(64)[20:22], ["2"], epochs=2, accelerator="cpu")

        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        hook.remove()
        signal.signal(signal.SIGINT, handler)


def test_every_name_of_the_package_is_there() -> None:
    for name in esper_lightning.EXPORTS:
        assert getattr(esper_lightning, name).__name__ == name and name in dir(esper_lightning)
    assert len(esper_lightning.EXPORTS) == 19
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        esper_lightning.trian  # noqa: B018
