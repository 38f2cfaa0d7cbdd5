"""The benchmarks run, and what they compare is the same work; how fast it is no test says."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from esper_lightning.growth.network import count_parameters
from tests.runs import ROOT


def script(name: str) -> ModuleType:
    """A benchmark as a module."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("host", ["CNN", "GPT"])
@pytest.mark.parametrize("family", ["leave one out", "full family"])
def test_a_shared_pass_says_what_the_plain_passes_say(host: str, family: str) -> None:
    row = script("counterfactual").compare(host, family, repeats=2)

    assert row.startswith(host)
    assert float(row.split()[-1]) < 1e-5


def test_sharing_is_predicted_from_how_often_each_segment_runs() -> None:
    benchmark = script("counterfactual")
    slots = ["a", "b", "c"]

    assert benchmark.runs(benchmark.leave_one_out(slots), slots) == ([1, 2, 3, 4], [1, 2, 3])
    assert benchmark.runs(benchmark.full_family(slots), slots) == ([1, 2, 4, 8], [1, 2, 4])
    # Segments of one second and no time for seeds: 4·4 seconds against 1 + 2 + 3 + 4.
    assert benchmark.predicted(benchmark.leave_one_out(slots), slots, [1.0] * 4, [0.0] * 3) == pytest.approx(1.6)


def test_every_executor_is_measured_on_hosts_with_and_without_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.csv"
    flags = ["--case", "digits", "--hosts", "2", "--repeats", "1", "--csv", str(file)]
    monkeypatch.setattr(sys, "argv", ["execution.py", *flags])

    script("execution").main()

    head, *rows = (line.split(",") for line in file.read_text().splitlines())
    assert [(row[2], row[3]) for row in rows] == [
        (seeds, executor) for executor in ("loop", "threads") for seeds in ("none", "different")
    ]
    assert all(float(row[head.index("train_ratio")]) > 0.0 for row in rows)


def test_the_raw_loop_trains_the_hosts_of_the_pool() -> None:
    benchmark = script("execution")
    for name in ("digits", "16", "gpt"):
        case = benchmark.CASES[name]
        data = case.task.load()
        raw = benchmark.RawLoop(case, data, hosts=1)
        pool = benchmark.make_pool(case, data, 1, "loop", grown=False)

        assert count_parameters(raw.hosts[0]) == pool.envs[0].host_parameters
    inputs, targets = data.train.inputs[:8], data.train.targets[:8]
    before = F.cross_entropy(raw.hosts[0](inputs).flatten(0, 1), targets.flatten()).item()
    for _ in range(3):
        raw()
    with torch.no_grad():
        assert F.cross_entropy(raw.hosts[0](inputs).flatten(0, 1), targets.flatten()).item() < before
