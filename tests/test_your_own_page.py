"""docs/guides/your_own.md: the program runs with its files, and with images in folders."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torchvision.utils import save_image

from esper_lightning.growth.lifecycle import slots_of
from tests.runs import ROOT, cli, only_run

PAGE = (ROOT / "docs" / "guides" / "your_own.md").read_text()
FENCED = re.findall(r"^```([^\n]+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
FILES = {tag.split('"')[1]: text for tag, text in FENCED if ".py" in tag or ".yaml" in tag}
HOSTS = [yaml.safe_load(text) for tag, text in FENCED if tag == 'yaml title="host"']
(TASK,) = (yaml.safe_load(text) for tag, text in FENCED if tag == 'yaml title="task"')

SHORT = (
    *("--trainer.max_epochs=1", "--data.n_envs=2", "--data.env.horizon=2", "--data.env.training.batches=1"),
    *("--model.evaluation.hosts=0", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"),
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to a folder with the page's files and a few images."""
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    for part, each in {"train": 24, "val": 8, "test": 8}.items():
        for shade, kind in enumerate(("elm", "oak")):
            folder = tmp_path / "leaves" / part / kind
            folder.mkdir(parents=True)
            for i in range(each):
                save_image(0.4 * torch.rand(3, 20, 24, generator=generator) + 0.5 * shade, folder / f"{i}.png")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    for name in FILES:
        sys.modules.pop(Path(name).stem, None)


def config_with(place: Path, **parts: Any) -> str:
    """Write the page's config with other parts of `data` to a file."""
    config = yaml.safe_load((place / "leaves.yaml").read_text())
    config["data"] |= parts
    config["data"]["env"].pop("actions")  # they are for images
    (place / "changed.yaml").write_text(yaml.safe_dump(config))
    return "changed.yaml"


@pytest.mark.slow
def test_the_page_s_config_grows_a_resnet_on_a_folder_of_images(place: Path) -> None:
    built = cli("--config", "leaves.yaml", *SHORT)

    pool = built.datamodule.pool
    assert pool.data.input_shape == (3, 32, 32) and pool.data.classes == 2
    assert pool.space.slot == ["layer1", "layer2"]
    assert pool.space.blueprint == ["norm", "attention", "depthwise", "conv_light"]
    assert pool.data.train.samples == 48 and pool.data.test.samples == 16
    assert only_run(place / "runs" / "leaves").last.is_file()


LONG = (
    *("--trainer.max_epochs=1", "--data.n_envs=2", "--data.env.horizon=10", "--data.env.training.batch_size=16"),
    *("--model.evaluation.hosts=0", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"),
    *("--data.env.executor=loop", "--data.env.actions.blueprints=[norm]", "--trainer.default_root_dir=runs"),
    "--data.env.training.batches=8",  # enough for the running statistics of BatchNorm
)


@pytest.mark.slow
def test_a_resnet_learns_with_the_learning_rate_of_its_config(place: Path) -> None:
    task = yaml.safe_load((place / "leaves.yaml").read_text())["data"]["task"]
    built = cli("--config", "leaves.yaml", *LONG, "--data.task", json.dumps(task), "--model.ppo.minibatches=2")

    events = [json.loads(line) for line in (only_run(place / "runs").folder / "events.jsonl").read_text().splitlines()]
    assert [event for event in events if event["type"] == "rollback"] == []
    best = [max(env.history.accuracy) for env in built.datamodule.pool.envs]
    assert min(best) > 0.9, "the classes differ in brightness alone"


@pytest.mark.slow
@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host["init_args"]["network"])
def test_the_page_s_other_networks_grow(place: Path, host: dict[str, Any]) -> None:
    built = cli("--config", config_with(place, host=host), *SHORT)

    network = built.datamodule.pool.envs[0].network
    assert type(network.network).__name__ in ("VisionTransformer", "MobileNetV3")
    assert list(slots_of(network)) == host["init_args"]["slots"]
    assert len(built.datamodule.pool.space.blueprint) > 3


def test_the_page_s_task_is_one(place: Path) -> None:
    host = {"class_path": "esper_lightning.hosts.CNN", "init_args": {"base": 2}}

    built = cli("--config", config_with(place, task=TASK, host=host), *SHORT)

    assert [split.samples for split in built.datamodule.pool.data[:3]] == [16, 16, 16]


def test_the_page_s_other_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    for tag, text in FENCED:
        if tag == "python":
            exec(text, {})

    assert "'layer1', 'layer2'" in capsys.readouterr().out


def test_a_mistyped_layer_is_answered_with_the_nearest(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli("--config", "leaves.yaml", *SHORT, "--data.host.init_args.slots=[layr1]")

    assert ended.value.code == 2
    assert "did you mean 'layer1'?" in capsys.readouterr().err
