"""Pages of the documentation: programs run as they stand, commands parse, and links lead somewhere."""

import ast
import importlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from torchvision.utils import save_image

from esper_lightning.__main__ import main
from esper_lightning.callbacks import Grow, Stack
from esper_lightning.callbacks.plans import Progress
from esper_lightning.cli.commands import make_cli
from esper_lightning.cli.launch import COMMANDS, command_parser
from esper_lightning.controllers.schedules import read_schedule
from esper_lightning.envs.rewards import RewardConfig, SlotStatus, compute_terms
from esper_lightning.growth import Stage, stack
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stack import listed_order, sources_of
from esper_lightning.runtime.registry import find_config
from tests.rewards.ticks import host_step
from tests.runs import CONFIGS, ROOT, Run, cli, csv_rows, forgotten_parts, only_run
from tests.tiers import rest_is_slow

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r'^```(\w*)(?: title="([\w.]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
OWN_FILES = re.compile(r"\b(?:mine|parts|leaves|my_package)\b")
"""Names of files that only a page has."""

CPU = ("accelerator='cpu'", "logger=False")


class Page:
    def __init__(self, path: Path) -> None:
        self.text = path.read_text()
        self.fenced: list[tuple[str, str, str]] = FENCE.findall(self.text)
        self.files: dict[str, str] = {}  # blocks of one file, one below the other
        for _, title, text in self.fenced:
            if "." in title:
                self.files[title] = self.files.get(title, "") + text + "\n\n"

    def blocks(self, language: str, title: str = "") -> list[str]:
        """Return the code blocks in a language with a title."""
        return [text for kind, own, text in self.fenced if (kind, own) == (language, title)]

    def commands(self) -> list[list[str]]:
        lines = "\n".join(self.blocks("sh")).replace("\\\n", " ").splitlines()
        return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("esper-lightning ")]


def guide(name: str) -> Page:
    """Return a guide, or the page in another folder as `methods/stack`."""
    return Page(ROOT / "docs" / f"{name if '/' in name else f'guides/{name}'}.md")


OpenGuide = Callable[[str], Page]


