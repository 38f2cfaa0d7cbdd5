"""What the command line answers without torch: help, version, configs, tab completion."""

import json
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from esper_lightning import __version__
from esper_lightning.__main__ import main
from esper_lightning.cli.configs import CONFIGS as SHIPPED
from esper_lightning.cli.configs import config_names, find_config
from esper_lightning.cli.front import COMMANDS, SETTINGS_COMMANDS, prepare
from esper_lightning.cli.main import EsperCLI
from esper_lightning.cli.options import option_table
from tests.runs import CONFIGS, ROOT

MOST_SECONDS = 2.0
"""Largest processor time in seconds of an answer. One takes .2; importing torch and Lightning takes 8."""


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with patch.object(sys, "argv", sys.argv[:1]), pytest.raises(SystemExit) as ended:
        main(list(args))
    assert ended.value.code == 0
    return capsys.readouterr().out


ANSWERED = (
    *(["--help"], ["--version"], ["--completion"], ["configs"], ["fit", "--help"], ["export", "--help"], ["evaluat"]),
    *(["fit", "--config", "smoke", "--data.n_envz=3"], ["fit"], ["init", "smoke"], ["fit", "--config", "smok"]),
)


def test_answers_without_settings_import_neither_torch_nor_lightning(tmp_path: Path) -> None:
    """Run in a subprocess, since this one has loaded both."""
    code = f"""
import io, json, sys, time
from contextlib import redirect_stderr, redirect_stdout
from esper_lightning.__main__ import main
seconds = time.process_time()  # of the start, too
codes = []
for args in {list(ANSWERED)!r}:
    before = time.process_time()
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            main(args)
        except SystemExit as ended:
            codes.append(ended.code)
    seconds = max(seconds, time.process_time() - before)
print(json.dumps([codes, seconds, [name for name in ("torch", "lightning", "jsonargparse") if name in sys.modules]]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    codes, seconds, imported = json.loads(done.stdout)

    assert imported == []
    assert codes == [0, 0, 0, 0, 0, 0, 2, 2, 2, 0, 2]
    assert seconds < MOST_SECONDS
    assert (tmp_path / "smoke.yaml").read_text() == (CONFIGS / "smoke.yaml").read_text()


def test_the_front_knows_the_commands_with_settings() -> None:
    assert set(SETTINGS_COMMANDS) == set(EsperCLI.subcommands())


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("configs", "init")])
def test_every_command_explains_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = answer(capsys, command, "--help")

    assert text.startswith(f"usage: esper-lightning {command} ")
    words = " ".join(text.split())
    assert all(option.help in words for option in option_table().options if command in option.commands)
    if command in SETTINGS_COMMANDS:
        assert re.search(r"--data\.n_envs Hosts trained side by side[^()]*\(an integer, default: 48\)", words)
        assert "esper_lightning.hosts.CNN" in words and "esper_lightning.tasks.Digits" in words


def test_the_program_names_its_commands_and_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    text = answer(capsys, "--help")

    assert text.startswith("usage: esper-lightning ")
    assert all(f"\n  {command} " in text for command in COMMANDS)
    assert answer(capsys, "--version") == f"esper-lightning {__version__}\n"


def test_configs_come_with_the_package_and_are_listed_with_their_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    lines = answer(capsys, "configs").splitlines()

    for path in CONFIGS.glob("*.yaml"):
        purpose = path.read_text().splitlines()[0].removeprefix("# Purpose: ")
        assert any(line.split(maxsplit=1) == [path.stem, purpose] for line in lines), path
    assert SHIPPED.resolve() == CONFIGS.resolve() and len(config_names()) > 10


def test_a_config_is_found_by_its_name_unless_a_file_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert prepare(["fit", "--config", "digits"]) == ["fit", f"--config={SHIPPED / 'digits.yaml'}"]
    (tmp_path / "digits").mkdir()  # a folder of data
    assert find_config("digits") == str(SHIPPED / "digits.yaml")
    (tmp_path / "smoke").write_text("trainer: {max_epochs: 1}\n")
    assert find_config("smoke") == "smoke"
    given = ["sweep", "--config=digits", "--config", "mixed", "smoke", "--seeds", "2"]
    others = [str(SHIPPED / "mixed.yaml"), "smoke"]
    assert prepare(given) == ["sweep", f"--config={SHIPPED / 'digits.yaml'}", "--config", *others, "--seeds", "2"]


def test_a_config_is_copied_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = answer(capsys, "init", "digits")

    assert "esper-lightning fit --config digits.yaml" in said
    copy = tmp_path / "digits.yaml"
    assert copy.read_text() == (CONFIGS / "digits.yaml").read_text()
    copy.write_text("mine")
    with pytest.raises(SystemExit) as ended:
        main(["init", "digits"])
    assert ended.value.code == 2 and copy.read_text() == "mine"


def test_a_current_folder_that_was_removed_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(SystemExit) as ended:
        main(["configs"])
    monkeypatch.undo()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: the current folder was removed; change to another one\n"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("init", "digits"), 1, "cannot be written: "),
        (("fit", "--config", "a" * 5000), 2, "File name too long"),
    ],
)
def test_a_file_that_the_system_refuses_is_told_in_one_line(
    arguments: tuple[str, ...],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir("/proc")
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == code and line.startswith("error: ") and said in line


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["--model.ppo.lr", "0.001"], ["--model.ppo.lr.start=0.001", "--model.ppo.lr.end=0.001"]),
        (["--model.ppo.entropy=1e-3"], ["--model.ppo.entropy.start=1e-3", "--model.ppo.entropy.end=1e-3"]),
        (["--model.ppo.lr={start: 1, end: 0}"], ["--model.ppo.lr={start: 1, end: 0}"]),
        (["--data.env.objective.price", "-1"], ["--data.env.objective.price=-1"]),
        (["--data.host.base", "4", "--print_config"], ["--data.host.base=4", "--print_config"]),
        (["--trainer.callbacks+", "mine.Callback"], ["--trainer.callbacks+=mine.Callback"]),
        (["--best.monitor=a=b"], ["--best.monitor=a=b"]),
    ],
)
def test_other_options_reach_the_parser_as_they_are_meant(given: list[str], passed: list[str]) -> None:
    smoke = str(CONFIGS / "smoke.yaml")

    assert prepare(["fit", "-c", smoke, *given]) == ["fit", f"--config={smoke}", *passed]


@pytest.mark.parametrize("config", ["{data: {n_envs: 3}}", "data: {n_envs: 3}\n", "-"])
def test_settings_in_place_of_a_config_are_left_to_the_parser(config: str) -> None:
    assert prepare(["fit", "--config", config]) == ["fit", f"--config={config}"]


def completions(script: Path, *words: str) -> list[str]:
    """Return the completions that bash offers for the last of `words`."""
    line = f"""source {script}; COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}
