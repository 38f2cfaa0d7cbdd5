import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from torch import nn

from esper_lightning.controllers.schedules import Schedule, read_schedule
from esper_lightning.envs import Op
from esper_lightning.evaluation.checkpoints import TrainedPolicy
from esper_lightning.evaluation.comparison import ComparisonResult, Entry
from esper_lightning.evaluation.figures import accuracy_figure, pareto_figure, timeline_figure, write_figures
from esper_lightning.evaluation.play import Outcome, PoolTrace
from esper_lightning.evaluation.report import COLUMNS, format_interval, make_tables, write_report
from esper_lightning.evaluation.statistics import Interval, effect_size, mean_interval
from esper_lightning.growth.stages import Stage

HOSTS, TICKS, SLOTS = 6, 4, ["block1", "block2"]
RIVAL = "rival best.ckpt"


def outcome(name: str, accuracy: np.ndarray, parameters: float) -> Outcome:
    random = np.random.default_rng(len(name))
    trace = PoolTrace(
        accuracy=random.uniform(size=(TICKS, HOSTS)),
        ops=random.integers(0, 4, size=(TICKS, HOSTS)),
        stages=random.integers(0, 6, size=(TICKS, HOSTS, len(SLOTS))),
    )
    whole = np.arange(HOSTS)
    return Outcome(
        name, accuracy, 1 - accuracy, whole + parameters, accuracy - 0.01, 1000 * whole + 1, whole, whole, whole, 1.5,
        [()] * HOSTS, trace, ["as configured"] * HOSTS,
        {"calibration_error": 0.1 * accuracy, "accuracy.0": accuracy, "accuracy.1": accuracy - 0.1},
    )  # fmt: skip


def untrained(training_seed: int | None, source: str) -> TrainedPolicy:
    return TrainedPolicy(training_seed, source, nn.Identity(), nn.Identity())


def contest(training_seeds: Sequence[int | None]) -> ComparisonResult:
    """Return a comparison of policies with these training seeds and one rival; without any, of rules alone."""
    random = np.random.default_rng(0)
    host = random.uniform(0.3, 0.9, size=HOSTS)
    trained = [host + 0.1 * (1 + i) + 0.01 * random.normal(size=HOSTS) for i in range(len(training_seeds))]
    rules = [
        Entry("random", [outcome("random", host, 390)], [None]),
        Entry("climbing, zero", [outcome("climbing, zero", host - 0.05 * random.uniform(size=HOSTS), 390)], [None]),
    ]
    learned = [
        Entry(name, [outcome(name, row + gain * random.uniform(size=HOSTS), 400) for row in trained], [*training_seeds])
        for name, gain in (("tamiyo", 0.0), ("yoked", -0.05), ("static tamiyo", 0.2))
    ]
    rival = Entry(RIVAL, [outcome(RIVAL, host + 0.05 * random.normal(size=HOSTS), 395)], [5])
    return ComparisonResult(
        policies=[untrained(seed, f"{seed}.ckpt") for seed in training_seeds],
        rivals={RIVAL: untrained(5, "best.ckpt")} if training_seeds else {},
        rng_seeds=[101 + 2 * i for i in range(HOSTS)],
        entries=[learned[0], *rules, rival, *learned[1:]] if training_seeds else rules,
        schedules={"schedule": Schedule(tuple(SLOTS), ())},
        notes=["6 of 6 hosts"],
        networks=[],
    )


@pytest.fixture(params=[[0], [0, 7], [None], []], ids=["one training seed", "two", "unknown", "rules alone"])
def played(request: pytest.FixtureRequest) -> ComparisonResult:
    return contest(request.param)


def test_an_interval_is_shown_as_mean_and_half_width() -> None:
    assert format_interval(Interval(0.5731, 0.5561, 0.5901), 3) == "0.573 ± 0.017"
    assert format_interval(Interval(-412.4, -420.4, -404.4), 0) == "-412 ± 8"