@pytest.fixture
def open_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenGuide]:
    """`open_guide(name)` writes the files of a guide into the current folder, an empty one with modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)

    def write(name: str) -> Page:
        page = guide(name)
        for title, text in page.files.items():
            (tmp_path / title).write_text(text)
        return page

    with forgotten_parts(), patch.object(sys, "argv", sys.argv[:1]):  # Lightning warns of arguments of the process
        yield write
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.fixture(scope="module")
def parser() -> Any:
    return make_cli(["--config", str(find_config("smoke"))], run=False, parser_kwargs={"exit_on_error": False}).parser


ALL_COMMANDS = sorted({shlex.join(command) for path in PAGES for command in Page(path).commands()})


@pytest.mark.parametrize("command", [command for command in ALL_COMMANDS if not OWN_FILES.search(command)])
def test_a_command_of_a_page_is_one(command: str, parser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT if "benchmarks/" in command else tmp_path)  # all others need no clone
    name, *args = shlex.split(command)
    if name in COMMANDS:
        command_parser(name, exit_on_error=False).parse_args(args)
        return
    assert name in ("fit", "validate", "test")
    settings = []
    for before, arg in zip(["", *args], args, strict=False):
        if before == "--config":
            settings.append(str(find_config("smoke" if arg.startswith("runs/") else arg)))
        elif before == "--ckpt_path":
            settings.pop()
        else:
            settings.append(arg)
    parser.parse_args(settings)


class Programs(NamedTuple):
    """Python programs of a page that run one after the other."""

    page: str
    which: slice = slice(None)
    shorter: tuple[tuple[str, str], ...] = ()
    """Texts that are replaced."""
    needs: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    """Texts that the programs print."""
    file: str = ""
    """Name of the file whose blocks are the programs; empty for those without a name."""
    beside: str = ""
    """Page with the files that the programs import."""


SLOW_PROGRAMS = [
    Programs("README.md", slice(1, 2), (("digits", "smoke"), ("max_epochs=30", "max_epochs=1"))),
    Programs("docs/guides/lightning.md", said=("evaluation.csv", "tamiyo ahead", "periodic ahead", "{'2': ")),
    Programs("docs/guides/ppo.md", needs=("gymnasium",)),
]
FAST_PROGRAMS = [
    Programs("README.md", slice(1), said=("norm PROBATIONARY → FOSSILIZED", "built in: ")),
    Programs(
        "docs/guides/seeds.md",
        file="by_hand.py",
        said=(*guide("seeds").blocks(""), "layer='2', reason='')"),
        beside="docs/methods/seeds.md",
    ),
    Programs("docs/methods/expand.md", needs=("transformers",)),
    Programs("docs/methods/tamiyo.md"),
    Programs("docs/guides/your_own.md", said=("'layer1', 'layer2'", "[320, 3, 32, 32]")),
]


@pytest.mark.parametrize(
    "programs",
    [*FAST_PROGRAMS, *(pytest.param(slow, marks=pytest.mark.slow) for slow in SLOW_PROGRAMS)],
    ids=lambda programs: programs.page,
)
def test_the_programs_of_a_page_run(
    programs: Programs, open_guide: OpenGuide, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in programs.needs:
        pytest.importorskip(name)
    source, beside = Page(ROOT / programs.page), Page(ROOT / (programs.beside or programs.page))
    for title, text in (beside.files | source.files).items():
        Path(title).write_text(text)
    texts = source.blocks("python", programs.file)[programs.which]
    assert texts
    torch.manual_seed(0)
    page: dict[str, object] = {}
    for text in texts:
        for long, short in programs.shorter:
            text = text.replace(long, short)
        exec(text, page)
    printed = capsys.readouterr().out
    assert all(text in printed for text in programs.said), printed


@pytest.mark.parametrize(
    ("name", "program", "config"),
    rest_is_slow(
        [("lightning", "mine.py", "mine.yaml"), ("ppo", "train_ppo.py", "cartpole.yaml")], lambda case: case[0] == "ppo"
    ),
)
def test_the_command_line_of_a_page_trains_from_its_config(
    name: str, program: str, config: str, open_guide: OpenGuide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "ppo":
        pytest.importorskip("gymnasium")
    page = open_guide(name)
    monkeypatch.setattr(sys, "argv", [program, "fit", "--config", config, "--trainer.max_epochs=1"])

    exec(page.files[program], {"__name__": "__main__"})

    assert len(list(tmp_path.rglob("*.ckpt"))) == 1


# Grow and Stack


def test_grow_prints_the_lines_of_its_page_and_its_checkpoint_is_loaded_without_a_trainer(
    open_guide: OpenGuide, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, names = open_guide("methods/seeds"), {}
    L.seed_everything(0, verbose=False)

    exec(page.files["train.py"].replace("max_epochs=12", f"max_epochs=12, {', '.join(CPU)}"), names)

    (lines,), printed = page.blocks("text"), capsys.readouterr().out.splitlines()
    assert "\n".join(line for line in printed if line.startswith("Grow, tick")).startswith(lines.strip())
    (saved,), images = tmp_path.rglob("*.ckpt"), torch.rand(4, 1, 8, 8)
    expected = names["trainer"].lightning_module.eval().model(images)
    (controls,), (hook,) = page.blocks("python"), guide("seeds").blocks("python")
    exec(hook.replace("best.ckpt", str(saved)), names)
    torch.testing.assert_close(names["model"].eval().model(images), expected)
    exec(controls.replace("max_epochs=12", f"max_epochs=1, {', '.join(CPU)}"), names)
    told = [line.split()[0] for line in capsys.readouterr().out.splitlines() if " tensor(" in line]
    assert told == ["ungrown", "built"]
    assert names["ended"][names["best"]][0] == max(accuracy for accuracy, _ in names["ended"].values())
    (tmp_path / "schedule.json").write_text(page.blocks("json")[0])
    schedule = read_schedule(tmp_path / "schedule.json")
    assert [(entry.tick, entry.op) for entry in schedule.entries] == [(1, "GERMINATE"), (9, "FOSSILIZE")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["methods/seeds", "methods/scaling"])
def test_a_config_grows_with_lightnings_own_command_line(name: str, open_guide: OpenGuide) -> None:
    page = open_guide(name)
    if name == "methods/scaling":
        Path("mine.py").write_text(guide("methods/stack").files["mine.py"] + page.files["mine.py"])
    mine = importlib.import_module("mine")
    small = ["--trainer.accelerator=cpu", "--trainer.logger=false"]
    if name == "methods/seeds":
        args = ["fit", "--config", "grow.yaml", "--trainer.max_epochs=2", *small]
        made = LightningCLI(mine.LitClassifier, mine.digits, args=args)
        (callback,) = (each for each in made.trainer.callbacks if isinstance(each, Grow))
        assert callback.growing.lifecycle.embargo_ticks == 2 and callback.growing.slots["2"].occupied
        return

    class Data(mine.LitGPT):
        def train_dataloader(self) -> object:
            return mine.text()

    args = ["fit", "--config", "stack.yaml", "--trainer.max_steps=20", *small]
    made = LightningCLI(Data, args=args, save_config_callback=None)
    (callback,) = (each for each in made.trainer.callbacks if isinstance(each, Stack))
    assert callback.depths == [1, 2, 4]


def test_stack_prints_the_lines_of_its_page_and_its_checkpoint_is_that_of_the_plain_class(
    open_guide: OpenGuide, capsys: pytest.CaptureFixture[str]
) -> None:
    page, names = open_guide("methods/stack"), {}

    exec(page.files["train.py"].replace("max_steps=100", f"max_steps=100, {', '.join(CPU)}"), names)

    begins, *changes, ends = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Stack"))
    expected_begins, *expected_changes, expected_ends = page.blocks("text")[0].splitlines()
    assert (begins, ends) == (expected_begins, expected_ends)
    for change, expected_change in zip(changes, expected_changes, strict=True):
        (words, losses), (expected_words, expected_losses) = (one.split("loss ") for one in (change, expected_change))
        found, expected = ([float(one) for one in text.split(" → ")] for text in (losses, expected_losses))
        assert words == expected_words and found == pytest.approx(expected, abs=0.05)
    pairs = zip(names["model"].parameters(), names["plain"].parameters(), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)


def test_a_rule_says_on_the_page_why_it_does_not_grow(
    open_guide: OpenGuide, capsys: pytest.CaptureFixture[str]
) -> None:
    page, stack_page = guide("methods/scaling"), open_guide("methods/stack")
    (call,) = re.findall(r"`(Stack\(.*?\))` in \[the training of", page.text)
    program = re.sub(r"Stack\(.*?\)", call, stack_page.files["train.py"].split("plain = ")[0])

    exec(program.replace("max_steps=100", f"max_steps=100, {', '.join(CPU)}"), {})

    *_, line = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Stack"))
    assert line == page.blocks("text")[0].strip()


def test_a_plan_of_the_page_grows_when_the_loss_stands_still_and_remembers(open_guide: OpenGuide) -> None:
    open_guide("methods/scaling")
    mine = importlib.import_module("mine")

    def ask(plan: Any, share: float, metrics: dict[str, float]) -> int:
        return plan(Progress(share, 2, 2, 6, {}, None, 0, metrics))

    plan = mine.Patience()
    losses = [(0.2, {}), (0.25, {"val_loss": 3.0}), (0.4, {"val_loss": 2.0}), (0.45, {"val_loss": 2.0})]
    assert [ask(plan, share, metrics) for share, metrics in losses] == [2, 2, 2, 2]
    resumed = mine.Patience()
    resumed.load_state_dict(plan.state_dict())
    assert ask(resumed, 0.51, {"val_loss": 2.5}) == 6
    assert ask(resumed, 0.51, {"val_loss": 1.5}) == 2


def test_the_loop_of_stack_prints_its_sources_and_the_named_layers_change_nothing(
    open_guide: OpenGuide, capsys: pytest.CaptureFixture[str]
) -> None:
    page = open_guide("methods/stack")
    (loop,) = page.blocks("python")
    exec(loop, {})
    assert capsys.readouterr().out.strip() in loop

    mine = importlib.import_module("mine")
    (names,) = re.findall(r"`zero=(\(.*?\))`", page.text)
    model, batch = mine.LitGPT(depth=3), next(iter(mine.text()))
    before = model.loss(batch)
    stack(model, "blocks", to=6, new="zero", zero=eval(names))
    torch.testing.assert_close(model.loss(batch), before)


@pytest.mark.parametrize("order", re.findall(r"`(\[[\d, ]+\]|\"[\d, -]+\")`", guide("methods/stack").text))
def test_the_orders_of_the_page_are_ones(order: str) -> None:
    sources = listed_order(ast.literal_eval(order))
    assert sources is not None and sources_of(len(set(sources)), len(sources), sources) == sources


# Extending

QUICK = (
    *("--trainer.max_epochs=1", "--data.env.horizon=4", "--data.env.training.batches=1", "--model.evaluation.hosts=2"),
    *("--model.evaluation.controls=false", "--trainer.enable_progress_bar=false", "--data.env.executor=parts.Counting"),
)


def test_all_parts_train_together_from_the_config(open_guide: OpenGuide, tmp_path: Path) -> None:
    (command, *flags), *_ = open_guide("extending").commands()
    assert (command, *flags[:2]) == ("fit", "--config", "smoke")

    built = cli(*flags, *QUICK, "--trainer.default_root_dir", str(tmp_path / "runs"))

    pool, run = built.datamodule.pool, only_run(tmp_path / "runs")
    assert (pool.space.slot, pool.space.blueprint) == (["hidden"], ["pointwise", "hidden"])
    assert pool.data.outputs == 2 and pool.executor.epochs == 2 * 4
    assert len(run.scalars()["mine/occupied"]) == 1
    assert {"reward/gain", "reward/size"} <= set(run.scalars())
    assert "parts.GrowOnce" in (run.folder / "evaluation" / "evaluation.csv").read_text()


@pytest.mark.slow
def test_the_reward_trains_alone_and_the_controller_is_compared_and_grows_a_network(
    open_guide: OpenGuide, tmp_path: Path
) -> None:
    _, compare, grow, compare_policy, train_thrifty = open_guide("extending").commands()
    shorter = {"fit": (*QUICK[:1], "--model.evaluation.hosts=0"), "test": ("--model.evaluation.hosts=2",)}
    for command in (train_thrifty, compare, grow, compare_policy):
        main([*command, *shorter.get(command[0], ())])

    run, of_rules = (tmp_path / "runs" / "smoke" / f"version_{i}" for i in (0, 1))
    points = Run(run).scalars()
    (gain,), (size,), (total,) = (points[f"rollout/{tag}"] for tag in ("reward.gain", "reward.size", "return"))
    assert gain[1] + size[1] + points["rollout/reward.rollback"][0][1] == pytest.approx(total[1], abs=1e-5)
    for compared, first in ((of_rules / "evaluation", "parts.GrowOnce"), (run / "evaluation", "tamiyo")):
        assert csv_rows(compared / "evaluation.csv")[0]["controller"] == first
    assert (tmp_path / "grown" / "network.safetensors").is_file()


@pytest.mark.slow
def test_the_controller_is_compared_with_waiting(open_guide: OpenGuide, capsys: pytest.CaptureFixture[str]) -> None:
    page, names = open_guide("extending"), {}
    exec(page.files["compare.py"], names)

    assert "Interval(" in capsys.readouterr().out
    ops = names["ours"].ops
    assert ops[:2].max() == 0 < ops[2].min(), "something grows in the third tick"
    assert names["waiting"].ops.max() == 0


def test_the_second_reward_charges_for_seeds_that_wait(open_guide: OpenGuide) -> None:
    open_guide("extending")
    importlib.import_module("parts")
    cases = ((Stage.PROBATIONARY, 3), (Stage.PROBATIONARY, 2), (Stage.DORMANT, 3))
    slots = (SlotStatus(stage, ticks, 9, contribution=0.0, parameters=8, growth=0.1) for stage, ticks in cases)
    step = host_step(*slots, objective=0.75)

    assert compute_terms(step, RewardConfig(mode="decisive")) == {"gain": 0.25, "waiting": -0.02}


# Your own data and network

SHORT = ("--trainer.max_epochs=1", "--data.n_envs=2", "--data.env.horizon=2", "--data.env.training.batches=1")
QUIET = ("--model.evaluation.hosts=0", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu")
LONG = (
    *("--trainer.max_epochs=1", "--data.n_envs=2", "--data.env.horizon=10", "--data.env.training.batch_size=16"),
    *("--data.env.executor=loop", "--data.env.actions.blueprints=[norm]", "--trainer.default_root_dir=runs"),
    *("--model.ppo.minibatches=2", "--data.env.training.batches=8"),  # enough for the statistics of BatchNorm
)


@pytest.fixture
def leaves(open_guide: OpenGuide, tmp_path: Path) -> Page:
    """Write the files of the page on your own data, and a few images."""
    generator = torch.Generator().manual_seed(0)
    for part, each in {"train": 24, "val": 8, "test": 8}.items():
        for shade, kind in enumerate(("elm", "oak")):
            folder = tmp_path / "leaves" / part / kind
            folder.mkdir(parents=True)
            for i in range(each):
                save_image(0.4 * torch.rand(3, 20, 24, generator=generator) + 0.5 * shade, folder / f"{i}.png")
    return open_guide("your_own")


def with_parts(page: Page, **parts: Any) -> str:
    config = yaml.safe_load(page.files["leaves.yaml"])
    config["data"] |= parts
    config["data"]["env"].pop("actions")  # they are for images
    Path("changed.yaml").write_text(yaml.safe_dump(config))
    return "changed.yaml"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_resnet_learns_from_a_folder_of_images_with_the_learning_rate_of_its_config(leaves: Page) -> None:
    task = yaml.safe_load(leaves.files["leaves.yaml"])["data"]["task"]
    built = cli("--config", "leaves.yaml", *LONG, *QUIET, "--data.task", json.dumps(task))
    pool, run = built.datamodule.pool, only_run(Path("runs"))
    assert pool.data.input_shape == (3, 32, 32) and pool.data.outputs == 2
    assert pool.data.train.samples == 48 and pool.data.test.samples == 16
    assert pool.space.slot == ["layer1", "layer2"]
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    assert run.last.is_file() and [event for event in events if event["type"] == "rollback"] == []
    best = [max(env.history.score) for env in pool.envs]
    assert min(best) > 0.9, "the classes differ in brightness alone"


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_the_other_networks_of_the_page_grow(leaves: Page, number: int) -> None:
    host = yaml.safe_load(leaves.blocks("yaml", "host")[number])
    pool = cli("--config", with_parts(leaves, host=host), *SHORT, *QUIET).datamodule.pool

    assert type(pool.envs[0].network.network).__name__ == ("VisionTransformer", "MobileNetV3")[number]
    assert list(slots_of(pool.envs[0].network)) == host["init_args"]["slots"]
    assert len(pool.space.blueprint) > 3


def test_the_task_of_the_page_is_one_and_a_mistyped_layer_is_answered_with_the_nearest(
    leaves: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    task = yaml.safe_load(leaves.blocks("yaml", "task")[0])
    host = {"class_path": "esper_lightning.hosts.CNN", "init_args": {"base": 2}}
    built = cli("--config", with_parts(leaves, task=task, host=host), *SHORT, *QUIET)
    assert [split.samples for split in built.datamodule.pool.data[:3]] == [16, 16, 16]

    with pytest.raises(SystemExit) as ended:
        cli("--config", "leaves.yaml", *SHORT, *QUIET, "--data.host.init_args.slots=[layr1]")
    assert ended.value.code == 2
    assert "did you mean 'layer1'?" in capsys.readouterr().err


@pytest.mark.slow
def test_the_settings_of_several_tasks_make_a_run(open_guide: OpenGuide, tmp_path: Path) -> None:
    _, settings = open_guide("concepts/environment").blocks("yaml")
    (tmp_path / "page.yaml").write_text(settings)
    root = ("--trainer.default_root_dir", str(tmp_path / "runs"))

    built = cli("--config", str(CONFIGS / "smoke.yaml"), "--config", "page.yaml", *SHORT, *QUIET, *root)

    assert built.datamodule.pool.task_slices == {"Digits": slice(0, 2), "table": slice(2, 18)}


# Names and links


def test_the_page_on_gymnasium_names_every_id() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    pytest.importorskip("esper_lightning.gym")
    registered = {spec.name for spec in gymnasium.registry.values() if spec.namespace == "esper_lightning"}
    assert set(re.findall(r"`(?:esper_lightning/)?(\w+)-v0`", guide("ppo").text)) == registered


def test_every_link_leads_to_a_file_and_none_of_the_site_out_of_it() -> None:
    site, lost = ROOT / "docs", []
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text()):
            target = Path(os.path.normpath(page.parent / link))
            if not target.exists() or (page.is_relative_to(site) and not target.is_relative_to(site)):
                lost.append(f"{page.relative_to(ROOT)}: {link}")
    assert lost == []
