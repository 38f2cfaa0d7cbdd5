"""TensorBoard: everything that the documentation promises is in the files of a real run, once, and finite."""

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from esper_lightning.callbacks import DEFAULT_CALLBACKS, Telemetry
from esper_lightning.telemetry.metrics import CUSTOM_SCALARS
from tests.runs import CONFIGS, ROOT, cli, continuation, differences, fit, fit_saving_ticks, only_run, with_callback

RICH = (
    *("--config", str(CONFIGS / "smoke.yaml"), "--model.evaluation.hosts=0", "--trainer.enable_progress_bar=false"),
    "--data.env.training.precision=fp16",
    *("--model.ppo.epochs=1", "--model.ppo.minibatches=1"),  # raises an anomaly
    *("--data.n_envs=6", "--model.ppo.normalize_rewards=true", "--seed_everything=3"),
    *with_callback(Telemetry),
)
"""Settings of a run with data under every tag, also of skipped steps."""

PAGE = (ROOT / "docs" / "reference" / "telemetry.md").read_text()

SCALARS, HISTOGRAMS = (
    re.findall(r"^\| `(.+?)` \|", PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0], re.MULTILINE)
    for title in ("Scalars", "Histograms")
)
"""Tags that the page describes."""

NOT_HERE = {"compile/recompilations", "memory/cuda", "tasks/<task>/<objective, score, parameters>", "test/<metric>"}
"""Tags that need compilation (tests/ppo/test_compiled_policy.py), a GPU (tests/envs/executors/test_imitated_gpu.py),
several tasks (tests/cli/test_mixed.py) or a comparison (tests/cli/test_test_command.py)."""

EVERYTHING = {"scalars": 0, "histograms": 0, "tensors": 0}


def read_scalars(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance=EVERYTHING).Reload()


@pytest.fixture(scope="module")
def run_with_every_tag(tmp_path_factory: pytest.TempPathFactory) -> EventAccumulator:
    """Return what TensorBoard's reader finds in the files of a run that writes every tag."""
    root = tmp_path_factory.mktemp("rich")
    cli(*RICH, "--trainer.default_root_dir", str(root))
    return read_scalars(only_run(root).folder)


def matching(tag: str, names: Iterable[str]) -> list[str]:
    """Return the names that a tag describes: each part in angle brackets stands for any text."""
    parts = re.split(r"(<[^>]+>)", tag)
    pattern = "".join(".+" if part.startswith("<") else re.escape(part) for part in parts)
    return [name for name in names if re.fullmatch(pattern, name)]


def test_the_page_describes_every_scalar_and_all_of_them_are_finite_and_in_order(
    run_with_every_tag: EventAccumulator,
) -> None:
    written = run_with_every_tag.Tags()["scalars"]

    assert len(SCALARS) > 70
    assert {tag for tag in SCALARS if not matching(tag, written)} == NOT_HERE
    assert {name for name in written if not any(matching(tag, [name]) for tag in SCALARS)} == set()
    for name in written:
        points = run_with_every_tag.Scalars(name)
        assert all(math.isfinite(point.value) for point in points), name
        steps = [point.step for point in points]
        assert steps == sorted(set(steps)), f"{name}: each tick once"


def test_histograms_are_those_of_the_page(run_with_every_tag: EventAccumulator) -> None:
    tags = run_with_every_tag.Tags()

    assert sorted(tags["histograms"]) == sorted(HISTOGRAMS)
    for tag in HISTOGRAMS:
        assert all(event.histogram_value.num > 0 for event in run_with_every_tag.Histograms(tag))


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


@pytest.mark.slow
def test_telemetry_does_not_change_learning(tmp_path: Path) -> None:
    without = [name for name in DEFAULT_CALLBACKS if not name["class_path"].endswith("Telemetry")]
    fit(tmp_path / "on")
    fit(tmp_path / "off", f"--trainer.callbacks={json.dumps(without)}")
    on, off = (continuation(only_run(tmp_path / name).last) for name in ("on", "off"))

    for part in ("state_dict", "optimizer_states", "HostPoolData"):
        assert differences(on[part], off[part]) == []
    assert differences(on["callbacks"]["RolloutState"], off["callbacks"]["RolloutState"]) == []
    folder = only_run(tmp_path / "off").folder
    assert not (folder / "events.jsonl").exists()
    assert not [tag for tag in read_scalars(folder).Tags()["scalars"] if tag.startswith(("hosts/", "growth/"))]


def test_gradients_of_the_policy_s_layers_are_logged_by_the_callback_of_the_page(tmp_path: Path) -> None:
    """A12: the gradient norm of each parameter of the policy can be looked at."""
    (program,) = (text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "PolicyGradients" in text)
    (tmp_path / "policy_gradients.py").write_text(program)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        fit(tmp_path / "run", "--trainer.callbacks+=policy_gradients.PolicyGradients", "--trainer.max_epochs=1")

    norms = {tag: points for tag, points in only_run(tmp_path / "run").scalars().items() if tag.startswith("policy/")}
    assert len(norms) > 10 and all(step == 5 and norm >= 0.0 for ((step, norm),) in norms.values())


@pytest.mark.slow
def test_a_run_that_was_begun_without_telemetry_introduces_itself_later(tmp_path: Path) -> None:
    run = fit_saving_ticks(tmp_path, "--trainer.max_epochs=1", "--trainer.callbacks=[]")
    resume = ("--ckpt_path", str(run.checkpoints / "tick3.ckpt"))

    fit(tmp_path, *resume, "--trainer.max_epochs=1", *with_callback(Telemetry))

    assert "custom_scalars__config__" in read_scalars(run.folder).Tags()["tensors"]
