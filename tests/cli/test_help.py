"""Help texts of the command line, and suggestions for mistyped arguments."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from esper_lightning.__main__ import main
from esper_lightning.cli.help import Parser
from esper_lightning.cli.main import EsperCLI
from tests.runs import CONFIGS, cli

COMMANDS = list(EsperCLI.subcommands())


def help_output(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with patch.object(sys, "argv", sys.argv[:1]), pytest.raises(SystemExit) as ended:
        main(list(args))
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_its_settings(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_output(capsys, command, "--help")

    assert text.startswith("usage: esper-lightning ")
    words = " ".join(text.split())
    assert "--data.n_envs N_ENVS Hosts trained side by side. (type: int, default: 48)" in words
    assert "esper_lightning.hosts.CNN" in words and "esper_lightning.tasks.Digits" in words
    assert "torch.nn.Linear" not in words, "a host could be any network; those that are none of ours are not listed"


def test_the_help_takes_a_formatter_as_that_of_jsonargparse_does() -> None:
    assert "usage: esper-lightning" in Parser(prog="esper-lightning").format_help(formatter=None)


def test_the_program_names_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_output(capsys, "--help")

    assert text.startswith("usage: esper-lightning ")
    assert all(f"\n    {command} " in text for command in COMMANDS)


SUGGESTIONS = {
    "option": (("--data.n_envz=3",), "did you mean '--data.n_envs'?"),
    "option without its group": (("--n_envs=3",), "did you mean '--data.n_envs'?"),
    "class": (("--data.task=esper_lightning.tasks.Digit",), "did you mean 'esper_lightning.tasks.Digits'?"),
    "module": (("--data.task=esper_lightning.task.Digits",), "did you mean 'esper_lightning.tasks'?"),
    "class by its bare name": (("--data.host=GTP",), "did you mean 'esper_lightning.hosts.GPT'?"),
    "argument of a task": (("--data.task.init_args.validaton=3",), "did you mean 'validation'?"),
    "argument of a host": (("--data.host.init_args.bse=3",), "did you mean 'base'?"),
    "choice": (("--data.env.executor=threds",), "did you mean 'threads'?"),
}


@pytest.mark.parametrize(("flags", "meant"), SUGGESTIONS.values(), ids=list(SUGGESTIONS))
def test_who_mistypes_is_told_what_there_is(
    flags: tuple[str, ...], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli("--config", str(CONFIGS / "smoke.yaml"), *flags)

    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and line.endswith(meant)


def test_so_is_who_mistypes_in_a_file_or_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "mistyped.yaml"
    config.write_text("data: {env: {horizn: 3}}\n")

    for args, meant in (
        (["fit", "--config", str(config)], "did you mean '--data.env.horizon'?"),
        (["evaluat"], "did you mean 'evaluate'?"),
    ):
        with pytest.raises(SystemExit):
            main(args)
        assert meant in capsys.readouterr().err


def test_where_nothing_is_alike_nothing_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli("--config", str(CONFIGS / "smoke.yaml"), "--qqqqqqqqqqqqqqqq=1")

    assert capsys.readouterr().err == "error: unrecognized arguments: --qqqqqqqqqqqqqqqq=1\n"


def completions(script: Path, *words: str) -> list[str]:
    """Return the completions that bash offers for the last of `words`."""
    line = f"""source {script}; COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}
_esper_lightning; printf '%s\\n' "${{COMPREPLY[@]}}" """
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout.split()


def test_tab_completes_commands_options_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "completion.sh"
    script.write_text(help_output(capsys, "--completion"))
    (tmp_path / "my.yaml").touch()

    assert completions(script, "esper-lightning", "ev") == ["evaluate"]
    assert completions(script, "esper-lightning", "fit", "--data.n_") == ["--data.n_envs"]
    assert completions(script, "esper-lightning", "evaluate", "--stand") == ["--stand_ins"]
    assert completions(script, "esper-lightning", "fit", "--stand") == []
    assert completions(script, "esper-lightning", "fit", "--config", f"{tmp_path}/m") == [f"{tmp_path}/my.yaml"]
