"""Files, tables and figures of a comparison."""

import csv
import io
import json
from collections.abc import Sequence
from itertools import pairwise
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
from esper_lightning.evaluation.networks import NETWORK_FILES
from esper_lightning.evaluation.play import Outcome, PoolTrace
from esper_lightning.evaluation.report import COLUMNS, format_interval, make_tables, write_report
from esper_lightning.evaluation.run import remove_earlier
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
        for name, gain in (("tamiyo", 0.0), ("static tamiyo", 0.2))
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


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_csv_has_a_row_per_host_controller_and_training_seed(played: ComparisonResult, tmp_path: Path) -> None:
    write_report(played, tmp_path, {})

    expected = [(c, i, host) for c in played.entries for i in range(len(c.outcomes)) for host in range(HOSTS)]
    for row, (contender, i, host) in zip(rows_of(tmp_path / "evaluation.csv"), expected, strict=True):
        seed = contender.training_seeds[i]
        assert (row["controller"], row["training_seed"]) == (contender.name, "" if seed is None else str(seed))
        assert (row["host"], row["host_seed"]) == (str(host), str(101 + 2 * host))
        for column in COLUMNS:
            assert float(row[column]) == pytest.approx(float(getattr(contender.outcomes[i], column)[host]), rel=1e-8)
        assert row["pool_seconds"] == "1.500"


def test_the_json_holds_intervals_effect_sizes_and_how_it_was_made(played: ComparisonResult, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    write_report(played, folder, {"settings": {"data.n_envs": "2"}, "run": {"seed": 3}})

    read = json.loads((folder / "evaluation.json").read_text())
    ours = played.entries[0]
    assert list(read["controllers"]) == [contender.name for contender in played.entries]
    assert (read["settings"], read["run"]) == ({"data.n_envs": "2"}, {"seed": 3})
    assert read["checkpoints"] == [{"training_seed": t.training_seed, "source": t.source} for t in played.policies]
    assert read["rivals"] == ({RIVAL: {"training_seed": 5, "source": "best.ckpt"}} if played.policies else {})
    for contender in played.entries[1:]:
        said = read["controllers"][contender.name]
        assert all(said[column] == mean_interval(contender.values(column))._asdict() for column in COLUMNS)
        lead = ours.values("objective") - contender.values("objective")
        assert said["ahead"]["d_z"] == pytest.approx(effect_size(lead))
        assert [said["ahead"][end] for end in Interval._fields] == list(mean_interval(lead))
        assert [one["training_seed"] for one in said["ahead_by_training_seed"]] == ours.training_seeds
        assert [one["mean"] for one in said["ahead_by_training_seed"]] == pytest.approx(lead.mean(1))
    assert read["controllers"][ours.name]["ahead"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "d_z": None}
    assert read_schedule(folder / "schedule.json") == played.schedules["schedule"]


def test_what_is_no_number_is_null_or_an_empty_cell(tmp_path: Path) -> None:
    broken = contest([0])
    broken.entries[1].outcomes[0].loss[2] = np.inf
    broken.entries[1].outcomes[0].metrics["accuracy.1"][2] = np.nan

    write_report(broken, tmp_path, {})

    assert json.loads((tmp_path / "evaluation.json").read_text())["controllers"]["random"]["loss"]["mean"] is None
    rows = [row for row in rows_of(tmp_path / "test_metrics.csv") if row["controller"] == "random"]
    known = broken.entries[1].outcomes[0].metrics
    assert [row["accuracy.1"] == "" for row in rows] == [host == 2 for host in range(HOSTS)]
    assert [float(row["calibration_error"]) for row in rows] == pytest.approx(known["calibration_error"].tolist())


def printed(played: ComparisonResult) -> str:
    console = Console(file=io.StringIO(), width=110)
    for table in make_tables(played):
        console.print(table)
    return console.file.getvalue()


def table(shown: str, title: str) -> tuple[list[str], dict[str, list[str]]]:
    """Return the headings of a printed table and its cells by controller."""
    _, lines = shown.split(title)[:2]
    body = lines.split("└")[0].splitlines()
    heading = next(line for line in body if "controller" in line)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in body if "│" in line]
    return [word.strip() for word in heading.split("┃")[2:-1]], {row[0]: row[1:] for row in rows}


def test_the_tables_fit_and_compare_everyone_with_the_first_row(played: ComparisonResult) -> None:
    assert format_interval(Interval(0.5731, 0.5561, 0.5901)) == "0.573 ± 0.017"
    shown = printed(played)
    first, other = played.entries[0], played.entries[-1]
    leads = first.values("objective") - other.values("objective")

    assert "…" not in shown, "nothing is cut off"
    headings, cells = table(shown, "6 fresh hosts")
    assert headings[2] == f"{first.name} ahead" and cells[first.name][2:] == ["", ""]
    assert cells[other.name][0] == format_interval(mean_interval(other.values("accuracy")))
    assert cells[other.name][2] == format_interval(mean_interval(leads))
    headings, cells = table(shown, "further test metrics")
    accuracy = next(entry for entry in played.entries if entry.name == "random").values("accuracy").mean()
    assert headings == ["calibration error", "lowest accuracy"]
    assert cells["random"] == [f"{0.1 * accuracy:.3f}", f"{accuracy - 0.1:.3f} (1)"]
    if len(played.policies) > 1:
        headings, cells = table(shown, "by training seed")
        assert headings == ["seed 0", "seed 7", "all"]
        assert cells[other.name] == [format_interval(mean_interval(lead)) for lead in (*leads, leads)]
    else:
        assert "by training seed" not in shown


