"""TensorBoard: everything that the documentation promises is in the files of a real run, once, and finite."""

import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from esper_lightning.callbacks import Telemetry, telemetry
from esper_lightning.ppo.update_watch import WORST_TRANSITIONS
from esper_lightning.telemetry.events import RatioExploded, read_events
from esper_lightning.telemetry.tags import FIGURES, HISTOGRAMS, SCALARS, TEXTS, Tag, guide
from esper_lightning.telemetry.tensorboard import CUSTOM_SCALARS
from tests.runs import CONFIGS, ROOT, cli, continuation, differences, fit, fit_saving_ticks, only_run, with_callback
from tests.tiers import rest_is_slow

RICH = (
    *("--config", str(CONFIGS / "smoke.yaml"), "--model.evaluation.hosts=0", "--trainer.enable_progress_bar=false"),
    "--data.env.training.precision=fp16",
    *("--data.n_envs=6", "--model.normalize.rewards=true"),
    *with_callback(
        Telemetry,
        level="debug",
        figures_every=1,
        anomalies={"least_seeds": 1, "ratio_high": {"warning": 1.001}, "ratio_low": {"warning": 0.999}},
    ),
)
"""Settings of a run with data under every tag: skipped steps, and pairs of fossilized seeds."""

NOT_HERE = {
    *("memory/cuda", "tasks/<task>/<objective, accuracy, parameters>"),
    *("test/<metric>", "growth/potential"),
}
"""Tags that need a GPU (tests/envs/executors/test_imitated_gpu.py), several tasks (tests/cli/test_mixed.py) or a
comparison (tests/cli/test_test_command.py)."""

EVERYTHING = {"scalars": 0, "images": 0, "histograms": 0, "tensors": 0}


def read_scalars(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance=EVERYTHING).Reload()


@pytest.fixture(scope="module")
def rich_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that writes every tag."""
    root = tmp_path_factory.mktemp("rich")
    cli(*RICH, "--trainer.default_root_dir", str(root))
    return only_run(root).folder


@pytest.fixture(scope="module")
def run_with_every_tag(rich_folder: Path) -> EventAccumulator:
    """Return what TensorBoard's reader finds in the files of this run."""
    return read_scalars(rich_folder)


def matching(tag: Tag, names: Iterable[str]) -> list[str]:
    return [name for name in names if tag.pattern.fullmatch(name)]


@pytest.mark.parametrize("tag", SCALARS, ids=lambda tag: tag.tag)
def test_every_documented_scalar_is_there_finite_and_in_order(run_with_every_tag: EventAccumulator, tag: Tag) -> None:
    found = matching(tag, run_with_every_tag.Tags()["scalars"])

    assert bool(found) != (tag.tag in NOT_HERE)
    for name in found:
        points = run_with_every_tag.Scalars(name)
        assert all(math.isfinite(point.value) for point in points), name
        steps = [point.step for point in points]
        assert steps == sorted(set(steps)), f"{name}: each tick once"


def test_no_scalar_is_undocumented(run_with_every_tag: EventAccumulator) -> None:
    unknown = [
        name for name in run_with_every_tag.Tags()["scalars"] if not any(matching(tag, [name]) for tag in SCALARS)
    ]

    assert not unknown


def test_figures_histograms_and_texts_are_those_that_are_documented(run_with_every_tag: EventAccumulator) -> None:
    tags = run_with_every_tag.Tags()

    assert sorted(tags["images"]) == sorted(tag.tag for tag in FIGURES)
    assert sorted(tags["histograms"]) == sorted(tag.tag for tag in HISTOGRAMS)
    texts = {f"{tag.tag}/text_summary" for tag in TEXTS}
    assert texts == {tag for tag in tags["tensors"] if tag.endswith("/text_summary")}
    for tag in FIGURES:
        assert [image.step for image in run_with_every_tag.Images(tag.tag)] == [12, 24], "after every rollout"
        assert run_with_every_tag.Images(tag.tag)[0].encoded_image_string.startswith(b"\x89PNG")
    for tag in HISTOGRAMS:
        assert all(event.histogram_value.num > 0 for event in run_with_every_tag.Histograms(tag.tag))


