"""What `evaluate` takes from a config.yaml that the user has not named: nothing that runs code or writes elsewhere."""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from esper_lightning.__main__ import main
from esper_lightning.cli.main import callback_classes
from esper_lightning.cli.trust import settings_beside_checkpoint
from esper_lightning.datamodules.hosts import HostPoolData
from esper_lightning.module import TamiyoModule
from tests.runs import ROOT, Run, SharedParserCLI, fit

SHELL = {"network": "os.system", "settings": {"command": "touch PWNED"}, "classes_as": None, "slots": ["x"]}
"""Arguments of the host `Attached` that would run a command."""

GROUPS = {"model": TamiyoModule, "data": HostPoolData, **callback_classes()}

Config = dict[str, Any]
Attack = Callable[[Config, Path], Any]


def evaluate(*args: str) -> None:
    """Run `esper-lightning evaluate` in this process."""
    with patch("esper_lightning.cli.main.EsperCLI", SharedParserCLI), patch.object(sys, "argv", sys.argv[:1]):
        main(["evaluate", *args])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("trained")
    fit(root)
    return Run(root / "version_0")


@pytest.fixture
def run(trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Copy a run to a folder in which the program is started."""
    monkeypatch.chdir(tmp_path)
    return Run(Path(shutil.copytree(trained.folder, tmp_path / "run")))


def config_of(run: Run) -> Config:
    return yaml.safe_load((run.folder / "config.yaml").read_text())


def attached(**changes: Any) -> Config:
    return {"class_path": "esper_lightning.hosts.Attached", "init_args": SHELL | changes}


def data_module(path: Any, **init_args: Any) -> Config:
    data = {"class_path": path, "init_args": init_args} if init_args else path
    return {"class_path": "esper_lightning.tasks.FromDataModule", "init_args": {"data": data}}


def in_data(**parts: Any) -> Attack:
    """Return the attack that replaces parts of the group `data`."""
    return lambda config, folder: config["data"].update(parts)


def in_a_file(put: Callable[[Config, str], Any], content: Any) -> Attack:
    """Return the attack that names a further file of settings."""

    def attack(config: Config, folder: Path) -> None:
        (folder / "more.yaml").write_text(yaml.safe_dump(content))
        put(config, str(folder / "more.yaml"))

    return attack


def as_text(text: str) -> Attack:
    """Return the attack that adds YAML to the end of the file."""
    return lambda config, folder: text


def linked(config: Config, folder: Path) -> None:
    config["data"]["host"] = attached()
    (folder / "elsewhere.yaml").write_text(yaml.safe_dump(config))
    (folder / "config.yaml").unlink()
    (folder / "config.yaml").symlink_to(folder / "elsewhere.yaml")


FORBIDDEN: dict[str, tuple[Attack, str]] = {
    "a function as the network": (in_data(host=attached()), "data.host.init_args.network names 'os.system'"),
    "a function as the host": (in_data(host={"class_path": "os.system"}), "data.host.class_path names 'os.system'"),
    "a function as the task": (in_data(task="os.system"), "data.task.class_path names 'os.system'"),
    "a class among the network's arguments": (
        in_data(
            host=attached(
                network="torchvision.models.resnet18",
                settings={"norm": [{"class_path": "subprocess.Popen", "init_args": {"args": "touch PWNED"}}]},
            )
        ),
        "data.host.init_args.settings.norm[0].class_path names 'subprocess.Popen'",
    ),
    "a network inside a network": (
        in_data(host=attached(network="torchvision.models.resnet18", settings={"inner": attached()})),
        "settings.inner.init_args.network names 'os.system'",
    ),
    "a network that a family varies": (
        lambda config, folder: config["data"]["env"]["family"].update(train=[{"host.network": ["os.system"]}]),
        "data.env.family.train[0].host.network names 'os.system'",
    ),
    "a class that a family varies": (
        lambda config, folder: config["data"]["env"]["family"].update(
            train=[{"host.base": [{"class_path": "subprocess.Popen", "init_args": {"args": "touch PWNED"}}]}]
        ),
        "host.base[0].class_path names 'subprocess.Popen'",
    ),
    "a further task": (
        lambda config, folder: config["data"].update(also={"b": config["data"] | {"host": attached()}}),
        "data.also.b.host.init_args.network names 'os.system'",
    ),
    "a further task as a text": (
        in_data(also="{b: {host: {class_path: os.system}, task: {class_path: os.system}}}"),
        "data.also stands for further settings",
    ),
    "a host as a text": (in_data(host='{"class_path": "os.system"}'), "data.host stands for further settings"),
    "a host in a file": (
        in_a_file(lambda config, path: config["data"].update(host=path), attached()),
        "data.host stands for further settings",
    ),
    "a task in the standard input": (in_data(task="-"), "data.task stands for further settings"),
    "all data in a file": (
        in_a_file(lambda config, path: config.update(data=path), {"host": attached()}),
        "data must be a group of settings",
    ),
    "arguments as a text": (
        in_data(host=attached() | {"init_args": "{network: os.system}"}),
        "data.host.init_args must be a group of settings",
    ),
    "a key with a dot": (in_data(**{"host.class_path": "os.system"}), "must be written as 'class_path'"),
    "a key with a dot for the network": (in_data(**{"host.init_args.network": "os.system"}), "names 'os.system'"),
    "a key that appends": (in_data(host=attached() | {"init_args": {"network+": "os.system"}}), "names 'os.system'"),
    "a module of this package that has imported another": (
        in_data(host=attached(network="esper_lightning.hosts.attached.os.system")),
        "package that is not trusted",
    ),
    "a function of this package": (
        in_data(host=attached(network="esper_lightning.hosts.attached.make_network")),
        "package that is not trusted",
    ),
    "a function of the callbacks": (
        in_data(host=attached(network="esper_lightning.callbacks.governor.print_status")),
        "not trusted",
    ),
    "a module in place of a class": (in_data(host={"class_path": "esper_lightning.hosts.attached"}), "no class"),
    "a task in place of a network": (in_data(host=attached(network="esper_lightning.tasks.Digits")), "no network"),
    "a data class of the tasks": (in_data(task={"class_path": "esper_lightning.tasks.TaskData"}), "which is no Task"),
    "a data module that imports a name": (
        in_data(task=data_module("esper_lightning.datamodules.gymnasium.VectorData", env="os:system")),
        "data.task.init_args.data.class_path names",
    ),
    "a data module without its module": (in_data(task=data_module("VectorData")), "names 'VectorData'"),
    "torch.hub": (in_data(host=attached(network="torch.hub.load")), "not trusted"),
    "a helper of torchvision's models": (
        in_data(host=attached(network="torchvision.models.get_model")),
        "which is no Module",
    ),
    "a module to import": (lambda config, folder: config.update(imports=["shutil"]), "imports names 'shutil'"),
    "a reward": (
        lambda config, folder: config["data"]["env"]["reward"].update(mode="os.system"),
        "data.env.reward.mode names 'os.system'",
    ),
    "a blueprint": (
        lambda config, folder: config["data"]["env"]["actions"].update(blueprints=["norm", "os.system"]),
        "data.env.actions.blueprints names 'os.system'",
    ),
    "an executor": (
        lambda config, folder: config["data"]["env"].update(executor="os.system"),
        "data.env.executor names 'os.system'",
    ),
    "a controller": (
        lambda config, folder: config["evaluation"].update(against=["os.system"]),
        "evaluation.against names 'os.system'",
    ),
    "an escape in a name": (
        as_text('data: {host: {"class_\\u0070ath": "\\u006fs.system"}}'),
        "data.host.class_path names 'os.system'",
    ),
    "letters that only look like others": (in_data(host={"class_path": "ｏｓ.system"}), "no import path"),
    "bytes": (as_text("data: {host: {class_path: !!binary b3Muc3lzdGVt}}"), "data.host.class_path names"),
    "an alias": (
        as_text("evaluation: {x: &x {class_path: os.system}}\ndata: {host: *x}"),
        "data.host.class_path names 'os.system'",
    ),
    "a merge key": (
        as_text("evaluation: {x: &x {class_path: os.system}}\ndata: {host: {<<: *x}}"),
        "data.host.class_path names 'os.system'",
    ),
    "a link to a config": (linked, "data.host.init_args.network names 'os.system'"),
    "a tag": (as_text("data: !!python/object/apply:os.system ['touch PWNED']"), "config.yaml is no valid config"),
    "a list": (as_text("[data]"), "it holds no settings"),
    "two documents": (as_text("data: {}\n---\ndata: {}"), "config.yaml is no valid config"),
    "aliases without end": (
        as_text(
            "a0: &a0 [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]\n"
            + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(8))
        ),
        "aliases make the text longer than",
    ),
    "a value that holds itself": (as_text(f"data: &d {{also: *d}} # {'-' * 100}"), "alias 'd' stands for what is"),
    "brackets without end": (as_text(f"data: {'[' * 3000}{']' * 3000}"), "nested more than"),
    "a text without end": (as_text(f"data: {{host: {'x' * 2**21}}}"), "characters, more than"),
    "no text": (lambda config, folder: (folder / "config.yaml").write_bytes(b"\xff\xfe\x00"), "no valid config"),
}


@pytest.mark.parametrize(("attack", "named"), FORBIDDEN.values(), ids=list(FORBIDDEN))
def test_a_config_beside_a_checkpoint_is_refused_in_a_line(
    attack: Attack, named: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    config, path = config_of(run), run.folder / "config.yaml"
    result = attack(config, run.folder)
    if isinstance(result, str):
        path.write_text(result)
    elif result is None and not path.is_symlink():
        path.write_text(yaml.safe_dump(config))
    files = sorted(Path.cwd().rglob("*"))
    with pytest.raises(SystemExit) as ended:
        evaluate("--ckpt_path", str(run.latest))

    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {run.folder / 'config.yaml'}") and named in line
    assert len(line) < 1000
    assert sorted(Path.cwd().rglob("*")) == files, "nothing has run or was written"


def test_folders_and_objects_of_the_trainer_that_a_config_names_are_not_used(run: Run) -> None:
    elsewhere = Path.cwd() / "elsewhere"
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(elsewhere)}}
    checkpoint = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": str(elsewhere)}}
    profiler = {"class_path": "lightning.pytorch.profilers.SimpleProfiler", "init_args": {"dirpath": str(elsewhere)}}
    config = config_of(run)
    trainer = {"default_root_dir": str(elsewhere), "logger": [logger], "callbacks": [checkpoint, "os.system"]}
    config["trainer"] |= trainer | {"profiler": profiler, "plugins": ["os.system"], "accelerator": "os.system"}
    config |= {"out": str(elsewhere), "more": ["no.ckpt"], "transfer": True, "trust": "os", "config": "more.yaml"}
    config["best"]["dirpath"] = config["latest"]["dirpath"] = str(elsewhere)
    (run.folder / "config.yaml").write_text(yaml.safe_dump(config))

    evaluate(
        *("--ckpt_path", str(run.latest), "--trainer.accelerator=cpu"),
        *("--evaluation.hosts=2", "--evaluation.against=[random]", "--evaluation.controls=false"),
    )

    assert (run.folder / "evaluation" / "evaluation.csv").is_file()
    assert [path.name for path in Path.cwd().iterdir()] == ["run"]


OWN_PACKAGE = """
from pathlib import Path
from subprocess import Popen

from esper_lightning.hosts import CNN

Path("IMPORTED").touch()


class Net(CNN):
    pass


def net(num_classes: int) -> CNN:
    return CNN((1, 8, 8), num_classes)
"""


@pytest.fixture
def own_package(run: Run) -> Iterator[str]:
    """Write a module beside the run whose import leaves a file, and return its name."""
    name = "own_networks"
    Path(f"{name}.py").write_text(OWN_PACKAGE)
    path = str(Path.cwd())
    sys.path.append(path)
    yield name
    sys.path.remove(path)
    sys.modules.pop(name, None)


def test_a_package_of_the_user_is_imported_only_if_it_is_trusted(
    run: Run, own_package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run.folder / "config.yaml"
    config = config_of(run)
    config["data"]["host"] = {"class_path": f"{own_package}.Net", "init_args": config["data"]["host"]["init_args"]}
    path.write_text(yaml.safe_dump(config))

    with pytest.raises(SystemExit):
        evaluate("--ckpt_path", str(run.latest))
    line = capsys.readouterr().err
    assert f"names '{own_package}.Net'" in line
    assert line.endswith(f"give --trust {own_package}, or --config {path}\n")
    assert not Path("IMPORTED").exists()

    with pytest.raises(SystemExit):
        evaluate("--ckpt_path", str(run.latest), "--trust", f"other, {own_package}")
    assert "evaluation.hosts is 0" in capsys.readouterr().err, "the settings are read, and the host is made"
    assert Path("IMPORTED").exists()


def settings(run: Run, host: Config, *trusted: str) -> Config:
    """Return the settings that are taken from a run whose config has another host."""
    path = run.folder / "config.yaml"
    config = config_of(run)
    config["data"]["host"] = host
    path.write_text(yaml.safe_dump(config))
    return yaml.safe_load(settings_beside_checkpoint(path, GROUPS, trusted))


def test_a_trusted_package_stands_for_what_is_defined_in_it(run: Run, own_package: str) -> None:
    for name in ("Net", "net"):
        host = attached(network=f"{own_package}.{name}", slots=["block1.pool"], settings={})
        assert settings(run, host, own_package)["data"]["host"] == host

    for path, reason in {
        f"{own_package}.Popen": f"is from subprocess, not from {own_package}",
        f"{own_package}.Path.cwd": "cannot import",
        f"{own_package}.__file__": "no import path of a public",
        f"{own_package}.nothing": "is no class or function",
        f"{own_package}s.Net": "package that is not trusted",
    }.items():
        with pytest.raises(ValueError, match=reason):
            settings(run, attached(network=path), own_package)


def test_imports_of_a_trusted_package_are_taken(run: Run, own_package: str) -> None:
    path = run.folder / "config.yaml"
    path.write_text(yaml.safe_dump(config_of(run) | {"imports": f"{own_package}, {own_package}.more"}))

    with pytest.raises(ValueError, match=f"imports names '{own_package}', .* give --trust {own_package}, or --config"):
        settings_beside_checkpoint(path, GROUPS, ("other",))
    taken = yaml.safe_load(settings_beside_checkpoint(path, GROUPS, (own_package,)))

    assert taken["imports"] == [own_package, f"{own_package}.more"]
    assert not Path("IMPORTED").exists(), "they are imported by the command line"


def test_networks_of_torchvision_need_no_trust(run: Run) -> None:
    for name in ("resnet18", "VisionTransformer"):
        host = attached(network=f"torchvision.models.{name}", settings={"weights": None}, slots=["layer1.0"])
        assert settings(run, host)["data"]["host"] == host


def test_a_config_cannot_ask_for_a_download(run: Run) -> None:
    config = config_of(run)
    task = {"class_path": "esper_lightning.tasks.CIFAR10", "init_args": {"root": str(run.folder), "download": True}}
    config["data"]["task"] = task
    (run.folder / "config.yaml").write_text(yaml.safe_dump(config))

    taken = yaml.safe_load(settings_beside_checkpoint(run.folder / "config.yaml", GROUPS, ()))

    assert taken["data"]["task"]["init_args"] == {"root": str(run.folder), "download": False}


def test_all_settings_of_a_run_that_a_comparison_needs_are_taken_as_they_are(run: Run) -> None:
    config = config_of(run)
    taken = yaml.safe_load(settings_beside_checkpoint(run.folder / "config.yaml", GROUPS, ()))

    for name in ("model", "data", "governor", "evaluation", "seed_everything", "threads_per_operator"):
        assert taken[name] == config[name]
    assert taken["trainer"] == {name: config["trainer"][name] for name in taken["trainer"]}
    assert taken["trainer"]["max_epochs"] == config["trainer"]["max_epochs"]


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_configs_of_this_project_need_no_trust(config: Path) -> None:
    settings_beside_checkpoint(config, GROUPS, ())


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--trust=os",), "--trust os: it is part of Python"),
        (("--trust=a,,b",), "--trust takes names of packages, with commas between them; got ''"),
        (("--trust=../x",), "got '../x'"),
        (("--trust=x", f"--config={ROOT / 'configs' / 'smoke.yaml'}"), "leave it out"),
    ],
)
def test_a_trust_that_means_nothing_is_refused(
    args: tuple[str, ...], named: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        evaluate("--ckpt_path", str(run.latest), *args)

    assert ended.value.code == 2
    assert re.fullmatch(f"error: .*{re.escape(named)}.*\n", capsys.readouterr().err)
