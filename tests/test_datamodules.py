"""Data modules: hosts have the configured settings, and vector environments of any kind train under a Trainer."""

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from esper_lightning.callbacks import RolloutState
from esper_lightning.controllers.learned import LearnedController
from esper_lightning.controllers.rules import WaitOnly
from esper_lightning.datamodules import HostPoolData, TickLoader, VectorData, find_host_devices
from esper_lightning.envs import Action, EnvConfig, HostPool, StepResult
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.evaluation.checkpoints import load_controller, load_policies
from esper_lightning.module import TamiyoModule
from esper_lightning.ppo.losses import Anneal, PPOConfig
from esper_lightning.ppo.policy import PolicyConfig
from esper_lightning.runtime.ranks import local_world
from esper_lightning.tasks import AugmentConfig, Digits, Measures, Task, TaskData
from tests.cue import CueMemory
from tests.runs import cli, differences, fit, only_run, tiny_host
from tests.tasks.stored import write_cifar10

CPU = torch.device("cpu")


def hosts(n_envs: int = 2) -> HostPoolData:
    env = EnvConfig(horizon=3, training=HostTraining(batch_size=32, batches=1))
    return HostPoolData(Digits(), tiny_host, env, n_envs=n_envs)


@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_a_loader_goes_on_in_mid_rollout_and_then_starts_anew(done: int) -> None:
    stopped, resumed = TickLoader(3), TickLoader(3)
    list(itertools.islice(stopped, done))
    resumed.load_state_dict(stopped.state_dict())

    assert list(resumed) == [0, 1, 2][done % 3 :]
    assert list(resumed) == [0, 1, 2] and len(resumed) == 3


def test_processes_that_lightning_starts_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    trainer = Trainer(accelerator="cpu", devices=2, logger=False)

    hosts(n_envs=4).build_for(trainer)

    assert local_world() == 2


def test_another_pool_of_the_same_kind_leaves_the_first_alone() -> None:
    data = hosts()
    data.build(CPU)
    before = data.state_dict()

    other = data.make_pool(3)
    other.step(WaitOnly().act(other))

    assert other.n_envs == 3
    assert other.space == data.pool.space
    assert differences(data.state_dict(), before) == []


def test_what_is_configured_for_hosts_is_what_runs(tmp_path: Path) -> None:
    chosen = ("optimizer=sgd", "lr=0.007", "weight_decay=0.001", "batch_size=16", "batches=3")
    more = ("max_grad_norm=2", "augment.pad=1", "augment.flip=true")
    flags = [f"--data.env.training.{choice}" for choice in (*chosen, *more)]

    built = fit(tmp_path, "--trainer.max_epochs=1", "--seed_everything=7", "--data.n_envs=3", *flags)

    pool = built.datamodule.pool
    assert built.datamodule.seed == 7
    assert pool.n_envs == 3
    for env in pool.envs:
        assert isinstance(env.optimizer, torch.optim.SGD)
        assert all((group["lr"], group["weight_decay"]) == (0.007, 0.001) for group in env.optimizer.param_groups)
        assert env.draw_batches(pool.data.train.samples).indices.shape == (3, 16)
        assert env.training.max_grad_norm == 2.0
        assert env.training.augment == AugmentConfig(pad=1, flip=True)
    assert any(len(env.optimizer.param_groups) > 1 for env in pool.envs)  # a seed existed


@pytest.mark.slow
def test_hosts_of_a_resumed_run_learn_as_the_new_command_says(tmp_path: Path) -> None:
    fit(tmp_path, "--trainer.max_epochs=1")

    resumed = fit(tmp_path, f"--ckpt_path={only_run(tmp_path).last}", "--data.env.training.lr=0.005")

    assert [env.optimizer.param_groups[0]["lr"] for env in resumed.datamodule.pool.envs] == [0.005, 0.005]


