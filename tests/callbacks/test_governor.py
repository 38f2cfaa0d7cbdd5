"""Governor callback: with it hosts are watched and rolled back, without it they are not; and the lines it prints."""

import re
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from lightning import Callback, Trainer

from esper_lightning.callbacks import Governor
from esper_lightning.datamodules import HostPoolData, TaskConfig, VectorData
from esper_lightning.envs import HostPool, MixedPool, StepResult
from esper_lightning.envs.governor import Verdict
from esper_lightning.hosts import MLP
from esper_lightning.module import TamiyoModule
from esper_lightning.tasks import Digits, Synthetic
from tests.conftest import SMALL
from tests.cue import CueMemory
from tests.envs.breaking import ONLY_NAN_DIVERGES, breaking_epoch, set_weight_to_nan
from tests.runs import differences, fit, tiny_host, with_callback

LINE = re.compile(r"host (\d) \(RNG seed \d+\) (.*)")

BROKEN = [
    *(f"0 rolled back at tick {tick}, to tick 0: loss is nan" for tick in (1, 2, 3)),
    "0 ended at tick 4, to tick 0: loss is nan, after 3 rollbacks",
    "1 rolled back at tick 5, to tick 0: loss is nan",
]
"""Host and fate in each line of a rollout that `SpoilHosts` has spoilt."""


class SpoilHosts(Callback):
    """Makes host 0 diverge in every tick, and host 1 in the last tick of each rollout."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        pool, last = pl_module.collector.pool, trainer.is_last_batch
        tick = pool.executor.train_and_validate

        def broken(*args: object, **more: object) -> object:
            pool.executor.train_and_validate = tick
            for host in (0, 1) if last else (0,):
                set_weight_to_nan(pool.envs[host])
            return tick(*args, **more)

        pool.executor.train_and_validate = broken


def test_hosts_that_diverged_have_a_line_with_their_fate_and_beyond_the_most_lines_of_a_rollout_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper_lightning.callbacks.governor.MAX_LINES", 4)
    fit(tmp_path, "--trainer.max_epochs=2", *with_callback(SpoilHosts))
    lines = capsys.readouterr().out.splitlines()

    found = [match for match in map(LINE.fullmatch, lines) if match]
    assert [f"{line[1]} {line[2]}" for line in found] == 2 * BROKEN[:4]
    rest = "1 more hosts rolled back in this rollout: if there are many, lower data.env.training.lr"
    assert [line for line in lines if "more hosts" in line] == [rest] * 2


@pytest.fixture
def data() -> HostPoolData:
    """Data module with two hosts that are not watched yet."""
    made = HostPoolData(Digits(validation=100, test=100), tiny_host, SMALL, n_envs=2)
    made.build(torch.device("cpu"))
    return made


def trainer_of(data: HostPoolData | VectorData, governor: Governor) -> Trainer:
    """Return a trainer whose data module is `data`, after the setup of its only callback."""
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[governor])
    trainer.datamodule = data
    governor.setup(trainer, TamiyoModule(), "fit")
    return trainer


def wait(pool: HostPool, *broken: int) -> StepResult:
    """Step the pool without actions; the training of the hosts `broken` diverges."""
    with breaking_epoch(pool, broken):
        return pool.step(pool.space.zeros(pool.n_envs, pool.device))


def is_finite(pool: HostPool | MixedPool, host: int) -> bool:
    return all(tensor.isfinite().all() for tensor in pool.envs[host].network.state_dict().values())


def test_a_host_that_diverges_gets_its_own_last_snapshot_back_within_the_tick(data: HostPoolData) -> None:
    trainer_of(data, Governor(ONLY_NAN_DIVERGES))
    pool = data.pool
    pool.reset([3, 4])
    for _ in range(ONLY_NAN_DIVERGES.snapshot_every):
        wait(pool)
    kept = [deepcopy(env.network.state_dict()) for env in pool.envs]
    assert differences(*kept), "two hosts differ"
    wait(pool)

    step = wait(pool, 0)

    (verdict,) = step.verdicts
    assert (verdict.host, verdict.decision, verdict.restored) == (0, Verdict.ROLL_BACK, 2)
    assert differences(dict(kept[0]), dict(pool.envs[0].network.state_dict())) == []
    assert differences(dict(kept[1]), dict(pool.envs[1].network.state_dict())) != [], "the other host trains on"
    assert step.reward[0] == -ONLY_NAN_DIVERGES.penalty
    assert step.terminated.tolist() == [True, False]


def test_without_the_callback_no_host_is_watched(data: HostPoolData) -> None:
    pool = data.pool
    pool.reset([3, 4])

    step = wait(pool, 0)

    assert step.verdicts == step.vetoes == [] and not step.terminated.any()
    assert "rollback" not in step.terms
    assert [is_finite(pool, host) for host in (0, 1)] == [False, True]
    assert pool.governor is None
    assert all(env.monitor is None and env.state_dict()["monitor"] is None for env in pool.envs), "and no snapshot"


def test_hosts_are_watched_from_the_setup_of_the_callback_to_its_teardown(data: HostPoolData) -> None:
    pool, governor = data.pool, Governor(ONLY_NAN_DIVERGES)
    trainer = trainer_of(data, governor)
    before = deepcopy(pool.envs[1].network.state_dict())
    assert len(wait(pool, 1).verdicts) == len(wait(data.make_pool(3), 2).verdicts) == 1, "those of comparisons, too"
    assert differences(dict(before), dict(pool.envs[1].network.state_dict())) == [], "the state at the setup"

    governor.teardown(trainer, TamiyoModule(), "fit")

    assert wait(pool, 1).verdicts == []
    assert wait(data.make_pool(1), 0).verdicts == []


def test_hosts_of_every_task_are_watched() -> None:
    table = TaskConfig(task=Synthetic(shape=[6], classes=3, train=64, validation=32, test=32), host=MLP, n_envs=2)
    data = HostPoolData(Digits(validation=100, test=100), tiny_host, SMALL, n_envs=1, also={"table": table})
    data.build(torch.device("cpu"))
    trainer_of(data, Governor(ONLY_NAN_DIVERGES))
    data.pool.reset([3, 4, 5])

    with breaking_epoch(data.pools["table"], [1]):
        (verdict,) = data.pool.step(data.pool.space.zeros(3, data.pool.device)).verdicts

    assert verdict.host == 2 and is_finite(data.pool, 2)
    assert len(wait(data.make_pool(1, task="table"), 0).verdicts) == 1


def test_environments_that_are_no_hosts_are_refused() -> None:
    with pytest.raises(
        ValueError, match="the callback Governor watches hosts, and VectorData has none; leave the callback"
    ):
        trainer_of(VectorData(CueMemory, {"n_envs": 4, "horizon": 8}), Governor())
