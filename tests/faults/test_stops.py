"""A run that receives a stop signal at any tick or while it starts, stops with one line; resumed, it ends equal."""

import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from signal import SIGCONT, SIGHUP, SIGINT, SIGSTOP, SIGTERM, Signals

import pytest
from torch import nn

from tests.faults.programs import Program, Start, fresh_starter, wait_for_next_second
from tests.faults.runs import (
    GROWING,
    RunResult,
    SignalIn,
    SignalsAt,
    check_that_it_grows,
    differences_of,
    grow,
    result_of,
    tick_of,
    with_callbacks,
)
from tests.runs import HORIZON, Run, SaveEveryTick, continuation, differences, guarded_signals, only_run, tiny_host
from tests.tiers import rest_is_slow

MID_ROLLOUT = HORIZON + 3
CHECK_INTERVAL_SECONDS = 0.0002
"""Seconds between two checks for a draft, which exists for about 5 ms."""

TRAINED = "`Trainer.fit` stopped: `max_epochs=3` reached.\n"

ATTEMPTS = 20
"""Attempts to catch a checkpoint while it is written; on a busy machine a check is sometimes too late."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Reference run without a stop, with a checkpoint of every tick."""
    root = tmp_path_factory.mktemp("saved")
    grow(root, *with_callbacks({SaveEveryTick: {}}))
    return only_run(root)


@pytest.fixture(scope="module")
def untouched(saved: Run) -> RunResult:
    ending = result_of(saved)
    check_that_it_grows(ending)
    return ending


def assert_it_goes_on_to_the_same_end(root: Path, untouched: RunResult) -> None:
    """Resume the run below `root`, and compare its results with the reference."""
    wait_for_next_second(root)
    grow(root, "--ckpt_path", str(only_run(root).latest))
    assert differences_of(result_of(only_run(root)), untouched) == []


def start_training(start: Start, root: Path, *flags: str) -> Program:
    root.mkdir(exist_ok=True)
    return start([*GROWING, "--trainer.default_root_dir", str(root / "runs"), *flags], root / "output.txt")


def stopped_at(tick: int, number: Signals, root: Path, *flags: str) -> Path:
    """Start or resume a run in this process, send it a signal at the end of a tick, and return the saved checkpoint."""
    wait_for_next_second(root)
    with guarded_signals(), pytest.raises(SystemExit) as stopped:
        grow(root, *with_callbacks({SignalsAt: {"tick": tick, "numbers": [int(number)]}}), *flags)
    assert stopped.value.code == 128 + number
    latest = only_run(root).latest
    assert tick_of(latest) == tick
    return latest


@pytest.mark.slow
def test_a_run_stopped_at_every_tick_of_two_rollouts_goes_on_each_time(
    saved: Run, untouched: RunResult, tmp_path: Path
) -> None:
    go_on: tuple[str, ...] = ()
    for tick in range(1, 2 * HORIZON + 1):
        latest = stopped_at(tick, SIGTERM, tmp_path, *go_on)
        go_on = ("--ckpt_path", str(latest))
        expected = continuation(saved.checkpoints / f"tick{tick}.ckpt")
        assert differences(continuation(latest), expected) == [], f"at tick {tick}, having been stopped at all before"

    assert_it_goes_on_to_the_same_end(tmp_path, untouched)


@pytest.mark.parametrize(
    ("number", "tick"),
    rest_is_slow(
        [(SIGTERM, MID_ROLLOUT), (SIGINT, 1), (SIGINT, MID_ROLLOUT), (SIGHUP, MID_ROLLOUT)], {(SIGTERM, MID_ROLLOUT)}
    ),
)
def test_a_run_stopped_once_goes_on(number: Signals, tick: int, untouched: RunResult, tmp_path: Path) -> None:
    stopped_at(tick, number, tmp_path)

    assert_it_goes_on_to_the_same_end(tmp_path, untouched)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    rest_is_slow(
        [(SIGTERM, SIGTERM), (SIGINT, SIGINT), (SIGTERM, SIGINT), (SIGINT, SIGTERM)],
        {(SIGTERM, SIGINT)},
    ),
)
def test_a_second_signal_ends_a_run_at_once_and_leaves_its_last_checkpoint(
    first: Signals, second: Signals, start: Start, tmp_path: Path
) -> None:
    at = {"tick": MID_ROLLOUT, "numbers": [int(first), int(second)]}
    program = start_training(start, tmp_path, *with_callbacks({SignalsAt: at}))

    assert program.ended() == -second, program.output.read_text()
    assert tick_of(only_run(tmp_path / "runs").latest) == HORIZON


