"""The page of a run: its numbers are those of the run's files, and it works in a browser without a network."""

import csv
import json
import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from esper_lightning import report
from esper_lightning.__main__ import main
from esper_lightning.callbacks import Grow, Stack
from esper_lightning.cli.run_report import (
    OPS,
    STAGES,
    Moment,
    facts,
    format_ends,
    present,
    read_run,
    timeline,
)
from esper_lightning.envs import Op
from esper_lightning.evaluation.statistics import mean_interval
from esper_lightning.growth import SeedEvent, Stage
from esper_lightning.telemetry.events import SCHEMA, EventLog, HostsMeasured, Stacked, Started, Validated, read_events
from tests.runs import csv_rows, fit, make_trainer, only_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with a comparison at its end."""
    root = tmp_path_factory.mktemp("reported")
    fit(root, "--trainer.max_epochs=2", "--model.evaluation.hosts=2", "--seed_everything=3")
    return only_run(root).folder


def page_of(*folders: Path, out: Path) -> str:
    report(folders, out=out)
    return out.read_text(encoding="utf-8")


def test_the_table_has_the_numbers_of_the_comparison_and_the_settings_are_those_of_the_config(
    trained: Path, tmp_path: Path
) -> None:
    page = unescape(page_of(trained, out=tmp_path / "page.html"))

    summary = json.loads((trained / "evaluation" / "evaluation.json").read_text())
    for name, row in summary["controllers"].items():
        assert f'<th scope="row">{name}</th>' in page
        assert format_ends(row["objective"]) in page
    assert "seed_everything: 3" in page and "max_epochs: 2" in page
    assert "accelerator: gpu" not in page and "gamma" not in page.partition("<pre")[2].partition("</pre>")[0]


def test_the_hosts_of_the_page_are_the_worst_the_median_and_the_best_of_the_last_rollout(trained: Path) -> None:
    run = read_run(trained)
    assert run.started is not None
    events = list(read_events(trained / "events.jsonl"))

    ticks = [event for event in events if isinstance(event, HostsMeasured)]
    horizon, last = run.started.horizon, ticks[-1]
    assert len(ticks) == 2 * horizon and [episode.host for episode in run.episodes] == list(range(run.started.hosts))
    for episode in run.episodes:
        assert episode.rollout == 2 and len(episode.moments) == horizon
        assert episode.moments[-1].objective == last.objective[episode.host]
        stages = {
            event.slot: event.after.name
            for event in events
            if isinstance(event, SeedEvent) and event.host == episode.host and event.tick > horizon
        }
        told = {slot: stage for slot, (stage, _) in episode.moments[-1].slots.items()}
        assert told == {slot: stage for slot, stage in stages.items() if stage != "DORMANT"}
    germinated = [event for event in events if isinstance(event, SeedEvent) and event.after is Stage.GERMINATED]
    assert run.seeds is not None and run.seeds.germinated.sum() == len(germinated) > 0


def test_two_runs_are_compared_host_by_host(trained: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "version_0"
    shutil.copytree(trained, other)
    path = other / "evaluation" / "evaluation.csv"
    rows = csv_rows(path)
    for i, row in enumerate(rows):
        row["objective"] = str(float(row["objective"]) - 0.1 * (1 + i % 2))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)

    page = page_of(trained, other, out=tmp_path / "page.html")

    expected = format_ends(mean_interval(torch.tensor([[0.1, 0.2]]).double().numpy())._asdict())
    assert page.count(expected) == len({row["controller"] for row in rows})
    charts = [unescape(chart) for chart in re.findall(r'data-spec="([^"]*)"', page)]
    assert any("other/version_0 " in chart for chart in charts), "both runs have a line in the same chart"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.linear(x))


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(*(Block() for _ in range(4))), nn.Linear(8, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        outputs = self.net(batch[0])
        self.log("val_loss", F.cross_entropy(outputs, batch[1]))
        self.log("val_acc", (outputs.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


def train_own(root: Path, *callbacks: Any) -> Path:
    """Train a small network with a CSV logger, and return the logger's folder."""
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    data = list(zip(inputs.split(16), (inputs[:, 0] > 0).long().split(16), strict=True))
    settings = {"max_epochs": 6, "logger": CSVLogger(root), "enable_checkpointing": False, "num_sanity_val_steps": 2}
    trainer = make_trainer(root, *callbacks, **settings)
    loader = DataLoader(data, batch_size=None)  # pyright: ignore[reportArgumentType]
    trainer.fit(Classifier(), loader, loader)
    assert trainer.log_dir is not None
    return Path(trainer.log_dir)