def test_the_csv_has_a_row_per_host_controller_and_training_seed(played: ComparisonResult, tmp_path: Path) -> None:
    write_report(played, tmp_path, {})

    with (tmp_path / "evaluation.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    expected = [(c, i, host) for c in played.entries for i in range(len(c.outcomes)) for host in range(HOSTS)]
    assert len(rows) == len(expected)
    for row, (contender, i, host) in zip(rows, expected, strict=True):
        trained = contender.name.endswith("tamiyo") or contender.name == "yoked"
        seed = played.policies[i].training_seed if trained else 5 if contender.name == RIVAL else None
        assert (row["controller"], row["training_seed"]) == (contender.name, "" if seed is None else str(seed))
        assert (row["host"], row["host_seed"]) == (str(host), str(101 + 2 * host))
        for column in COLUMNS:
            assert float(row[column]) == pytest.approx(float(getattr(contender.outcomes[i], column)[host]), rel=1e-8)
        assert row["pool_seconds"] == "1.500"


def test_the_json_holds_intervals_effect_sizes_and_how_it_was_made(played: ComparisonResult, tmp_path: Path) -> None:
    write_report(played, tmp_path, {"settings": {"data.n_envs": "2"}, "run": {"seed": 3}})

    read = json.loads((tmp_path / "evaluation.json").read_text())
    ours = played.entries[0]
    assert list(read["controllers"]) == [contender.name for contender in played.entries]
    assert read["settings"] == {"data.n_envs": "2"}
    assert read["run"] == {"seed": 3}
    assert read["checkpoints"] == [{"training_seed": t.training_seed, "source": t.source} for t in played.policies]
    assert read["rivals"] == ({RIVAL: {"training_seed": 5, "source": "best.ckpt"}} if played.policies else {})
    assert ours.name in read["ahead"]
    for contender in played.entries[1:]:
        said = read["controllers"][contender.name]
        for column in COLUMNS:
            assert said[column] == mean_interval(contender.values(column))._asdict()
        lead = ours.values("objective") - contender.values("objective")
        assert said["ahead"]["d_z"] == pytest.approx(effect_size(lead))
        assert [said["ahead"][end] for end in Interval._fields] == list(mean_interval(lead))
        assert [one["training_seed"] for one in said["ahead_by_training_seed"]] == ours.training_seeds
        for one, row in zip(said["ahead_by_training_seed"], lead, strict=True):
            assert one["mean"] == pytest.approx(row.mean())
    assert read["controllers"][ours.name]["ahead"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "d_z": None}


def test_a_number_that_is_none_is_null(tmp_path: Path) -> None:
    broken = contest([0])
    broken.entries[1].outcomes[0].loss[2] = np.inf

    write_report(broken, tmp_path, {})

    assert json.loads((tmp_path / "evaluation.json").read_text())["controllers"]["random"]["loss"]["mean"] is None


def test_schedules_that_were_found_are_files(played: ComparisonResult, tmp_path: Path) -> None:
    write_report(played, tmp_path / "deep" / "folder", {})

    assert read_schedule(tmp_path / "deep" / "folder" / "schedule.json") == played.schedules["schedule"]


def printed(played: ComparisonResult) -> str:
    console = Console(file=io.StringIO(), width=110)
    for table in make_tables(played):
        console.print(table)
    return console.file.getvalue()


def test_the_tables_fit_and_compare_everyone_with_the_first_row(played: ComparisonResult) -> None:
    shown = printed(played)

    assert "6 fresh hosts" in shown
    assert "…" not in shown, "nothing is cut off"
    first, other = played.entries[0], played.entries[-1]
    assert f"{first.name} ahead" in shown
    rows = [line for line in shown.splitlines() if f"│ {other.name} " in line]
    lead = mean_interval(first.values("objective") - other.values("objective"))
    assert format_interval(lead, 3) in rows[0]
    assert format_interval(mean_interval(other.values("accuracy")), 3) in rows[0]
    assert len(rows) == (4 if len(played.policies) > 1 else 3)


def test_the_further_metrics_are_a_table_with_the_weakest_class(played: ComparisonResult) -> None:
    lines = printed(played).splitlines()
    start = next(i for i, line in enumerate(lines) if "further test metrics" in line)
    heading = next(line for line in lines[start:] if "controller" in line)
    row = next(line for line in lines[start:] if "│ random " in line)

    assert [word.strip() for word in heading.split("┃")[2:-1]] == ["calibration error", "lowest accuracy"]
    accuracy = next(entry for entry in played.entries if entry.name == "random").values("accuracy").mean()
    assert [cell.strip() for cell in row.split("│")[2:-1]] == [f"{0.1 * accuracy:.3f}", f"{accuracy - 0.1:.3f} (1)"]


def test_a_metric_that_is_undefined_on_a_host_is_an_empty_cell(tmp_path: Path) -> None:
    played = contest([0])
    played.entries[1].outcomes[0].metrics["accuracy.1"][2] = np.nan

    write_report(played, tmp_path, {})

    with (tmp_path / "test_metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["controller"] == "random"]
    known = played.entries[1].outcomes[0].metrics
    assert [row["accuracy.1"] == "" for row in rows] == [host == 2 for host in range(HOSTS)]
    assert [float(row["calibration_error"]) for row in rows] == pytest.approx(known["calibration_error"].tolist())


def test_several_training_seeds_are_told_apart_and_taken_together() -> None:
    played = contest([0, 7])
    lines = printed(played).splitlines()

    start = next(i for i, line in enumerate(lines) if "by training seed" in line)
    heading = next(line for line in lines[start:] if "controller" in line)
    assert [word.strip() for word in heading.split("┃")[1:-1]] == ["controller", "seed 0", "seed 7", "all"]
    row = next(line for line in lines[start:] if "│ random " in line)
    leads = played.entries[0].values("objective") - played.entries[1].values("objective")
    assert [cell.strip() for cell in row.split("│")[2:-1]] == [
        *(format_interval(mean_interval(lead), 3) for lead in leads),
        format_interval(mean_interval(leads), 3),
    ]


def test_the_pareto_figure_has_every_controller_where_it_belongs(played: ComparisonResult) -> None:
    figure = pareto_figure(played)

    for axes, (column, scale) in zip(figure.axes, (("parameters", 1.0), ("flops", 1e-6)), strict=True):
        drawn = [tuple(float(line.get_xydata()[0][k]) for k in (0, 1)) for line, *_ in axes.containers]
        expected = [
            (scale * contender.values(column).mean(), contender.values("accuracy").mean())
            for contender in played.entries
        ]
        np.testing.assert_allclose(drawn, expected)
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert said == [contender.name for contender in played.entries]


def test_curves_are_means_over_hosts_and_training_seeds_after_each_tick(played: ComparisonResult) -> None:
    (axes,) = accuracy_figure(played).axes

    for line, contender in zip(axes.lines, played.entries, strict=True):
        expected = np.mean([one.trace.accuracy for one in contender.outcomes], axis=(0, 2))
        np.testing.assert_allclose(line.get_xydata(), np.column_stack([range(1, TICKS + 1), expected]))


def test_a_timeline_has_a_row_per_host_and_a_column_per_tick(played: ComparisonResult) -> None:
    trace = played.reference.outcomes[0].trace
    figure = timeline_figure(trace, SLOTS, "tamiyo")

    assert [axes.get_title() for axes in figure.axes] == ["action", *SLOTS]
    cells = [axes.images[0].get_array() for axes in figure.axes]
    np.testing.assert_array_equal(cells[0], trace.ops.T)
    for k in (0, 1):
        np.testing.assert_array_equal(cells[1 + k], trace.stages[:, :, k].T)
    there = {Op(op).name for op in np.unique(trace.ops)} | {Stage(stage).name for stage in np.unique(trace.stages)}
    assert {text.get_text() for text in figure.legends[0].get_texts()} == there


def test_a_timeline_gives_every_op_and_stage_a_colour_of_its_own() -> None:
    ops = np.arange(len(Op))[:, None]
    stages = np.arange(len(Stage))[:, None, None]
    figure = timeline_figure(PoolTrace(ops * 0.0, ops, stages), ["slot"], "all")

    for axes, number in zip(figure.axes, (len(Op), len(Stage)), strict=True):
        image = axes.images[0]
        colours = image.cmap(image.norm(image.get_array()))
        assert len({tuple(colour) for colour in colours.reshape(-1, 4)}) == number


def test_figures_are_png_files_one_timeline_for_each_tamiyo(played: ComparisonResult, tmp_path: Path) -> None:
    paths = write_figures(played, SLOTS, tmp_path)

    timelines = ["timeline0", "timeline1"] if len(played.policies) == 2 else ["timeline"]
    assert [path.stem for path in paths] == ["pareto", "curves", *timelines]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in paths}
