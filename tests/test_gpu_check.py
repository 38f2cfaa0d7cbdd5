"""The check on a GPU: what is missing, how steps end, and measurements on the CPU in miniature."""

import csv
import sys
import warnings
import zipfile
from itertools import chain
from pathlib import Path

import pytest

from benchmarks.gpu import measure
from benchmarks.gpu.__main__ import PART_SECONDS, choose, make_parts, missing_distributions, run_parts, unpack_wheels
from benchmarks.gpu.report import Step, parse_results
from esper_lightning.envs.config import REQUIRED_DEVICE_TYPE
from esper_lightning.envs.executors import EXECUTORS
from esper_lightning.runtime import compiled
from tests.imitated_gpu import GPU, ImitatedGpu
from tests.runs import ROOT


def python(code: str, limit: int = 60) -> Step:
    return Step(code[:20], [sys.executable, "-c", code], limit)


def test_missing_packages_are_named_and_taken_from_their_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "absent_thing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("absent_thing.py", "import absent_other")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))

    assert missing_distributions(["absent_thing", "json"]) == ["absent-thing"]
    unpack_wheels(tmp_path / "wheels", tmp_path / "packages")
    assert missing_distributions(["absent_thing", "json"]) == ["absent-other"], "a wheel may need another one"


def test_a_step_that_fails_or_takes_too_long_does_not_stop_the_others(tmp_path: Path) -> None:
    steps = [python("print('RESULT\\tspeed\\t3.5\\tm/s')"), python("raise SystemExit(3)")]
    steps.append(Step("a run", [sys.executable, "-c", ""], 60, folder=tmp_path / "none"))
    steps.append(python("import time; time.sleep(99)", limit=1))

    run_parts({"part": steps}, {}, tmp_path, budget=600)

    rows = list(csv.DictReader((tmp_path / "report.csv").open()))
    outcomes = [row["value"] for row in rows if row["quantity"] == "outcome"]
    assert outcomes == ["ok", "failed with exit code 3", "failed: no closing comparison", "took too long"]
    assert [row["value"] for row in rows if row["unit"] == "m/s"] == ["3.5"]
    assert "| speed | 3.5 | m/s |" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_the_steps_name_configs_and_measurements_that_exist(device: str, tmp_path: Path) -> None:
    for step in chain.from_iterable(make_parts(tmp_path, device).values()):
        if "--config" in step.command:
            assert (ROOT / step.command[step.command.index("--config") + 1]).is_file()
        if "benchmarks.gpu.measure" in step.command:
            assert step.command[3] in measure.MEASUREMENTS


def test_the_report_has_every_executor_of_a_gpu(tmp_path: Path) -> None:
    titles = {step.title for step in chain.from_iterable(make_parts(tmp_path, "gpu").values())}
    executors = {name for name in EXECUTORS if REQUIRED_DEVICE_TYPE.get(name) in (None, "cuda")}

    assert executors == {"loop", "streams", "fused"}
    assert titles >= {f"{step} {name}" for step in ("precisions", "waits", "fit smoke") for name in executors}
    assert {"tests", "fit smoke auto", "fit synthetic streams", "resume gpu " + str(tmp_path / "resume")} <= titles


def test_parts_and_steps_are_chosen_by_name_and_a_part_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = choose(make_parts(tmp_path, "gpu"), ["depth", "waits fused"])
    titles = {name: [step.title for step in steps] for name, steps in parts.items() if steps}
    assert titles == {"executors": ["waits fused"], "depth": ["depth_hosts", "depth_stack"]}
    assert all(step.limit <= PART_SECONDS for step in chain.from_iterable(make_parts(tmp_path, "gpu").values()))

    monkeypatch.setattr("benchmarks.gpu.__main__.PART_SECONDS", 0)
    results = run_parts({"part": [python("")]}, {}, tmp_path, budget=600)
    assert [result.value for result in results] == ["skipped: no time left"]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["loop", "streams", "fused"])
def test_every_precision_is_reported_on_an_imitated_gpu(
    executor: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "DEVICE", GPU)
    with ImitatedGpu() as gpu:
        measure.precisions(executor)
        assert gpu.faults == {}

    found = {result.quantity: result.value for result in parse_results(executor, capsys.readouterr().out)}
    skipped = {quantity.split()[-1]: int(value) for quantity, value in found.items() if "skipped" in quantity}
    assert len(found) == 8 and set(skipped) == {"fp32", "tf32", "bf16", "fp16"}
    assert skipped.pop("fp16") >= 4 and not any(skipped.values()), "a scale of 2²⁴ overflows several times"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "quantities"),
    [
        ("waits", ("fused",), 0),
        ("precisions", ("fused",), 6),
        ("launches", (), 4),
        ("memory", ("fused", 6), 2),
        ("matrix_rate", (), 3),
        ("speed", ("digits", "2", ("fp32",)), 2 + 2 * 2 * 3),
        ("depth_hosts", (), 2 * 3),
        ("depth_stack", (20,), 4),
    ],
)
def test_a_measurement_runs_on_the_cpu(
    name: str, arguments: tuple[object, ...], quantities: int, capsys: pytest.CaptureFixture[str]
) -> None:
    measure.MEASUREMENTS[name](*arguments)

    assert len(parse_results(name, capsys.readouterr().out)) == quantities


@pytest.mark.slow
def test_every_format_is_measured_with_and_without_compilation_ahead_of_a_compiled_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")  # the compiler takes minutes
    warnings.filterwarnings("error", message=".* cannot be compiled")
    runs: list[list[str]] = []
    monkeypatch.setattr(measure.subprocess, "run", lambda command, **_: runs.append(command))

    measure.formats()

    assert len(parse_results("formats", capsys.readouterr().out)) == 2 * 2 * 2 * 2
    assert len(runs) == 1 and "--model.ppo.compile" in runs[0]


@pytest.mark.slow
def test_a_run_that_is_killed_ends_as_if_it_had_not_been(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    measure.resume("cpu", str(tmp_path))

    results = parse_results("resume", capfd.readouterr().out)
    assert results[1].value == "True"
    assert float(results[2].value) < 1e-5
