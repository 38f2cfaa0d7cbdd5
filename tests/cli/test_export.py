"""`grow`, and `export` of what it has left."""

import csv
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
import yaml

from esper_lightning.__main__ import main
from esper_lightning.evaluation.networks import HOST_FILE, NETWORK_FILE, SAMPLES_FILE, load_host, read_description
from tests.gym.configs import write_config


def run(*args: str) -> None:
    """Run a command in this process."""
    with patch.object(sys, "argv", sys.argv[:1]):  # Lightning warns of arguments of the process
        main([*args])


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a network that was grown by `grow`."""
    folder = tmp_path_factory.mktemp("grow") / "new" / "grown"
    config = write_config(folder.parents[1] / "short.yaml")
    settings = yaml.safe_load(config.read_text())
    settings["data"]["env"] |= {"horizon": 8, "training": {"batches": 8, "lr": 0.02, "max_grad_norm": None}}
    config.write_text(yaml.safe_dump(settings))
    run("grow", str(config), "periodic", f"--out={folder}")
    return folder


def test_grow_leaves_a_network_its_program_its_folded_form_and_what_each_is_worth(grown: Path) -> None:
    files = ["scores.csv", "folded", HOST_FILE, NETWORK_FILE, "network.pt2", SAMPLES_FILE, "events.jsonl"]
    assert sorted(path.name for path in grown.iterdir()) == sorted(files)
    with (grown / "scores.csv").open(newline="") as file:
        rows = {row["step"]: {name: float(row[name]) for name in row if name != "step"} for row in csv.DictReader(file)}
    names = ["before training", "grown", f"loaded from {NETWORK_FILE}", "program network.pt2", "folded"]
    assert list(rows) == names
    first, result, loaded, program, folded = rows.values()
    assert loaded == result | {"max_difference": 0.0}
    assert first["parameters"] == 390 < result["parameters"] == program["parameters"]
    assert first["test_score"] < result["test_score"]
    for each in (program, folded):
        assert each["test_score"] == pytest.approx(result["test_score"], abs=0.005)
        assert each["max_difference"] < 1e-3
    description = read_description(grown)
    assert description["test_score"] == pytest.approx(result["test_score"], abs=1e-6)
    assert description["controller"] == "periodic"


def test_a_folder_is_exported_without_its_config_or_data(grown: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    run("export", str(grown / "folded"), "pt2")
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(
        f"written to {grown / 'folded' / 'network.pt2'}: on 8 inputs its outputs differ by at most"
    )
    samples = safetensors.torch.load_file(grown / SAMPLES_FILE)
    program = torch.export.load(grown / "folded" / "network.pt2").module()
    torch.testing.assert_close(program(samples["inputs"]), samples["outputs"], rtol=1e-3, atol=1e-4)
    assert torch.equal(load_host(grown, read_description(grown))(samples["inputs"]), samples["outputs"])
    (grown / "folded" / "network.pt2").unlink()


def edited(folder: Path, to: Path, **host: Any) -> Path:
    """Return a copy of a folder with changes of the description's host."""
    to.mkdir()
    for name in (NETWORK_FILE, SAMPLES_FILE):
        (to / name).write_bytes((folder / name).read_bytes())
    description = json.loads((folder / HOST_FILE).read_text())
    description["host"] |= host
    (to / HOST_FILE).write_text(json.dumps(description))
    return to


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        run(*args)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("arguments", [{"pools": -1}, {"base": "x"}, {"nosuch": 1}])
def test_a_host_that_cannot_be_made_is_refused(
    arguments: dict[str, Any], grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = json.loads((grown / HOST_FILE).read_text())["host"]["init_args"]
    folder = edited(grown, tmp_path / "a", init_args=given | arguments)
    assert "cannot be made" in refused(capsys, "export", str(folder), "pt2")


def test_damaged_slots_and_samples_of_a_folder_are_refused_in_one_line(
    grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = edited(grown, tmp_path / "a")
    description = json.loads((folder / HOST_FILE).read_text())
    (folder / HOST_FILE).write_text(json.dumps(description | {"slots": []}))
    assert "is damaged" in refused(capsys, "export", str(folder), "pt2")
    (folder / HOST_FILE).write_text(json.dumps(description))
    (folder / NETWORK_FILE).unlink()
    assert NETWORK_FILE in refused(capsys, "export", str(folder), "pt2")


def wrong_outputs(folder: Path, to: Path) -> Path:
    copy = edited(folder, to)
    samples = safetensors.torch.load_file(copy / SAMPLES_FILE)
    safetensors.torch.save_file(samples | {"outputs": samples["outputs"] + 1.0}, copy / SAMPLES_FILE)
    return copy


def test_mistakes_are_answered_in_one_line(grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nosuch = str(tmp_path / "nosuch")
    empty = tmp_path / "empty"
    empty.mkdir()
    answers = {
        (nosuch, "pt2"): "holds no host.json",
        (str(empty), "pt2"): "holds no host.json",
        (str(grown), "pt3"): "pt3",
        (str(grown), "pt2", f"--out={empty}"): f"is a folder; name a file, such as {empty / 'network.pt2'}",
        (str(wrong_outputs(grown, tmp_path / "c")), "pt2"): "gives other outputs than when it was saved",
    }
    for args, answer in answers.items():
        assert answer in refused(capsys, "export", *args)
    for controller, answer in {"periodc": "did you mean 'periodic'", "nosuch.json": "nosuch.json"}.items():
        line = refused(capsys, "grow", "smoke", controller, f"--out={tmp_path / 'out'}")
        assert answer in line
    assert not (tmp_path / "out").exists()
