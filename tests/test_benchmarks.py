"""The benchmarks run and compare equal work; their speed is not tested."""

import csv
import importlib.util
import json
import re
import sys
import time
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import get_args
from urllib.request import urlopen

import numpy as np
import pytest
import torch
import yaml
from lightning import Callback
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter

from benchmarks import grow, zero_shot, zero_shot_ablations
from benchmarks.hosts import ExecutorChoice
from benchmarks.isolation import letters, policies, stuck, worth
from benchmarks.isolation.__main__ import FILES, RESULTS
from benchmarks.rows import read_rows
from esper_lightning.envs import HostPool
from esper_lightning.evaluation.statistics import mean_interval
from esper_lightning.growth.lifecycle import count_parameters
from esper_lightning.tasks import Split, TaskData
from tests.runs import ROOT
from tests.tiers import rest_is_slow


def script(name: str) -> ModuleType:
    """Import a benchmark as a module."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("family", "host"),
    rest_is_slow(
        product(["leave one out", "full family"], ["CNN", "GPT"]), {("leave one out", "GPT"), ("full family", "CNN")}
    ),
)
def test_a_shared_pass_says_what_the_plain_passes_say(host: str, family: str) -> None:
    row = script("counterfactual").compare(host, family, repeats=2)

    assert row.startswith(host)
    assert float(row.split()[-1]) < 1e-5


def test_sharing_is_predicted_from_how_often_each_segment_runs() -> None:
    benchmark = script("counterfactual")
    slots = ["a", "b", "c"]

    assert benchmark.runs(benchmark.leave_one_out(slots), slots) == ([1, 2, 3, 4], [1, 2, 3])
    assert benchmark.runs(benchmark.all_variants(slots), slots) == ([1, 2, 4, 8], [1, 2, 4])
    # Segments of one second and no time for seeds: 4·4 seconds against 1 + 2 + 3 + 4.
    assert benchmark.predicted(benchmark.leave_one_out(slots), slots, [1.0] * 4, [0.0] * 3) == pytest.approx(1.6)


@pytest.mark.slow
def test_every_executor_is_measured_on_hosts_of_every_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.csv"
    flags = ["--case", "digits", "--hosts", "2", "--repeats", "1", "--csv", str(file), "--markdown"]
    monkeypatch.setattr(sys, "argv", ["execution.py", *flags])
    benchmark = script("execution")
    executors = [str(choice) for choice in benchmark.choices(benchmark.CASES["digits"], torch.device("cpu"))]
    monkeypatch.setattr(benchmark, "DEVICE", torch.device("cpu"))

    benchmark.main()

    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert {"loop", "loop without oneDNN", "threads", "threads without oneDNN"} <= set(executors)
    expected = [(seeds, executor) for seeds in ("none", "equal", "different") for executor in executors]
    assert [(row["seeds"], row["executor"]) for row in rows] == expected
    for row in rows:
        assert float(row["train_ratio_low"]) <= float(row["train_ratio"]) <= float(row["train_ratio_high"])
        assert 0.0 < float(row["tick_ratio"]) < float(row["train_ratio"])
        assert 0.0 < float(row["other_share"]) < 1.0
    printed = capsys.readouterr().out
    assert "thread(s) per operator in 1 of 1 rounds" in printed
    assert len([line for line in printed.splitlines() if line.startswith("| digits | 2 |")]) == len(rows)


@pytest.mark.slow
def test_an_executor_that_refuses_hosts_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = script("execution")
    real = benchmark.make_pool

    def choosy(case: object, data: object, hosts: int, choice: ExecutorChoice, *rest: object) -> HostPool:
        if choice.executor == "loop" and not choice.onednn:
            raise ValueError("too plain")
        return real(case, data, hosts, choice, *rest)

    monkeypatch.setattr(benchmark, "make_pool", choosy)
    monkeypatch.setattr(benchmark, "DEVICE", torch.device("cpu"))
    rows = benchmark.measure("digits", 1, 1, "fp32", memory=False)

    assert "digits, 1 hosts, seeds equal: loop without oneDNN refuses them: too plain" in capsys.readouterr().out
    assert "loop without oneDNN" not in {row.executor for row in rows}
    assert {"loop", "threads"} <= {row.executor for row in rows}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's books")
def test_memory_is_measured_in_a_process_of_its_own() -> None:
    benchmark = script("execution")

    assert 0.1 < benchmark.peak_alone("digits", 2, "fp32", "equal", ExecutorChoice("loop", False)) < 500.0


@pytest.mark.slow
def test_the_raw_loop_trains_the_hosts_of_the_pool() -> None:
    benchmark = script("execution")
    for name in ("digits", "16", "gpt"):
        case = benchmark.CASES[name]
        data = case.task.load()
        raw = benchmark.RawLoop(case, data, hosts=1)
        pool = benchmark.make_pool(case, data, 1, ExecutorChoice("loop", True), "none")

        assert count_parameters(raw.hosts[0]) == pool.envs[0].host_parameters
        assert raw.flops() > 6 * pool.envs[0].host_parameters  # every weight of a convolution is used several times
    inputs, targets = data.train.inputs[:8], data.train.targets[:8]
    before = F.cross_entropy(raw.hosts[0](inputs).flatten(0, 1), targets.flatten()).item()
    for _ in range(3):
        raw()
    with torch.no_grad():
        assert F.cross_entropy(raw.hosts[0](inputs).flatten(0, 1), targets.flatten()).item() < before


def test_equal_and_different_seeds_are_what_they_say() -> None:
    benchmark = script("execution")
    case = benchmark.CASES["digits"]
    data = case.task.load()

    def grown(seeds: str) -> list[list[str | None]]:
        pool = benchmark.make_pool(case, data, 6, ExecutorChoice("loop", False), seeds)
        assert {slot.blended for env in pool.envs for slot in env.slots if slot.blueprint} <= {True}
        return [[slot.blueprint for slot in env.slots] for env in pool.envs]

    assert grown("none") == [[None] * 3] * 6
    first, *others = grown("equal")
    assert first[0] is not None and first[1] is None and all(row == first for row in others)
    different = grown("different")
    assert different[0] == first
    assert len({tuple(row) for row in different}) > 4


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's books")
def test_the_memory_of_a_long_run_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = script("memory")
    monkeypatch.setattr(sys, "argv", ["memory.py", "--executor", "loop", "--rollouts", "2", "--hosts", "1"])
    monkeypatch.setattr(benchmark, "REPORT_EVERY", 1)

    benchmark.main()

    first, second, verdict = capsys.readouterr().out.splitlines()
    assert first.startswith("loop, 1 hosts, rollout 1: process ") and "(+0.0, +0.00%)" in first
    assert "rollout 2: process " in second
    assert "the bar of 1%" in verdict


def test_the_readmes_tables_come_from_the_kept_results(tmp_path: Path) -> None:
    source, kept = tmp_path / "evaluation.csv", tmp_path / "kept.csv"
    tables = script("tables")
    rows = ["controller,training_seed,host,host_seed,member,accuracy,parameters,objective,fossils,flops"]
    worth = {("tamiyo", "0"): [0.6, 0.8], ("tamiyo", "1"): [0.7, 0.9], ("wait", ""): [0.2, 0.6]}
    for (name, seed), objectives in worth.items():
        rows += [f"{name},{seed},{host},9,a,0.5,390,{value},1,{1e9 + host}" for host, value in enumerate(objectives)]
    source.write_text("\n".join(rows) + "\n")
    tables.main(["keep", str(source), str(kept)])
    assert "member" not in kept.read_text() and not tables.members_of(kept).exists()
    assert tables.read(kept, "flops")["wait"][""].tolist() == [1e9, 1e9]
    results = tables.read(kept)
    assert results["tamiyo"]["1"].tolist() == [0.7, 0.9]
    head, _, ours, wait = tables.markdown(results)
    assert head == "| controller | objective | ahead, seed 0 | ahead, seed 1 | ahead, all |"
    assert ours.startswith("| tamiyo | .750 ±") and ours.endswith("|  |  |  |")
    leads = [[0.4, 0.2], [0.5, 0.3]]
    cells = [tables.shown(mean_interval(np.array(lead)), signed=True) for lead in [*leads, leads]]
    assert wait.split(" | ")[2:] == [*cells[:2], f"{cells[2]} |"]
    assert tables.number(-0.0214) == "−.021" and tables.number(1.5) == "1.500"


@pytest.mark.slow
def test_every_level_of_telemetry_is_timed_in_one_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["telemetry.py", "--hosts", "2", "--rounds", "1", "--executor", "loop"])
    benchmark = script("telemetry")

    benchmark.main()

    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows[-3:] == list(benchmark.LEVELS) == ["off", "normal", "debug"]


@pytest.mark.slow
def test_pictures_are_taken_of_a_tensorboard_that_answers(tmp_path: Path) -> None:
    SummaryWriter(str(tmp_path / "version_0")).close()

    with script("screenshots").tensorboard(tmp_path) as address, urlopen(f"{address}data/runs", timeout=60) as answer:
        assert json.loads(answer.read()) == ["version_0"]


@pytest.mark.slow
def test_the_gap_closed_is_that_of_means_with_an_interval() -> None:
    tables = script("tables")
    random = np.random.default_rng(0)
    small, big = random.normal(0.2, 0.05, 400), random.normal(0.6, 0.05, 400)
    results = {
        "tamiyo": {"0": small + 0.75 * (big - small), "1": small + 0.25 * (big - small)},
        "small static": {"": small},
        "static tamiyo": {"0": big, "1": big},
        "half": {"": (small + big) / 2.0},
    }

    lines = tables.gaps(results)

    assert lines[2].endswith("| 50 % [25 %, 75 %] |"), "two training seeds that differ make it wide"
    assert lines[3].endswith("|  |") and lines[4].endswith("|  |")
    assert lines[5].endswith("| 50 % [50 %, 50 %] |"), "what hosts have in common cancels"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "family"])
def test_the_pages_gaps_are_those_of_the_kept_results(name: str) -> None:
    tables = script("tables")
    page = (ROOT / "docs" / "results" / "benchmarks.md").read_text().splitlines()
    lines = tables.gaps(tables.read(ROOT / "benchmarks" / "results" / f"{name}.csv", "accuracy"))

    there = [line for line in lines if line in page]

    assert len(there) > 7


def test_results_are_grouped_by_the_variables_in_which_hosts_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables, source, kept = script("tables"), tmp_path / "evaluation.csv", tmp_path / "kept.csv"
    members = ["host.widths [4, 8], price 0.1", "host.widths [4, 8], price 0.3", "host.widths [2, 2], price 0.3"]
    rows = [
        ["controller", "training_seed", "host", "member", "objective", "accuracy", "parameters", "fossils", "flops"]
    ]
    for name, seed, objectives in (
        ("tamiyo", 0, (0.1, 0.3, 0.6)),
        ("tamiyo", 1, (0.3, 0.5, 0.8)),
        ("wait", "", (0.0,) * 3),
    ):
        rows += [[name, seed, i, member, objectives[i], 0.5, 390, 2, 1e9] for i, member in enumerate(members)]
    with source.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    tables.main(["keep", str(source), str(kept)])

    assert tables.by_kind(kept, ["price"], ["tamiyo", "wait:parameters"])[2:] == [
        "| 0.1 | 1 | .200 | 390 |",
        "| 0.3 | 2 | .550 | 390 |",
    ]
    head, _, *kinds = tables.by_kind(kept, ["host.widths", "price"], ["tamiyo:fossils"])
    assert head == "| host.widths | price | hosts | tamiyo:fossils |"
    assert kinds[0] == "| [2, 2] | 0.3 | 1 | 2.000 |" and len(kinds) == 3
    with pytest.raises(SystemExit):
        tables.main(["by", str(kept), "width", "--cells", "tamiyo"])
    assert "do not differ in width; they do in host.widths, price" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no results of tamyo; there are those of tamiyo, wait"):
        tables.by_kind(kept, ["price"], ["tamyo"])


BY_KIND = {
    "family host.widths": ["host.kernel", "host.widths"],
    "family": ["host.kernel", "objective.price"],
    "family_held_out": ["host.kernel", "objective.price"],
    "failing": ["fail.conv_light", "fail.bottleneck"],
}


PAGE_OF = {"family": "family", "family_held_out": "family", "failing": "failing"}


@pytest.mark.parametrize("name", BY_KIND)
def test_the_pages_tables_of_kinds_of_host_are_those_of_the_kept_results(name: str) -> None:
    tables = script("tables")
    page = (ROOT / "docs" / "results" / f"{PAGE_OF[name.split()[0]]}.md").read_text()
    head = f"| {' | '.join([*BY_KIND[name], 'hosts'])} | "
    cells = {line.removeprefix(head).removesuffix(" |") for line in page.splitlines() if line.startswith(head)}
    (columns,) = cells

    lines = tables.by_kind(
        ROOT / "benchmarks" / "results" / f"{name.split()[0]}.csv", BY_KIND[name], columns.split(" | ")
    )

    assert len(lines) >= 6 and "\n".join(lines) in page


def test_the_pages_table_of_failing_grafts_is_that_of_the_kept_results() -> None:
    tables = script("tables")
    results = tables.read(ROOT / "benchmarks" / "results" / "failing.csv")
    lines = tables.markdown(results)

    assert len(lines) > 7 and "\n".join(lines) in (ROOT / "docs" / "results" / "failing.md").read_text()


@pytest.mark.slow
def test_an_observation_gives_away_what_it_shows_and_not_what_is_without_effect(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    benchmark = script("given_away")
    config = yaml.safe_load((ROOT / "configs" / "smoke.yaml").read_text())
    # So little weight decay has no visible effect; the price is part of the observation.
    facts = {"objective.price": [0.1, 0.5], "training.weight_decay": [0.0, 1e-12]}
    config["data"]["env"]["family"] = {"train": [facts]}
    path = tmp_path / "family.yaml"
    path.write_text(yaml.safe_dump(config))

    benchmark.main(["--config", str(path), "--each", "20", "--ticks", "1"])

    rows = {line.split("|")[1].strip(): line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")}
    shares = {name: [int(n) for n in re.findall(r"(\d+)%", line)] for name, line in rows.items()}
    assert shares["objective.price"] == [50, 100, 100]
    assert shares["training.weight_decay"][0] == 50 and max(shares["training.weight_decay"]) < 75
    with pytest.raises(SystemExit):
        benchmark.main(["--config", str(ROOT / "configs" / "smoke.yaml")])
    assert "one context only; name variables" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        benchmark.main(["--config", str(path), "--each", "3"])
    assert "--each 3 is too few for 5 folds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "module"), [("worth", worth), ("stuck", stuck), ("letters", letters), ("policies", policies)]
)
def test_the_page_on_learning_behind_the_host_shows_the_kept_results(name: str, module: ModuleType) -> None:
    page = (ROOT / "docs" / "results" / "isolation.md").read_text()
    tables = "\n".join(module.table(read_rows(RESULTS / FILES[name], module.Row))).split("\n\n")
    assert tables and all(table in page for table in tables)


def test_the_page_on_growing_in_lightning_shows_the_kept_results() -> None:
    page = (ROOT / "docs" / "results" / "grow.md").read_text()
    assert "\n".join(grow.table(read_rows(grow.RESULTS, grow.Row))) in page


def test_the_page_on_a_policy_for_any_network_shows_the_kept_results() -> None:
    page = (ROOT / "docs" / "results" / "zero_shot.md").read_text()
    rows = read_rows(zero_shot.RESULTS, zero_shot.Row)
    for table in (zero_shot.table, zero_shot.seed_table):
        assert "\n".join(table(rows, zero_shot.GENERAL)) in page
    ablations = read_rows(zero_shot_ablations.RESULTS, zero_shot.Row)
    assert "\n".join(zero_shot_ablations.table(ablations)) in page


def test_a_grown_network_is_compared_with_the_plain_one_of_its_own_rng_seed() -> None:
    plain = [grow.Row(grow.AS_IT_WAS, seed, 60.0 + 10 * seed, 100, 10.0, "", "") for seed in (0, 1)]
    grown = grow.Row("schedule", 1, 71.5, 150, 20.0, "layer2 conv_light; layer3 conv_light", "")

    *_, last = grow.table([*plain, grown])

    assert last == "| schedule | 71.50 (71.50) | +1.50 (+1.50) | 150 | 20 | 2.0 | 0.0 |"


def test_the_cost_of_growing_compares_networks_that_compute_the_same() -> None:
    images = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    data = TaskData(*(Split(images, torch.zeros(4, dtype=torch.int64)) for _ in range(3)), classes=3)
    plain, *with_seeds = (grow.make_network(seeds, data).eval() for seeds in get_args(grow.Seeds))

    assert len({count_parameters(network) for network in with_seeds}) == 1
    assert all(torch.equal(network(images), plain(images)) for network in with_seeds), "seeds are identities"


def test_the_cost_of_an_epoch_counts_each_minibatch_with_its_share_and_ignores_disturbed_ones() -> None:
    pairs = grow.MINIBATCHES // 2
    ratios = np.full((40, pairs), 1.01)
    ratios[:, 0], ratios[:, -1] = 1.05, 1.09
    expected = (14 * 1.01 + 1.05 + 1.09) / 16
    assert grow.cost_of_epoch(ratios) == pytest.approx((expected,) * 3)
    ratios[:12, 3] = 9.0
    assert grow.cost_of_epoch(ratios)[0] == pytest.approx(expected)
    ratios[::2, 3] = 1.01 + 0.06
    assert grow.cost_of_epoch(ratios)[0] == pytest.approx(expected + 14 * 0.03 / 16 / (pairs - 2)), "even epochs alone"


@pytest.mark.slow
def test_a_callback_takes_part_in_one_minibatch_of_each_pair_and_its_time_is_measured() -> None:
    class Burn(Callback):
        """Computes for 50 ms before each minibatch."""

        def on_train_batch_start(self, *_: object) -> None:
            begin = time.thread_time()
            while time.thread_time() < begin + 0.05:
                pass

    images = torch.randn(32, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    data = TaskData(*(Split(images, torch.zeros(32, dtype=torch.int64)) for _ in range(3)), classes=3)

    on, off = grow.time_with_and_without(grow.make_network("none", data), Burn(), 4, data=data, batch=2)

    assert on.shape == off.shape == (4, grow.MINIBATCHES // 2)
    assert float(np.median(on - off)) == pytest.approx(0.05, abs=0.01)


def seed_row(**changes: object) -> worth.Row:
    row = worth.Row("digits", "adam .003", 0, "conv_light", "trial", "block1", 1, 700, right=650, lost=30, gained=10)
    return row._replace(**changes)


def test_a_seed_harms_if_it_costs_more_than_a_point_beyond_chance() -> None:
    # 20 samples lost on balance are 13 more than one point of 700, or 2.06 standard deviations of 40 that changed.
    assert seed_row().change == pytest.approx(-100 * 20 / 700)
    assert seed_row().harms
    assert not seed_row(lost=60, gained=40).harms, "1.3 standard deviations"
    assert not seed_row(lost=10, gained=3).harms, "a point or less"


@pytest.mark.slow
def test_a_measurement_that_was_interrupted_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worth, "LEARNINGS", worth.LEARNINGS[:2])
    monkeypatch.setattr(worth, "OPTIMIZERS", worth.OPTIMIZERS[:1])
    whole, broken = tmp_path / "whole.csv", tmp_path / "broken.csv"
    worth.measure(whole, [0], ["table"])
    lines = whole.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 3 * 2 * worth.SLOTS * len(worth.SEED_EPOCHS)
    broken.write_text("".join(lines[:10]))  # one run and a half

    worth.measure(broken, [0], ["table"])

    assert broken.read_text() == whole.read_text()


def test_a_grown_host_is_compared_with_built_in_ones_at_its_flops() -> None:
    built_in = [letters.Row(f"built in, {t} ticks", 0, 900, t * 100, 60.0 + t, 0.0, 3) for t in (10, 20, 40)]
    others = [row._replace(rng_seed=1, seen=0.0) for row in built_in]
    grown = letters.Row("late, trial", 0, 900, round(1000 * 2**0.5), 80.0, 0.0, 3)
    assert letters.lead_over_built_in(grown, built_in + others) == pytest.approx(5.0, abs=0.01)
    assert letters.lead_over_built_in(grown._replace(flops=900), built_in) is None