def test_the_guide_is_shown_in_tensorboard(run_with_every_tag: EventAccumulator) -> None:
    (shown,) = run_with_every_tag.Tensors("guide/text_summary")

    assert shown.tensor_proto.string_val[0].decode() == guide()


def test_the_layout_is_the_plugin_s_and_every_chart_has_something_to_show(run_with_every_tag: EventAccumulator) -> None:
    (stored,) = run_with_every_tag.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(stored.tensor_proto.string_val[0])
    names = [*run_with_every_tag.Tags()["scalars"], "memory/cuda"]

    assert [category.title for category in layout.category] == list(CUSTOM_SCALARS)
    charts = [chart for category in layout.category for chart in category.chart]
    assert len(charts) == sum(map(len, CUSTOM_SCALARS.values()))
    for chart in charts:
        margin = [tag for series in chart.margin.series for tag in (series.value, series.lower, series.upper)]
        assert set(margin) <= set(names), chart.title
        patterns = list(chart.multiline.tag)
        assert margin or patterns
        for pattern in patterns:
            assert any(re.fullmatch(pattern, name) for name in names), f"{chart.title}: nothing matches {pattern}"


def test_ratios_that_exploded_are_events_of_their_update(rich_folder: Path) -> None:
    """The bounds of this run are so tight that every update exceeds them."""
    told = [event for event in read_events(rich_folder / "events.jsonl") if isinstance(event, RatioExploded)]

    assert [(one.tick, one.update) for one in told] == [(12, 1)] * WORST_TRANSITIONS + [(24, 2)] * WORST_TRANSITIONS
    for one in told:
        assert one.tick - 12 < one.action_tick <= one.tick and 0 <= one.host < 6
        assert "op" in one.heads and len(one.heads) == len(one.before) == len(one.after)


@pytest.mark.slow
@pytest.mark.parametrize("tick", [4, 5, 8])
def test_a_resumed_run_goes_on_with_the_same_curves_and_doubles_nothing(tmp_path: Path, tick: int) -> None:
    """Resume in the folder of the whole run, whose later points are void."""
    every = with_callback(Telemetry, figures_every=1, raised_ticks=0)
    run = fit_saving_ticks(tmp_path, *every)
    before = run.scalars()

    fit(tmp_path, *every, "--ckpt_path", str(run.checkpoints / f"tick{tick}.ckpt"))

    after = run.scalars()
    timeless = [name for name in before if not name.startswith(("time/", "memory/", "anomaly/memory", "hp_metric"))]
    assert set(after) == set(before)
    for name in timeless:
        assert after[name] == before[name], name
    found = read_scalars(run.folder)
    for tag in (*FIGURES, *HISTOGRAMS):
        events = found.Images(tag.tag) if tag in FIGURES else found.Histograms(tag.tag)
        steps = [event.step for event in events]
        assert steps == sorted(set(steps)), tag.tag
    assert Counter(event.step for event in found.Tensors("guide/text_summary")) == {0: 1}


LEVELS = ("minimal", "normal", "debug")


@pytest.mark.parametrize("level", rest_is_slow(["off", *LEVELS], {"minimal"}))
def test_a_level_writes_what_is_documented_from_it_on(tmp_path: Path, level: str) -> None:
    fit(tmp_path, "--trainer.max_epochs=1", *with_callback(Telemetry, level=level, figures_every=1))
    folder = only_run(tmp_path).folder

    if level == "off":
        assert not (folder / "events.jsonl").exists()
        assert not [tag for tag in read_scalars(folder).Tags()["scalars"] if tag.startswith(("hosts/", "growth/"))]
        return
    found = read_scalars(folder).Tags()
    allowed = LEVELS[: LEVELS.index(level) + 1]
    for tag in SCALARS:
        if tag.level not in allowed:
            assert not [n for n in matching(tag, found["scalars"]) if not documented_at(n, allowed)], tag.tag
    assert bool(found["images"]) == bool(found["histograms"]) == (level != "minimal")
    assert bool([name for name in found["scalars"] if name.startswith("layers/")]) == (level == "debug")


