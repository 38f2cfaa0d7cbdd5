"""Promises of docs/concepts/governor.md and docs/guides/troubleshooting.md hold under attack, and over long runs."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer

from esper_lightning.checkpointing.atomic_io import size_on_disk
from esper_lightning.checkpointing.validate import open_checkpoint
from esper_lightning.controllers.random import RandomValid
from esper_lightning.envs import HostPool, Op, StepResult
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.governor.judge import GovernorConfig, Verdict
from esper_lightning.growth.stages import Stage
from esper_lightning.module import TamiyoModule
from tests.decisions import WAIT, act, fossilize, germinate
from tests.envs.breaking import set_weight_to_nan
from tests.runs import HORIZON as HORIZON_OF_RUNS
from tests.runs import Run, differences, fit, load, only_run, with_callback

pytestmark = pytest.mark.slow

MakePool = Callable[..., HostPool]

HOSTS, HORIZON = 3, 12


def wait(pool: HostPool, ticks: int = 1) -> StepResult:
    for _ in range(ticks):
        step = pool.step(act(*[WAIT] * len(pool.envs)))
    return step


def pool_of(make_pool: MakePool, executor: str = "loop", *, horizon: int = HORIZON, **rules: Any) -> HostPool:
    """Return a pool whose hosts have just begun an episode."""
    pool = make_pool(HOSTS, governor=GovernorConfig(**rules), horizon=horizon, executor=executor)
    pool.reset(range(HOSTS))
    return pool


def outcomes(step: StepResult) -> list[tuple[int, Verdict]]:
    return [(word.host, word.verdict.outcome) for word in step.verdicts]


def weights(env: HostEnv) -> dict[str, Any]:
    return deepcopy(dict(env.network.state_dict()))


def largest_float(env: HostEnv) -> None:
    with torch.no_grad():
        for parameter in env.network.parameters():
            parameter.fill_(torch.finfo(parameter.dtype).max)


def second_moment_nan(env: HostEnv) -> None:
    for state in env.optimizer.state.values():
        state["exp_avg_sq"].fill_(math.nan)


def learning_rate_inf(env: HostEnv) -> None:
    for group in env.optimizer.param_groups:
        group["lr"] = math.inf


@torch.no_grad()
def head_of_large_weights(env: HostEnv) -> None:
    """Make the loss large and finite, however often it is called: the logits are right or wrong by far."""
    weight = env.network.head.weight
    weight.mul_(-1e4 / weight.abs().max())


@contextmanager
def losses_above(pool: HostPool, host: int) -> Iterator[None]:
    """Make the weights of a host large in every tick."""
    train = pool.executor.train_and_validate

    def broken(*args: Any, **more: Any) -> Any:
        head_of_large_weights(pool.envs[host])
        return train(*args, **more)

    pool.executor.train_and_validate = broken
    yield
    pool.executor.train_and_validate = train


@pytest.mark.parametrize("executor", ["loop", "threads", "fused"])
@pytest.mark.parametrize("fault", [largest_float, second_moment_nan, learning_rate_inf])
def test_a_host_that_breaks_after_its_first_tick_returns_to_the_beginning(
    make_pool: MakePool, executor: str, fault: Callable[[HostEnv], None]
) -> None:
    pool = pool_of(make_pool, executor)
    first = weights(pool.envs[1])
    wait(pool)
    fault(pool.envs[1])
    step = wait(pool)

    assert outcomes(step) == [(1, Verdict.ROLL_BACK)]
    assert differences(first, weights(pool.envs[1])) == []
    assert step.reward[1] == -1.0 and step.terminated.tolist() == [False, True, False]
    assert outcomes(wait(pool)) == [], "the host goes on"


@pytest.mark.parametrize("executor", ["loop", "threads", "fused"])
def test_hosts_that_all_break_in_every_tick_end_and_the_next_episode_is_sound(
    make_pool: MakePool, executor: str
) -> None:
    pool = pool_of(make_pool, executor)
    verdicts: list[Verdict] = []
    for _ in range(HORIZON):
        for env in pool.envs:
            set_weight_to_nan(env)
        step = wait(pool)
        verdicts += [outcome for host, outcome in outcomes(step) if host == 0]
        assert all(part.isfinite().all() for part in (*step.metrics, step.reward, step.observation.features))

    assert verdicts == [Verdict.ROLL_BACK] * 3 + [Verdict.END]
    assert pool.masks.ended.all() and step.truncated.all()
    pool.reset(range(HOSTS))
    step = wait(pool)
    assert step.verdicts == [] and not pool.masks.ended.any() and step.metrics.loss.isfinite().all()


@pytest.mark.parametrize("executor", ["loop", "threads"])
def test_hosts_beside_two_that_break_in_the_same_tick_are_equal_bit_for_bit(make_pool: MakePool, executor: str) -> None:
    pool = pool_of(make_pool, executor)
    wait(pool, 4)
    untouched = weights(pool.envs[1])
    pool.reset(range(HOSTS))
    wait(pool, 2)
    set_weight_to_nan(pool.envs[0])
    set_weight_to_nan(pool.envs[2])
    assert outcomes(wait(pool)) == [(0, Verdict.ROLL_BACK), (2, Verdict.ROLL_BACK)]
    wait(pool)

    assert differences(untouched, weights(pool.envs[1])) == []


def test_a_host_that_breaks_in_the_last_tick_is_restored_and_measured(make_pool: MakePool) -> None:
    pool = pool_of(make_pool)
    wait(pool, HORIZON - 1)
    set_weight_to_nan(pool.envs[1])
    step = wait(pool)

    assert outcomes(step) == [(1, Verdict.ROLL_BACK)] and step.reward[1] == -1.0
    assert pool.test_accuracy().isfinite().all()


def test_a_large_loss_is_suspicious_twice_and_then_rolled_back(make_pool: MakePool) -> None:
    pool = pool_of(make_pool)
    with losses_above(pool, 1):
        seen = [outcomes(wait(pool)) for _ in range(3)]

    assert seen == [[(1, Verdict.SUSPICIOUS)], [(1, Verdict.SUSPICIOUS)], [(1, Verdict.ROLL_BACK)]]


def test_a_large_loss_of_two_ticks_is_no_divergence(make_pool: MakePool) -> None:
    pool = pool_of(make_pool)
    good = deepcopy(pool.envs[1].network.head.weight.detach())
    with losses_above(pool, 1):
        wait(pool, 2)
    with torch.no_grad():
        pool.envs[1].network.head.weight.copy_(good)

    assert all(verdict is not Verdict.ROLL_BACK for _ in range(3) for _, verdict in outcomes(wait(pool)))


def test_after_a_rollback_only_a_number_that_is_not_finite_rolls_back_for_five_ticks(make_pool: MakePool) -> None:
    pool = pool_of(make_pool)
    set_weight_to_nan(pool.envs[1])
    wait(pool)
    with losses_above(pool, 1):
        seen = [outcomes(wait(pool)) for _ in range(5)]
    assert seen == [[(1, Verdict.SUSPICIOUS)]] * 5
    set_weight_to_nan(pool.envs[1])
    assert outcomes(wait(pool)) == [(1, Verdict.ROLL_BACK)]


def test_a_suspicious_host_gets_no_seed_and_the_policy_learns_from_waiting(make_pool: MakePool) -> None:
    pool = pool_of(make_pool)
    with losses_above(pool, 1):
        wait(pool)
        step = pool.step(act(*[germinate(0)] * HOSTS))

    assert [veto.host for veto in step.vetoes] == [1]
    assert step.action.op[1] == 0 and [env.slots[0].occupied for env in pool.envs] == [True, False, True]


def test_a_seed_above_the_largest_growth_is_vetoed(make_pool: MakePool) -> None:
    pool = pool_of(make_pool, max_growth=1.0)
    step = pool.step(act(*[germinate(0, 1)] * HOSTS))

    assert [veto.host for veto in step.vetoes] == [0, 1, 2]
    assert not any(env.slots[0].occupied for env in pool.envs)


def test_a_fossilized_seed_survives_a_rollback_and_another_seed_does_not(make_pool: MakePool) -> None:
    pool = pool_of(make_pool)
    pool.step(act(*[germinate(0)] * HOSTS))
    for _ in range(HORIZON - 4):
        if pool.envs[1].slots[0].stage is Stage.PROBATIONARY:
            break
        wait(pool)
    pool.step(act(WAIT, fossilize(0), WAIT))
    assert pool.envs[1].slots[0].stage is Stage.FOSSILIZED
    pool.step(act(WAIT, germinate(1), WAIT))
    set_weight_to_nan(pool.envs[1])
    assert outcomes(wait(pool)) == [(1, Verdict.ROLL_BACK)]

    assert [slot.stage is Stage.FOSSILIZED for slot in pool.envs[1].slots] == [True, False, False]
    assert not pool.envs[1].slots[1].occupied


def test_learning_rates_fall_with_each_rollback_until_the_episode_ends(make_pool: MakePool) -> None:
    pool = pool_of(make_pool, lr_factor=0.5)
    env = pool.envs[1]
    before = env.optimizer.param_groups[0]["lr"]
    for power in (1, 2):
        set_weight_to_nan(env)
        wait(pool)
        assert env.optimizer.param_groups[0]["lr"] == before * 0.5**power
    pool.reset(range(HOSTS))
    assert pool.envs[1].optimizer.param_groups[0]["lr"] == before


def test_hosts_without_a_governor_keep_what_is_broken(make_pool: MakePool) -> None:
    pool = make_pool(HOSTS, governor=None)
    pool.reset(range(HOSTS))
    set_weight_to_nan(pool.envs[1])

    step = wait(pool)
    assert step.verdicts == [] and not step.metrics.loss[1].isfinite()


class BreaksHosts(Callback):
    """Callback that sets a weight of every host to NaN at the end of every tick."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        for env in pl_module.collector.pool.envs:
            set_weight_to_nan(env)