def test_a_stacked_network_is_shown_with_its_blocks_and_beside_a_plain_training(tmp_path: Path) -> None:
    stacked = train_own(tmp_path / "stacked", Stack("net.1", start=1, at={0.3: 2, 0.6: 4}))
    plain = train_own(tmp_path / "plain")

    page = page_of(stacked, plain, out=tmp_path / "page.html")

    run = read_run(stacked)
    assert [(event.before, event.after) for event in run.events[Stacked]] == [(1, 2), (2, 4)]
    assert [v.step for v in run.events[Validated]] == [4, 8, 12, 16, 20, 24]
    losses = [float(row["val_loss"]) for row in csv_rows(stacked / "metrics.csv") if row["val_loss"]]
    assert [v.metrics["val_loss"] for v in run.events[Validated]] == pytest.approx(losses)
    assert json.loads(re.findall(r'data-depths="([^"]*)"', page)[0]) == [[1], [1], [2], [4], [4], [4]]
    assert "net.1: 1 → 2 at step 8; net.1: 2 → 4 at step 15" in unescape(page)
    flops = [v.flops for v in run.events[Validated]]
    assert flops[0] == 4 * 16 * 6 * (8 * 8 * 2 + 8 * 2) - 4 * 16 * 2 * 8 * 8, (
        "the first layer's inputs have no gradient"
    )
    assert flops[-1] - flops[-2] == flops[0] + 4 * 3 * 16 * 6 * 8 * 8
    assert dict(facts(run))["parameters"] == "162 at first, 378 at last"
    assert "A training without this package" in page and "last val_loss" in page


def test_the_parameters_at_first_are_those_before_the_first_blocks(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "stack.jsonl")
    log.write([Stacked(2, "net.1", 1, 2, 100), Validated(4, 4, 200, 1.0, 1.0, {"val_loss": 1.0})])
    assert dict(facts(read_run(tmp_path)))["parameters"] == "100 at first, 200 at last"


def test_grow_and_stack_in_one_training_are_shown_together(tmp_path: Path) -> None:
    folder = train_own(tmp_path, Grow(["0"]), Stack("net.1", start=2, at=0.5))
    assert "The network after tick" in page_of(folder, out=tmp_path / "page.html")
    run = read_run(folder)
    assert [validation.step for validation in run.events[Validated]] == [4, 8, 12, 16, 20, 24]
    assert [(event.before, event.after) for event in run.events[Stacked]] == [(2, 4)]
    (episode,) = run.episodes
    scores = [float(row["val_acc"]) for row in csv_rows(folder / "metrics.csv") if row["val_acc"]]
    assert [moment.score for moment in episode.moments] == pytest.approx(scores) and len(scores) == 6
    assert run.events[Validated][-1].flops > 0.0


@pytest.mark.parametrize(
    ("event", "place"), [(("DORMANT", "GERMINATED"), ("GERMINATED", "norm")), (("PROBATIONARY", "DORMANT"), None)]
)
def test_a_slot_that_is_empty_again_is_shown_as_empty(
    event: tuple[str, str], place: tuple[str, str] | None, tmp_path: Path
) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write(
        [
            Started(0, SCHEMA, 1, 1, ["a"], ["norm"], "accuracy", 10, {"a": 5}),
            SeedEvent("a", "norm", *(Stage[name] for name in event), "why", tick=1),
            HostsMeasured(1, ["WAIT"], [0.5], [1.0], [0.4], [10]),
        ]
    )
    (episode,) = read_run(tmp_path).episodes
    assert episode.moments == [Moment("WAIT", 0.5, 1.0, 0.4, 10, {} if place is None else {"a": place}, "")]


def test_advice_tells_the_present_value_of_a_setting() -> None:
    config = {"data": {"env": {"training": {"lr": 0.6}, "family": {"train": [{"fail": [1.0]}], "held_out": []}}}}
    assert present(config, "data.env.training.lr") == " (now 0.6)"
    assert present(config, "data.env.family") == ' (now {"train": [{"fail": [1.0]}]})'
    assert present(config, "Governor.rules") == present(config, "data.env.training.lr.start") == ""


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path)])
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "holds no run" in said and "runs/digits/version_0" in said


def test_every_op_and_stage_has_a_look() -> None:
    assert list(OPS) == [op.name for op in Op]
    assert list(STAGES) == [stage.name for stage in Stage]


def test_a_timeline_has_a_legend_of_what_happened_alone() -> None:
    spec = timeline(["GERMINATE"], [[("TRAINING", "norm")]], ["a"], ticks=3, rolled_back=[1]).to_dict()

    colour = spec["layer"][0]["encoding"]["color"]["scale"]
    assert colour == {"domain": ["TRAINING", "GERMINATE"], "range": [STAGES["TRAINING"][0], OPS["GERMINATE"][0]]}
    assert spec["layer"][2]["data"]["values"] == [{"tick": 1, "row": "action", "what": "rolled back"}]


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.slow
@pytest.mark.skipif(find_browser() is None, reason="needs Chromium")
def test_the_slider_moves_the_network_in_a_browser_without_errors_or_requests(trained: Path, tmp_path: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    report([trained], out=tmp_path / "page.html")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 400, "height": 800})
        faults: list[str] = []
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith("file:") else faults.append(request.url))
        page.goto((tmp_path / "page.html").as_uri())
        page.wait_for_selector(".host svg")
        states = json.loads(page.locator(".host").first.get_attribute("data-states"))
        slider = page.locator(".host input").first
        for tick in (1, len(states)):
            slider.fill(str(tick))
            shown = (
                page.locator(".host").first.locator(".slot").evaluate_all("all => all.map(one => one.dataset.state)")
            )
            assert shown == [stage for stage, _ in states[tick - 1]]
        slider.press("ArrowLeft")
        assert page.locator(".host output").first.text_content() == str(len(states) - 1)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        browser.close()
    assert faults == []