def test_hosts_have_the_devices_that_are_named_or_all_gpus_with_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    gpus = [torch.device("cuda", i) for i in range(3)]
    assert find_host_devices(None, "fused", gpus[1]) == find_host_devices(None, "streams", gpus[1], alone=False)
    assert find_host_devices(None, "streams", gpus[1]) == [gpus[1], gpus[0], gpus[2]]
    assert find_host_devices(["cuda:2", "cuda:0"], "fused", gpus[0]) == [gpus[2], gpus[0]]
    for names, alone, said in ((["cuda:1"], False, "for one process"), (["cpu"], True, "the policy on cuda:0")):
        with pytest.raises(ValueError, match=rf"env\.devices.*{said}"):
            find_host_devices(names, "loop", gpus[0], alone=alone)


def test_one_data_set_serves_every_pool_and_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """S5: a data set is loaded once, shared by all pools, and freed with them."""
    loads: list[Digits] = []
    real = Digits.load

    def counted(task: Digits) -> TaskData:
        loads.append(task)
        return real(task)

    monkeypatch.setattr(Digits, "load", counted)
    data = HostPoolData(Digits(), tiny_host, n_envs=2)
    data.build(CPU)
    other = data.make_pool(3)

    assert len(loads) == 1
    for ours, theirs in zip(data.pool.data[:3], other.data[:3], strict=True):
        assert all(a is b for a, b in zip(ours, theirs, strict=True))
    kept = weakref.ref(data.pool.data.train.inputs)
    del data, other, ours, theirs
    gc.collect()
    assert kept() is None


@pytest.mark.slow
@pytest.mark.parametrize(("executor", "size"), [("loop", 60), ("fused", 60), ("fused", 128)])
def test_the_configured_batch_size_runs_on_cifar10(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: str, size: int
) -> None:
    """F17: configs/cifar10.yaml trains with minibatches of its 128 samples, or of the given number."""
    sizes: list[int] = []
    measure, step = Task.measure, HostPool.step

    def begun(pool: HostPool, action: Action) -> StepResult:
        sizes.clear()  # drop calls before the tick, when seeds are tried out
        return step(pool, action)

    def watched(task: Task, outputs: Tensor, targets: Tensor) -> Measures:
        if outputs.requires_grad:
            sizes.append(len(targets))
        return measure(task, outputs, targets)

    monkeypatch.setattr(Task, "measure", watched)
    monkeypatch.setattr(HostPool, "step", begun)
    write_cifar10(tmp_path, monkeypatch, each=30)
    built = cli(
        *("--config", "cifar10", "--trainer.default_root_dir", str(tmp_path / "runs")),
        *("--data.task.init_args.root", str(tmp_path), "--data.task.init_args.validation", "10"),
        *("--trainer.accelerator", "cpu", "--trainer.max_epochs", "1", "--model.evaluation.hosts", "0"),
        *("--data.n_envs", "2", "--model.ppo.minibatches", "1", "--data.env.horizon", "1"),
        *("--data.env.executor", executor, "--trainer.enable_progress_bar", "false"),
        *(("--data.env.training.batch_size", str(size)) if size != 128 else ()),
    )

    assert built.datamodule.env.training.batch_size == size
    number = 140 // size
    assert sizes == ([2 * size] * number if executor == "fused" else [size] * (2 * number)), "of two hosts"


# Environments of any kind

PPO = PPOConfig(
    lr=Anneal(start=3e-3, end=3e-3),
    minibatches=2,
    gamma=0.9,
    entropy=Anneal(start=0.01, end=0.0),
    target_kl=None,
)


def trainer(epochs: int, *callbacks: Any, root: Path | None = None) -> Trainer:
    return Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[RolloutState(), *callbacks],
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )


def train(epochs: int, policy: PolicyConfig, delay: int = 3, **changes: Any) -> tuple[TamiyoModule, VectorData]:
    torch.manual_seed(0)
    data = VectorData(CueMemory, {"n_envs": 32, "horizon": 20, "delay": delay})
    module = TamiyoModule(policy, PPO, **changes)
    trainer(epochs).fit(module, datamodule=data)
    return module, data


