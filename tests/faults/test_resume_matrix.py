"""A run resumed within a rollout equals the uninterrupted one, or nearly so if its hosts are executed differently."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from esper_lightning.envs.snapshot import unpack
from tests.faults.runs import Callbacks, RunResult, SpoilTwoHosts, check_that_it_grows, grow, result_of, with_callbacks
from tests.runs import (
    HORIZON,
    Run,
    SaveEveryTick,
    continuation,
    differences,
    load,
    only_run,
    points_after,
    saved_stages,
)
from tests.tiers import rest_is_slow

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")  # so that tests do not share a folder

TICKS = (HORIZON + 3, 2 * HORIZON + 2)
"""Ticks in the middle of a rollout."""

TOLERANCE = 1e-5
"""Tolerance in float32 after three ticks, for weights, losses and scores; measured: 2e-6."""

# Adam moves a weight by up to its learning rate where the gradient is only rounding error; sgd hardly moves it.
SGD = ("--data.env.training.optimizer=sgd",)


class RunConfig(NamedTuple):
    """Configuration of a run."""

    executor: str
    precision: str = "fp32"
    threads: int = 1
    """Threads per operator of torch."""

    flags: tuple[str, ...] = ()
    callbacks: Callbacks = MappingProxyType({})

    def __str__(self) -> str:
        callbacks = (callback.__name__ for callback in self.callbacks)
        return "-".join([self.executor, self.precision, str(self.threads), *self.flags, *callbacks])

    def run(self, root: Path, *flags: str) -> None:
        grow(
            root,
            *("--data.env.executor", self.executor, "--data.env.training.precision", self.precision),
            *("--threads_per_operator", str(self.threads)),
            *self.flags,
            *with_callbacks({SaveEveryTick: {}, **self.callbacks}),
            *flags,
        )


RUNS = [RunConfig(executor, precision) for executor in ("loop", "threads", "fused") for precision in ("fp32", "bf16")]

BROKEN = MappingProxyType({SpoilTwoHosts: {"tick": HORIZON + 1}})
"""Callback that gets one host rolled back before the first of the ticks above, and makes another suspicious there."""

ROLLED_BACK = [RunConfig(executor, callbacks=BROKEN) for executor in ("loop", "threads", "fused")]

CASES = [(kind, tick) for kind in RUNS for tick in (TICKS if kind.precision == "fp32" else TICKS[:1])]
CASES += [(kind, TICKS[0]) for kind in ROLLED_BACK]

FAST = [(ROLLED_BACK[-1], TICKS[0])]
"""Cases of the fast tier: executor `fused`, with a rollback."""


class UninterruptedRun(NamedTuple):
    """Record of an uninterrupted run."""

    run: Run
    ending: RunResult

    def checkpoint(self, tick: int) -> Path:
        return self.run.checkpoints / f"tick{tick}.ckpt"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[RunConfig], UninterruptedRun]:
    """Run each configuration once, with a checkpoint of every tick."""
    done: dict[str, UninterruptedRun] = {}

    def run(kind: RunConfig) -> UninterruptedRun:
        if str(kind) not in done:
            root = tmp_path_factory.mktemp("whole")
            kind.run(root)
            ending = result_of(only_run(root))
            check_that_it_grows(ending)
            done[str(kind)] = UninterruptedRun(only_run(root), ending)
        return done[str(kind)]

    return run


def resume(checkpoint: Path, kind: RunConfig, root: Path, *flags: str) -> Run:
    """Resume a run of this configuration from a copy of `checkpoint`, in a folder with nothing else."""
    run = Run(root / "version_0")
    run.checkpoints.mkdir(parents=True)
    kind.run(root, "--ckpt_path", shutil.copy(checkpoint, run.checkpoints), *flags)
    return run


def seeds_alive(checkpoint: Path) -> bool:
    """Return True if seeds are growing that are neither culled nor fossilized."""
    return bool(saved_stages(checkpoint) & {"GERMINATED", "TRAINING", "BLENDING", "PROBATIONARY"})


@pytest.mark.parametrize(("kind", "tick"), rest_is_slow(CASES, lambda case: case in FAST), ids=str)
def test_a_run_that_goes_on_in_mid_rollout_equals_the_uninterrupted_one(
    kind: RunConfig, tick: int, whole: Callable[[RunConfig], UninterruptedRun], tmp_path: Path
) -> None:
    reference = whole(kind)
    assert seeds_alive(reference.checkpoint(tick)), "nothing grows at that tick, so it is no test"

    run = resume(reference.checkpoint(tick), kind, tmp_path)

    assert differences(continuation(run.last), reference.ending.last) == []
    assert differences(result_of(run).points, points_after(tick, reference.ending.points)) == []


@pytest.mark.parametrize("kind", rest_is_slow(ROLLED_BACK, lambda kind: kind is ROLLED_BACK[-1]), ids=str)
def test_runs_with_rollbacks_are_worth_the_test(
    kind: RunConfig, whole: Callable[[RunConfig], UninterruptedRun]
) -> None:
    points = whole(kind).ending.points
    rollbacks, suspicious = (dict(points[f"governor/{name}"]) for name in ("rollbacks", "suspicious"))

    assert rollbacks[TICKS[0]] == 1, "one host was rolled back before the checkpoint"
    assert suspicious[TICKS[0]] == 1, "another one is about to be"
    assert rollbacks[TICKS[0] + 1] == 2


def largest_difference(a: Any, b: Any) -> float:
    """Return the largest difference of the numbers in two nested structures; everything else must be equal."""
    if isinstance(a, Tensor) and a.is_floating_point():
        return (a - b).abs().max().item() if a.numel() else 0.0
    if isinstance(a, float):
        return abs(a - b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        return max((largest_difference(a[key], b[key]) for key in a), default=0.0)
    if isinstance(a, list | tuple):
        assert len(a) == len(b)
        return max(map(largest_difference, a, b), default=0.0)
    assert differences(a, b) == []
    return 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("loop", "threads"), ("threads", "loop")])
def test_loop_and_threads_go_on_from_each_other_bit_for_bit(
    before: str, after: str, whole: Callable[[RunConfig], UninterruptedRun], tmp_path: Path
) -> None:
    reference = whole(RunConfig(before))

    run = resume(reference.checkpoint(TICKS[0]), RunConfig(after), tmp_path)

    differing = differences(continuation(run.last), continuation(reference.run.last))
    assert [one.partition(": ")[0] for one in differing] == [".datamodule_hyper_parameters.env.executor"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "tick"),
    rest_is_slow(
        [
            (RunConfig("loop", flags=SGD), RunConfig("fused", flags=SGD), HORIZON - 3),
            (RunConfig("fused", flags=SGD), RunConfig("loop", flags=SGD), HORIZON - 3),
            # One tick: on a busy machine the threads of one operator wait for each other at every operation.
            (RunConfig("loop", flags=SGD), RunConfig("loop", threads=2, flags=SGD), HORIZON - 1),
        ],
        lambda case: case[0].executor == "fused",
    ),
    ids=str,
)
def test_other_ways_to_execute_hosts_go_on_within_rounding(
    before: RunConfig, after: RunConfig, tick: int, whole: Callable[[RunConfig], UninterruptedRun], tmp_path: Path
) -> None:
    reference = whole(before)
    assert seeds_alive(reference.checkpoint(tick)), "nothing grows at that tick, so it is no test"

    run = resume(reference.checkpoint(tick), after, tmp_path, "--trainer.max_epochs=1", "--model.ppo.epochs=1")

    for later in range(tick + 1, HORIZON + 1):
        ended, expected = (hosts(of.checkpoints / f"tick{later}.ckpt") for of in (run, reference.run))
        assert largest_difference(ended, expected) < TOLERANCE


def hosts(checkpoint: Path) -> list[list[Any]]:
    """Return the state of every host: seeds, weights, losses and objective."""
    envs = [unpack(env) for env in load(checkpoint)["HostPoolData"]["pool"]["envs"]]
    return [[env["growing"]["network"], env["history"], env["objective"]] for env in envs]