class Fills(Callback):
    """Callback that fills a part of the training state with a value at the end of tick 7.

    Args:
        part: "weights" of the policy, "one weight" alone, its optimizer's "moments", or the variances of a
            "normaliser".
        value: Value that replaces the numbers, as a text, since JSON knows neither NaN nor infinity.
    """

    def __init__(self, part: str, value: str) -> None:
        self.part, self.value = part, float(value)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        if pl_module.collector.ticks != 7:
            return
        if self.part == "weights":
            for parameter in pl_module.policy.parameters():
                parameter.fill_(self.value)
        elif self.part == "one weight":
            next(iter(pl_module.policy.parameters())).view(-1)[0] = self.value
        elif self.part == "moments":
            for state in trainer.optimizers[0].state.values():
                state["exp_avg"].fill_(self.value)
        else:
            pl_module.observation_norm.state_dict()["var"].fill_(self.value)


def ending(root: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, list[str]]:
    """Return the exit code of a tiny run, and its error lines; nothing else may be on stderr."""
    capsys.readouterr()
    code = 0
    try:
        fit(root, *flags)
    except SystemExit as ended:
        code = int(ended.code or 0)
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return code, [line for line in said.splitlines() if line.startswith("error: ")]


def assert_finite_checkpoints(run: Run) -> None:
    for path in run.checkpoints.glob("*.ckpt"):
        state = open_checkpoint(path)["state_dict"]
        assert all(value.isfinite().all() for value in state.values() if value.is_floating_point())