def test_the_pareto_figure_has_every_controller_where_it_belongs_and_few_labels(played: ComparisonResult) -> None:
    figure = pareto_figure(played)
    figure.canvas.draw()

    for axes, column in zip(figure.axes, ("parameters", "flops"), strict=True):
        drawn = [line.get_xydata()[0] for line, *_ in axes.containers]
        expected = [(one.values(column).mean(), one.values("accuracy").mean()) for one in played.entries]
        np.testing.assert_allclose(drawn, expected)
        sizes = [line.get_markersize() for line, *_ in axes.containers]
        assert sizes == sorted(set(sizes), reverse=True), "one at the place of another shows"
        boxes = [label.get_window_extent() for label in axes.get_xticklabels(which="both") if label.get_text()]
        boxes = sorted((box for box in boxes if box.width), key=lambda box: box.x0)
        assert all(one.x1 < other.x0 for one, other in pairwise(boxes)), "labels do not overlap"
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert said == [contender.name for contender in played.entries]


def test_curves_are_means_over_hosts_and_training_seeds_after_each_tick(played: ComparisonResult) -> None:
    (axes,) = accuracy_figure(played).axes

    for line, contender in zip(axes.lines, played.entries, strict=True):
        expected = np.mean([one.trace.accuracy for one in contender.outcomes], axis=(0, 2))
        np.testing.assert_allclose(line.get_xydata(), np.column_stack([range(1, TICKS + 1), expected]))


def test_a_timeline_has_a_row_per_host_and_a_column_per_tick_and_says_where_nothing_grew() -> None:
    trace = contest([0]).reference.outcomes[0].trace
    trace.stages[..., 1] = Stage.DORMANT
    figure = timeline_figure(trace, SLOTS, "tamiyo")

    assert [axes.get_title() for axes in figure.axes] == ["action", *SLOTS]
    cells = [axes.images[0].get_array() for axes in figure.axes]
    for shown, expected in zip(cells, (trace.ops, *np.moveaxis(trace.stages, 2, 0)), strict=True):
        np.testing.assert_array_equal(shown, expected.T)
    assert [[text.get_text() for text in axes.texts] for axes in figure.axes] == [[], [], ["nothing grew here"]]
    there = {Op(op).name for op in np.unique(trace.ops)} | {Stage(stage).name for stage in np.unique(trace.stages)}
    assert {text.get_text() for text in figure.legends[0].get_texts()} == there


def test_a_timeline_gives_every_op_and_stage_a_colour_of_its_own() -> None:
    ops, stages = np.arange(len(Op))[:, None], np.arange(len(Stage))[:, None, None]
    figure = timeline_figure(PoolTrace(ops * 0.0, ops, stages), ["slot"], "all")

    for axes, number in zip(figure.axes, (len(Op), len(Stage)), strict=True):
        image = axes.images[0]
        assert len(np.unique(image.cmap(image.norm(image.get_array())).reshape(-1, 4), axis=0)) == number


def test_figures_are_png_files_one_timeline_for_each_tamiyo(played: ComparisonResult, tmp_path: Path) -> None:
    names = write_figures(played, SLOTS, tmp_path)

    timelines = ["timeline0.png", "timeline1.png"] if len(played.policies) == 2 else ["timeline.png"]
    assert names == ["pareto.png", "curves.png", *timelines]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_files_of_an_earlier_comparison_are_removed_and_those_of_the_user_and_of_a_search_stay(tmp_path: Path) -> None:
    kept = ["best_schedule.json", "schedule_mine.json", "evaluation.csv", "notes.txt", "timeline.png.bak"]
    for name in ("schedule.json", "schedule12.json", "timeline.png", "timeline1.png", *kept):
        (tmp_path / name).touch()
    for name in ("1", "3", "mine"):
        (tmp_path / "networks" / name).mkdir(parents=True)
        for file in NETWORK_FILES:
            (tmp_path / "networks" / name / file).touch()
    (tmp_path / "networks" / "1" / "network.pt2").touch()

    remove_earlier(tmp_path)
    remove_earlier(tmp_path / "new")

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "networks"])
    saved = {path.name: len(list(path.iterdir())) for path in (tmp_path / "networks").iterdir()}
    assert saved == {"1": 1, "mine": 3}, "what was exported beside a network stays"