_esper_lightning; printf '%s\\n' "${{COMPREPLY[@]}}" """
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout.split()


def test_tab_completes_commands_options_values_configs_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "completion.sh"
    script.write_text(answer(capsys, "--completion"))
    (tmp_path / "my.yaml").touch()

    assert completions(script, "esper-lightning", "ev") == ["evaluate"]
    assert completions(script, "esper-lightning", "fit", "--data.n_") == ["--data.n_envs"]
    assert completions(script, "esper-lightning", "evaluate", "--stand") == ["--stand_ins"]
    assert completions(script, "esper-lightning", "fit", "--stand") == []
    assert completions(script, "esper-lightning", "fit", "--telemetry.level", "d") == ["debug"]
    assert completions(script, "esper-lightning", "init", "digits_fam") == ["digits_family"]
    assert completions(script, "esper-lightning", "fit", "--config", f"{tmp_path}/m") == [f"{tmp_path}/my.yaml"]


def test_links_of_the_readme_are_absolute_in_the_package() -> None:
    namespace: dict[str, object] = {"__name__": "setup", "__file__": str(ROOT / "setup.py")}
    exec((ROOT / "setup.py").read_text(), namespace)
    absolute_links = namespace["absolute_links"]
    text = "[a](docs/a.md#b), ![p](docs/p.png), [web](https://example.org), [here](#start)"

    assert absolute_links(text, "https://example.org/esper/") == (
        "[a](https://example.org/esper/blob/main/docs/a.md#b), ![p](https://example.org/esper/raw/main/docs/p.png), "
        "[web](https://example.org), [here](#start)"
    )
    assert absolute_links(text, None) == "a, , [web](https://example.org), [here](#start)"