def test_a_run_whose_hosts_all_break_in_every_tick_ends_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ending(tmp_path, capsys, *with_callback(BreaksHosts)) == (0, [])
    assert_finite_checkpoints(only_run(tmp_path))


@pytest.mark.parametrize("flag", ["--data.env.training.lr=1e30", "--governor.rules.penalty=1e30"])
def test_an_absurd_setting_of_hosts_never_reaches_a_checkpoint(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = ending(tmp_path, capsys, flag)

    assert (code, len(lines)) in ((0, 0), (3, 1), (2, 1)), lines
    if code != 2:
        assert_finite_checkpoints(only_run(tmp_path))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("weights", "nan"),
        ("weights", "inf"),
        ("weights", "1e38"),
        ("one weight", "nan"),
        ("moments", "nan"),
        ("moments", "inf"),
        ("normaliser", "nan"),
        ("normaliser", "-1"),
    ],
)
def test_a_policy_that_is_not_finite_ends_in_a_line_and_never_replaces_a_checkpoint(
    part: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = ending(tmp_path, capsys, *with_callback(Fills, part=part, value=value))

    assert (code, len(lines)) in ((0, 0), (3, 1)), lines
    assert_finite_checkpoints(only_run(tmp_path))


def size_without_hosts(path: Path) -> int:
    """Return the size of a checkpoint in bytes without its hosts, whose size depends on the seeds that are alive."""
    return size_on_disk({part: content for part, content in load(path).items() if part != "HostPoolData"})


@pytest.mark.timeout(1200)
def test_a_run_of_fifty_rollouts_is_saved_whole_and_its_files_grow_evenly(tmp_path: Path) -> None:
    fit(tmp_path, "--trainer.max_epochs=25")
    run = only_run(tmp_path)
    size, events = size_without_hosts(run.latest), (run.folder / "events.jsonl").stat().st_size
    fit(tmp_path, "--trainer.max_epochs=50", "--ckpt_path", str(run.latest))

    assert load(run.latest)["callbacks"]["RolloutState"]["loop"]["ticks"] == 50 * HORIZON_OF_RUNS
    assert abs(size_without_hosts(run.latest) - size) < 0.01 * size
    assert (run.folder / "events.jsonl").stat().st_size < 2.5 * events
    assert {path.name for path in run.checkpoints.iterdir()} == {"latest.ckpt", "best.ckpt"}


SAME_UNTIL_THE_END = [
    f"--model.ppo.{name}.{end}={value}" for name, value in (("lr", 1e-3), ("entropy", 1e-2)) for end in ("start", "end")
]
"""Settings that do not depend on the length of a run."""


@pytest.mark.timeout(1200)
def test_a_run_that_is_resumed_after_every_rollout_equals_one_that_never_stopped(tmp_path: Path) -> None:
    fit(tmp_path / "whole", "--trainer.max_epochs=8", *SAME_UNTIL_THE_END)
    fit(tmp_path / "parts", "--trainer.max_epochs=1", *SAME_UNTIL_THE_END)
    parts = only_run(tmp_path / "parts")
    for epochs in range(2, 9):
        fit(
            tmp_path / "parts",
            f"--trainer.max_epochs={epochs}",
            *SAME_UNTIL_THE_END,
            *("--ckpt_path", str(parts.latest)),
        )

    whole = load(only_run(tmp_path / "whole").latest)
    assert differences(whole["state_dict"], load(parts.latest)["state_dict"]) == []


@pytest.mark.timeout(1200)
def test_an_episode_of_three_hundred_ticks_of_random_growth_stays_finite(make_pool: MakePool) -> None:
    pool = pool_of(make_pool, horizon=300)
    controller = RandomValid(rng_seed=0)
    controller.reset(pool)
    germinated = 0
    for _ in range(300):
        step = pool.step(controller.act(pool))
        germinated += int((step.action.op == Op.GERMINATE).sum())
        assert step.observation.features.isfinite().all() and step.reward.isfinite().all()

    assert step.truncated.all() and germinated > HOSTS


@pytest.mark.timeout(1200)
def test_a_host_after_a_hundred_episodes_equals_that_of_a_new_pool(make_pool: MakePool) -> None:
    pool = pool_of(make_pool, horizon=2)
    for episode in range(100):
        pool.reset(range(episode, episode + HOSTS))
        wait(pool, 2)
    pool.reset(range(HOSTS))
    wait(pool, 2)
    fresh = pool_of(make_pool, horizon=2)
    wait(fresh, 2)

    assert differences(weights(fresh.envs[1]), weights(pool.envs[1])) == []
