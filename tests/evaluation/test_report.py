"""Files and tables of a comparison."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from torch import nn

from esper_lightning.controllers.learned import LearnedController
from esper_lightning.controllers.schedules import Schedule, read_schedule
from esper_lightning.evaluation.comparison import ComparisonResult, Entry
from esper_lightning.evaluation.play import Outcome
from esper_lightning.evaluation.report import COLUMNS, conclusion, format_interval, make_tables, write_report
from esper_lightning.evaluation.statistics import Interval, mean_interval
from tests.runs import csv_rows

HOSTS, TICKS, SLOTS = 6, 4, ["block1", "block2"]
RIVAL = "rival best.ckpt"


def outcome(name: str, score: np.ndarray, parameters: float) -> Outcome:
    random = np.random.default_rng(len(name))
    ops = random.integers(0, 4, size=(TICKS, HOSTS))
    whole = np.arange(HOSTS)
    return Outcome(
        name, score, 1 - score, whole + parameters, score - 0.01, 1000 * whole + 1, whole, whole, whole, 1.5,
        [()] * HOSTS, ops, ["as configured"] * HOSTS,
        {"calibration_error": 0.1 * score, "accuracy.0": score, "accuracy.1": score - 0.1}, [], [],
    )  # fmt: skip


def contest(training_seeds: Sequence[int | None]) -> ComparisonResult:
    """Return a comparison of policies with these training seeds and one rival; without any, of rules alone."""
    random = np.random.default_rng(0)
    host = random.uniform(0.3, 0.9, size=HOSTS)
    trained = [host + 0.1 * (1 + i) + 0.01 * random.normal(size=HOSTS) for i in range(len(training_seeds))]
    rules = [
        Entry("random", [outcome("random", host, 390)], [None]),
        Entry("climbing", [outcome("climbing", host - 0.05 * random.uniform(size=HOSTS), 390)], [None]),
    ]
    learned = [
        Entry(name, [outcome(name, row + gain * random.uniform(size=HOSTS), 400) for row in trained], [*training_seeds])
        for name, gain in (("tamiyo", 0.0), ("static tamiyo", 0.2))
    ]
    rival = Entry(RIVAL, [outcome(RIVAL, host + 0.05 * random.normal(size=HOSTS), 395)], [5])
    return ComparisonResult(
        policies=[
            LearnedController(nn.Identity(), nn.Identity(), source=f"{seed}.ckpt", training_seed=seed)
            for seed in training_seeds
        ],
        rng_seeds=[101 + 2 * i for i in range(HOSTS)],
        entries=[learned[0], *rules, rival, *learned[1:]] if training_seeds else rules,
        schedules={"schedule": Schedule(tuple(SLOTS), ())},
        notes=["6 of 6 hosts"],
        score="accuracy",
    )


@pytest.fixture(params=[[0], [0, 7], [None], []], ids=["one training seed", "two", "unknown", "rules alone"])
def played(request: pytest.FixtureRequest) -> ComparisonResult:
    return contest(request.param)


def test_the_csv_has_a_row_per_host_controller_and_training_seed(played: ComparisonResult, tmp_path: Path) -> None:
    names = write_report(played, tmp_path, {})

    expected = [(c, i, host) for c in played.entries for i in range(len(c.outcomes)) for host in range(HOSTS)]
    for row, (contender, i, host) in zip(csv_rows(tmp_path / "evaluation.csv"), expected, strict=True):
        seed = contender.training_seeds[i]
        assert (row["controller"], row["training_seed"]) == (contender.name, "" if seed is None else str(seed))
        assert (row["host"], row["host_seed"]) == (str(host), str(101 + 2 * host))
        for column in COLUMNS:
            assert float(row[column]) == pytest.approx(float(getattr(contender.outcomes[i], column)[host]), rel=1e-8)
        assert float(row["accuracy.1"]) == pytest.approx(contender.outcomes[i].metrics["accuracy.1"][host])
    assert played.entries == [] or "1.500" in (tmp_path / "evaluation.csv").read_text(), "seconds of the pool"
    assert names == ["evaluation.csv", "evaluation.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "schedule.json"])


def test_the_json_holds_intervals_and_how_it_was_made(played: ComparisonResult, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    write_report(played, folder, {"settings": {"data.n_envs": "2"}, "run": {"seed": 3}})

    read = json.loads((folder / "evaluation.json").read_text())
    ours = played.entries[0]
    assert list(read["controllers"]) == [contender.name for contender in played.entries]
    assert (read["settings"], read["run"]) == ({"data.n_envs": "2"}, {"seed": 3})
    assert read["checkpoints"] == [{"training_seed": t.training_seed, "source": t.source} for t in played.policies]
    for contender in played.entries:
        said = read["controllers"][contender.name]
        assert all(said[column] == mean_interval(contender.values(column))._asdict() for column in COLUMNS)
        lead = ours.values("objective") - contender.values("objective")
        assert said["ahead"] == mean_interval(lead)._asdict()
        assert [one["training_seed"] for one in said["ahead_by_training_seed"]] == ours.training_seeds
        assert [one["mean"] for one in said["ahead_by_training_seed"]] == pytest.approx(lead.mean(1))
    assert read_schedule(folder / "schedule.json") == played.schedules["schedule"]


def test_what_is_no_number_is_null_or_an_empty_cell(tmp_path: Path) -> None:
    broken = contest([0])
    broken.entries[1].outcomes[0].loss[2] = np.inf
    broken.entries[1].outcomes[0].metrics["accuracy.1"][2] = np.nan

    write_report(broken, tmp_path, {})

    assert json.loads((tmp_path / "evaluation.json").read_text())["controllers"]["random"]["loss"]["mean"] is None
    rows = [row for row in csv_rows(tmp_path / "evaluation.csv") if row["controller"] == "random"]
    assert [row["accuracy.1"] == "" for row in rows] == [host == 2 for host in range(HOSTS)]


def test_the_tables_fit_and_compare_everyone_with_the_first_row(played: ComparisonResult) -> None:
    assert format_interval(Interval(0.5731, 0.5561, 0.5901)) == "0.573 ± 0.017"
    tables = make_tables(played)
    console = Console(file=io.StringIO(), width=110)
    for table in tables:
        console.print(table)
    assert "…" not in console.file.getvalue(), "nothing is cut off"
    (headings, results), (_, costs), (of_metrics, further) = (
        (
            [column.header for column in table.columns],
            list(zip(*(column.cells for column in table.columns), strict=True)),
        )
        for table in tables
    )
    first, other = played.entries[0], played.entries[-1]

    assert headings == ["controller", "test accuracy", "objective", f"{first.name} ahead"]
    assert results[0][3] == "" and len(results) == len(costs) == len(further) == len(played.entries)
    measured = (other.values("score"), other.values("objective"), played.lead(other))
    assert results[-1] == (other.name, *(format_interval(mean_interval(values)) for values in measured))
    score = other.values("score").mean()
    assert of_metrics == ["controller", "calibration error", "lowest accuracy"]
    assert further[-1][1:] == (f"{0.1 * score:.3f}", f"{score - 0.1:.3f} (1)")


@pytest.mark.parametrize(("lead", "relation"), [(0.1, "ahead of"), (-0.1, "behind"), (0.0, "level with")])
def test_the_last_sentence_says_what_the_policy_is_worth_against_the_best_other_controller(
    lead: float, relation: str
) -> None:
    played = contest([0])
    noise = np.random.default_rng(1).normal(size=HOSTS)
    best = played.entries[0].outcomes[0].score - lead + 0.01 * (noise - noise.mean())
    entries = [*played.entries, Entry("periodic", [outcome("periodic", best, 390)], [None])]
    if lead >= 0.0:  # a control of the policy does not count, however good it is
        entries.append(Entry("yoked", [outcome("yoked", best + 1.0, 390)], [0]))
    others = [one for one in entries[1:] if one.name not in ("static tamiyo", "yoked")]
    expected = max(others, key=lambda entry: entry.values("objective").mean()).name

    sentence = conclusion(played._replace(entries=entries))

    assert sentence.startswith(f"tamiyo is {relation} {expected}, the best controller beside it, on {HOSTS} hosts")


def test_files_of_an_earlier_comparison_are_removed_and_those_of_the_user_and_of_a_search_stay(tmp_path: Path) -> None:
    kept = ["best_schedule.json", "schedule_mine.json", "notes.txt"]
    for name in ("schedule12.json", *kept):
        (tmp_path / name).touch()

    names = write_report(contest([0]), tmp_path, {})

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, *names, "schedule.json"])