def documented_at(name: str, levels: tuple[str, ...]) -> bool:
    return any(matching(tag, [name]) for tag in SCALARS if tag.level in levels)


def test_an_anomaly_raises_the_level_for_a_while(tmp_path: Path) -> None:
    """A frozen policy is critical at the second update, at tick 10."""
    fit(
        *(tmp_path, "--trainer.max_epochs=4", "--model.ppo.lr={start: 0.0, end: 0.0}"),
        *with_callback(Telemetry, raised_ticks=7, level="minimal"),
    )
    run = only_run(tmp_path)
    scalars = run.scalars()

    assert [step for step, _ in scalars["hosts/accuracy"]] == list(range(11, 18))
    assert scalars["telemetry/level"] == [(5, 1.0), (10, 1.0), (15, 3.0), (20, 1.0)]
    text = (run.folder / "events.jsonl").read_text()
    assert re.findall(r'"type":"level","tick":(\d+),"level":"(\w+)"', text) == [("10", "debug"), ("17", "minimal")]


@pytest.mark.slow
def test_telemetry_does_not_change_learning(tmp_path: Path) -> None:
    for level in ("off", "debug"):
        fit(tmp_path / level, *with_callback(Telemetry, level=level, anomalies={"enabled": False}))
    off, debug = (continuation(only_run(tmp_path / level).last) for level in ("off", "debug"))

    for part in ("state_dict", "optimizer_states", "HostPoolData"):
        assert differences(off[part], debug[part]) == []
    assert differences(off["callbacks"]["RolloutState"], debug["callbacks"]["RolloutState"]) == []


def test_the_page_shows_the_guide() -> None:
    assert guide() in (ROOT / "docs" / "reference" / "telemetry.md").read_text()


@pytest.mark.slow
def test_a_run_that_was_begun_at_off_introduces_itself_later(tmp_path: Path) -> None:
    """Resume in the middle of a rollout whose start was not observed: no figure of it is drawn."""
    run = fit_saving_ticks(tmp_path, "--trainer.max_epochs=1", *with_callback(Telemetry, level="off"))

    fit(
        tmp_path,
        "--ckpt_path",
        str(run.checkpoints / "tick3.ckpt"),
        "--trainer.max_epochs=1",
        *with_callback(Telemetry, figures_every=1),
    )

    tags = read_scalars(run.folder).Tags()
    assert "custom_scalars__config__" in tags["tensors"] and "guide/text_summary" in tags["tensors"]
    assert sorted(tags["images"]) == ["figures/blueprints", "figures/hosts"]


@pytest.mark.slow
def test_a_damaged_file_of_events_is_set_aside_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, "--trainer.max_epochs=1")
    run = only_run(tmp_path)
    (run.folder / "events.jsonl").write_text("nonsense\n")
    capsys.readouterr()

    fit(tmp_path, "--trainer.max_epochs=2", "--ckpt_path", str(run.last))

    assert "events.jsonl, line 1: " in capsys.readouterr().out.replace("\n", "")
    assert (run.folder / "events.1.jsonl").read_text() == "nonsense\n"
    assert (run.folder / "events.jsonl").read_text().startswith('{"type":"started","tick":5,')


def test_a_look_for_which_memory_does_not_suffice_is_switched_off_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_large(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(telemetry, "layer_gradients", too_large)
    fit(tmp_path, "--trainer.max_epochs=1", *with_callback(Telemetry, level="debug"))

    said = capsys.readouterr().out.replace("\n", " ")
    assert said.count("telemetry: layer_hosts is 0 from now on: out of memory: CUDA out of memory.") == 1
