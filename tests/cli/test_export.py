"""`grow`, and `export` of what it has left."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from esper_lightning.cli.commands import NETWORK_FILE, PROGRAM_FILE
from tests.runs import CONFIGS, command, csv_rows, refusal


def write_config(path: Path, **groups: dict[str, Any]) -> Path:
    """Write configs/smoke.yaml with two minibatches, two ticks and further settings, and return the file."""
    settings = yaml.safe_load((CONFIGS / "smoke.yaml").read_text())
    settings["data"]["env"] |= {"horizon": 2, "executor": "loop", "training": {"batches": 2}}
    for name, group in groups.items():
        settings[name] = settings.get(name, {}) | group
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a network that was grown by `grow`."""
    folder = tmp_path_factory.mktemp("grow") / "new" / "grown"
    config = write_config(folder.parents[1] / "short.yaml")
    settings = yaml.safe_load(config.read_text())
    settings["data"]["env"] |= {"horizon": 8, "training": {"batches": 8, "lr": 0.02, "max_grad_norm": None}}
    config.write_text(yaml.safe_dump(settings))
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text("of an earlier training")
    command("grow", str(config), "periodic", f"--out={folder}")
    return folder


def test_grow_leaves_a_network_its_program_its_folded_form_and_what_each_is_worth(grown: Path) -> None:
    assert (grown / "events.jsonl").read_text().startswith('{"type":"started"')
    files = ["scores.csv", "folded", NETWORK_FILE, PROGRAM_FILE, "events.jsonl"]
    assert sorted(path.name for path in grown.iterdir()) == sorted(files)
    assert sorted(path.name for path in (grown / "folded").iterdir()) == [PROGRAM_FILE, NETWORK_FILE]
    table = csv_rows(grown / "scores.csv")
    rows = {row["step"]: {name: float(row[name]) for name in row if name != "step"} for row in table}
    names = ["before training", "grown", f"loaded from {NETWORK_FILE}", f"program {PROGRAM_FILE}", "folded"]
    assert list(rows) == names
    first, result, loaded, program, folded = rows.values()
    assert loaded == result | {"max_difference": 0.0}
    assert first["parameters"] == 390 < result["parameters"] == program["parameters"]
    assert first["test_score"] < result["test_score"]
    for each in (program, folded):
        assert each["test_score"] == pytest.approx(result["test_score"], abs=0.005)
        assert each["max_difference"] < 1e-3


def test_a_folder_is_exported_without_its_config_or_data(
    grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    target = tmp_path / "network.pt2"
    command("export", str(grown / "folded"), "pt2", f"--out={target}")
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith(f"written to {target}: on 8 inputs its outputs differ by at most")
    original, program = (torch.export.load(path) for path in (grown / PROGRAM_FILE, target))
    (samples,), _ = original.example_inputs
    torch.testing.assert_close(program.module()(samples), original.module()(samples), rtol=1e-3, atol=1e-4)


def test_mistakes_are_answered_in_one_line(grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, nosuch = tmp_path / "empty", str(tmp_path / "nosuch")
    empty.mkdir()
    (empty / PROGRAM_FILE).write_bytes((grown / PROGRAM_FILE).read_bytes()[:100])
    answers = {
        ("export", nosuch, "pt2"): f"{PROGRAM_FILE} is missing or damaged",
        ("export", str(empty), "pt2"): f"{PROGRAM_FILE} is missing or damaged",
        ("export", str(grown), "pt3"): "pt3",
        ("export", str(grown), "pt2", f"--out={empty}"): f"is a folder; name a file, such as {empty / PROGRAM_FILE}",
        ("grow", "smoke", "periodc", f"--out={nosuch}"): "did you mean 'periodic'",
        ("grow", "smoke", "nosuch.json", f"--out={nosuch}"): "nosuch.json",
    }
    for args, answer in answers.items():
        assert answer in refusal(capsys, lambda args=args: command(*args))
    assert not Path(nosuch).exists()