def right_answers(module: TamiyoModule, delay: int, games: int = 64) -> float:
    """Return the share of games that the greedy policy wins."""
    pool = CueMemory(games, 1, delay)
    pool.reset(range(1000, 1000 + games))
    controller = LearnedController(module.policy, module.observation_norm)
    controller.reset(pool)
    for _ in range(delay + 2):
        pool.step(controller.act(pool))
    assert len(pool.recent) == games
    return sum(pool.recent) / games


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{}, {"asymmetric": True}, {"memory": "none"}], ids=str)
def test_a_cue_is_remembered_through_masks_and_two_heads_by_an_lstm_alone(kind: dict[str, Any]) -> None:
    module, _ = train(50, PolicyConfig(width=32, **kind))

    assert module.report.metrics["first_ratio_error"] < 1e-5
    right = right_answers(module, delay=3)
    assert right < 0.4 if "memory" in kind else right > 0.8
    assert set(module.report.metrics) >= {"entropy.row", "entropy.column", "kl", "explained_variance"}
    assert module.trainer.callback_metrics["rollout/right"] == module.collector.last_step.log["right"]


@pytest.mark.parametrize(
    ("settings", "privileged", "message"),
    [
        ({"ppo": PPOConfig(minibatches=9, sequence=4)}, True, "minibatches is 9, more than the 8 environments"),
        ({"ppo": PPOConfig(minibatches=5)}, True, "minibatches is 5, more than the 4 environments"),
        ({"ppo": PPOConfig(sequence=3)}, True, r"ppo\.sequence is 3, but a rollout has 8 ticks"),
        ({"policy": PolicyConfig(asymmetric=True)}, False, "these environments keep nothing from the policy"),
    ],
)
def test_settings_that_do_not_fit_the_environments_are_refused(
    settings: dict[str, Any], privileged: bool, message: str
) -> None:
    data = VectorData(CueMemory, {"n_envs": 4, "horizon": 8})
    data.pool.privileged = data.pool.privileged if privileged else None

    with pytest.raises(ValueError, match=message):
        trainer(1).fit(TamiyoModule(**settings), datamodule=data)


def test_a_run_goes_on_from_its_checkpoint_with_new_episodes(tmp_path: Path) -> None:
    def run(epochs: int, checkpoint: str | None = None) -> TamiyoModule:
        data = VectorData(CueMemory, {"n_envs": 4, "horizon": 20, "delay": 3})
        module = TamiyoModule(PolicyConfig(width=8, asymmetric=True), PPO)
        saving = ModelCheckpoint(tmp_path, "last", save_on_train_epoch_end=True, enable_version_counter=False)
        trainer(epochs, saving, root=tmp_path).fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        return module

    before = run(2)
    state = {name: value.clone() for name, value in before.state_dict().items()}
    after = run(2, str(tmp_path / "last.ckpt"))
    assert differences(state, dict(after.state_dict())) == [], "nothing was left to train"
    loaded = TamiyoModule.load_from_checkpoint(tmp_path / "last.ckpt")
    assert differences(state, dict(loaded.state_dict())) == [], "a critic with features of its own included"
    assert loaded.policy_shape == before.policy_shape and loaded.ppo == PPO

    further = run(3, str(tmp_path / "last.ckpt"))
    assert further.collector.ticks == 60 and further.collector.episode == 3
    hosts = HostPoolData(Digits(), tiny_host, n_envs=1)
    hosts.build(torch.device("cpu"))
    for load in (load_controller, lambda path: load_policies([path], hosts)):
        with pytest.raises(ValueError, match="its policy was not trained on hosts"):
            load(str(tmp_path / "last.ckpt"))
    assert further.report.metrics["first_ratio_error"] < 1e-5
    assert {"privileged_norm.mean", "observation_norm.mean"} <= set(further.state_dict())