def send_during_second_checkpoint(program: Program, checkpoints: Path, number: Signals) -> bool:
    """Send the signal while the checkpoint is written. False: it would have come too late, and was not sent."""
    latest, draft = checkpoints / "latest.ckpt", checkpoints / f".latest.ckpt.{program.pid}.tmp"
    while program.wait(CHECK_INTERVAL_SECONDS) is None:
        if latest.exists() and draft.exists():
            program.send(SIGSTOP)
            if caught := draft.exists():
                program.send(number)
            program.send(SIGCONT)
            return caught
    return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [SIGTERM, SIGINT])
def test_a_second_signal_while_a_checkpoint_is_written_leaves_the_one_before(
    number: Signals, start: Start, untouched: RunResult, tmp_path: Path
) -> None:
    first = with_callbacks({SignalsAt: {"tick": MID_ROLLOUT, "numbers": [int(number)]}})
    for root in (tmp_path / str(attempt) for attempt in range(ATTEMPTS)):
        program = start_training(start, root, *first)
        checkpoints = root / "runs" / "version_0" / "checkpoints"
        caught = send_during_second_checkpoint(program, checkpoints, number)
        code = program.ended()
        if caught:
            break
    else:
        raise AssertionError(f"in {ATTEMPTS} runs no checkpoint was caught while it was written")

    assert code == -number, program.output.read_text()
    assert {path.name for path in checkpoints.iterdir() if path.name.startswith(".")}, "its draft is left"
    assert tick_of(only_run(root / "runs").latest) == HORIZON
    assert_it_goes_on_to_the_same_end(root / "runs", untouched)


def host_that_meets_sighup(input_shape: Sequence[int], outputs: int) -> nn.Module:
    os.kill(os.getpid(), SIGHUP)
    return tiny_host(input_shape, outputs)


def host_that_meets_sigint(input_shape: Sequence[int], outputs: int) -> nn.Module:
    os.kill(os.getpid(), SIGINT)
    return tiny_host(input_shape, outputs)


def host_that_meets_sigterm(input_shape: Sequence[int], outputs: int) -> nn.Module:
    os.kill(os.getpid(), SIGTERM)
    return tiny_host(input_shape, outputs)


def assert_stopped_in_a_line(program: Program, number: Signals) -> None:
    code, said = program.ended(), program.output.read_text().replace(TRAINED, "")
    assert code == 128 + number, said
    (line,) = said.splitlines()
    assert line.startswith(f"error: stopped by {number.name} ")


@pytest.mark.slow
@pytest.mark.parametrize("number", [SIGINT, SIGTERM, SIGHUP])
def test_a_signal_while_hosts_are_built_ends_the_program_in_a_line(
    number: Signals, start: Start, tmp_path: Path
) -> None:
    host = f"--data.host={__name__}.host_that_meets_{number.name.lower()}"
    assert_stopped_in_a_line(start_training(start, tmp_path, host), number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "number"), list(product(["setup", "on_fit_start", "on_train_start"], [SIGINT, SIGTERM, SIGHUP]))
)
def test_a_signal_right_before_training_ends_the_program_in_a_line(
    hook: str, number: Signals, start: Start, tmp_path: Path
) -> None:
    flags = with_callbacks({SignalIn: {"hook": hook, "number": int(number)}})
    assert_stopped_in_a_line(start_training(start, tmp_path, *flags), number)


@pytest.mark.slow
@pytest.mark.parametrize("number", [SIGINT, SIGTERM])
def test_a_signal_after_training_and_before_the_comparison_ends_the_program_in_a_line(
    number: Signals, start: Start, tmp_path: Path
) -> None:
    flags = with_callbacks({SignalIn: {"hook": "on_fit_end", "number": int(number)}})
    assert_stopped_in_a_line(start_training(start, tmp_path, *flags), number)


@pytest.mark.parametrize("number", rest_is_slow([SIGINT, SIGTERM], {SIGINT}))
def test_a_signal_while_torch_is_imported_ends_the_program_in_a_line(number: Signals, tmp_path: Path) -> None:
    with fresh_starter() as start:
        program = start_training(start, tmp_path)
        maps = Path(f"/proc/{program.pid}/maps")
        while program.wait(0.01) is None and "libtorch" not in maps.read_text():
            pass
        program.send(number)
        assert_stopped_in_a_line(program, number)
