"""Natural mistakes on the command line: one line says what to do, before anything is written."""

import shlex
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from esper_lightning.__main__ import main
from tests.runs import SharedParserCLI
from tests.tiers import rest_is_slow

FILES = {
    "broken.yaml": "data: {n_envs: 3\n",
    "tab.yaml": "data:\n\tn_envs: 3\n",
    "colon.yaml": "data: n_envs: 3\n",
    "list.yaml": "- data\n- model\n",
    "words.yaml": "hello world\n",
    "empty.yaml": "",
    "twice.yaml": "data: {n_envs: 1}\ndata: {n_envs: 2}\n",
    "type.yaml": "data: {n_envs: four}\n",
    "bool.yaml": "evaluation: {controls: maybe}\n",
    "choice.yaml": "model: {policy: {memory: gru}}\n",
    "typo.yaml": "data: {env: {horizn: 3}}\n",
    "section.yaml": "modle: {ppo: {epochs: 3}}\n",
    "group.yaml": "data: {env: 3}\n",
    "null.yaml": "data: null\n",
    "no_host.yaml": "data: {host: null}\n",
    "host.yaml": "data: {host: {class_path: esper_lightning.hosts.CNN, init_args: {kernal: 3}}}\n",
    "family.yaml": "data: {env: {family: {train: [{host.kernal: [1, 3]}]}}}\n",
    "digits_mine.yaml": "trainer: {max_epochs: 1}\n",
    "notes.ckpt": "no checkpoint",
}

WITHOUT_TORCH = {
    # commands
    "evaluat": "did you mean 'evaluate'?",
    "train --config digits": "unknown command 'train'; there are: fit, evaluate",
    "digits": "did you mean: esper-lightning fit --config digits",
    "smoke.yaml": "did you mean: esper-lightning fit --config smoke.yaml",
    "--config digits": "the command comes first, as in: esper-lightning fit --config digits",
    "--data.n_envs 3 fit": "the command comes first",
    "configs digits": "configs takes no 'digits'",
    "init": "init needs the name of a config: cifar10, ",
    "init digitz": "did you mean 'digits'?",
    "init digits twice": "init takes no 'twice'",
    # no config
    "fit": "fit needs a config, as in: esper-lightning fit --config digits",
    "fit --data.n_envs 3": "fit needs a config, as in: esper-lightning fit --config digits",
    "grow --controller periodic": "grow needs a config",
    "information": "information needs a config",
    "evaluate": "give --ckpt_path, or --config",
    "grow --config smoke": "grow needs --controller: ",
    "fit --config": "--config needs a value: a path or a name",
    "fit smoke.yaml": "did you mean --config smoke.yaml?",
    "fit digits": "did you mean --config digits?",
    "fit --config smoke periodic": "unknown argument 'periodic'; options begin with --",
    "fit --config digit": "did you mean 'digits'?",
    "fit --config ./digits_mine.yml": "did you mean 'digits_mine.yaml'?",
    "fit --config configs/smoke.yaml": "config 'configs/smoke.yaml' does not exist; did you mean 'smoke'?",
    "fit --config nothing_like_it.yaml": "`esper-lightning configs` lists those that come with the package",
    "sweep --config digitz": "did you mean 'digits'?",
    # files
    "+ --config .": "config '.' is a folder; name a YAML file in it",
    "+ --config broken.yaml": "config 'broken.yaml', line 2, column 1: ",
    "+ --config tab.yaml": "config 'tab.yaml', line 2, column 1: ",
    "+ --config colon.yaml": "config 'colon.yaml', line 1, column 13: mapping values are not allowed",
    "+ --config list.yaml": "config 'list.yaml' holds no settings",
    "+ --config words.yaml": "config 'words.yaml' holds no settings",
    "+ --config empty.yaml": "config 'empty.yaml' is empty",
    "+ --config twice.yaml": "config 'twice.yaml': key 'data' is given twice, first in line 1; remove one",
    "+ --config typo.yaml": "config 'typo.yaml': unknown setting 'data.env.horizn'; did you mean '--data.env.horizon'?",
    "+ --config section.yaml": "config 'section.yaml': unknown setting 'modle'; did you mean",
    "+ --config group.yaml": "config 'group.yaml': data.env is a group of settings, got 3",
    "+ --config null.yaml": "config 'null.yaml': data is a group of settings, got None; leave it out",
    # options
    "+ --data.n_env 4": "did you mean '--data.n_envs'?",
    "+ --data.n_envs": "--data.n_envs needs a value: an integer",
    "+ --n_envs 3": "did you mean '--data.n_envs'?",
    "+ --data.learning_rate 0.1": "did you mean '--data.env.training.lr'",
    "+ --lr 0.1": "'--model.ppo.lr' or '--data.env.training.lr'",
    "+ --model.ppo.lr.strt 1": "did you mean '--model.ppo.lr.start'?",
    "+ --epochs 3": "did you mean '--model.ppo.epochs'",
    "+ --max_epochs 3": "did you mean '--trainer.max_epochs'?",
    "+ --trainer.max_epoch 3": "did you mean '--trainer.max_epochs'?",
    "+ --data.env.horizn 3": "did you mean '--data.env.horizon'?",
    "+ --seed 3": "did you mean '--seed_everything'?",
    "+ --verbose": "unknown option '--verbose'; did you mean",
    "+ --zzzz 3": "unknown option '--zzzz'; --help lists all options",
    "information --config smoke --information.hosts 2": "did you mean '--look.hosts'",
    "evaluate --config smoke --standins x": "did you mean '--stand_ins'?",
    "export here --too onnx": "did you mean '--to'?",
}
"""Mistakes that are answered without torch, with a part of the answer. `+` stands for `fit --config smoke`."""

BY_THE_PARSER = {
    "+ --data.n_envs four": "data.n_envs must be an integer, got 'four'",
    "+ --data.n_envs=": "data.n_envs must be an integer, got ''",
    "+ --seed_everything abc": "seed_everything must be true or false or an integer, got 'abc'",
    "+ --data.env.horizon 3.5": "data.env.horizon must be an integer, got '3.5'",
    "+ --data.env.training.lr fast": "data.env.training.lr must be a number, got 'fast'",
    "+ --data.env.objective.price free": "data.env.objective.price must be a number, got 'free'",
    "+ --evaluation.controls maybe": "evaluation.controls must be true or false, got 'maybe'",
    "+ --trainer.max_epochs ten": "trainer.max_epochs must be an integer or null, got 'ten'",
    "+ --threads_per_operator 0": "threads_per_operator must be an integer (positive int), got '0'",
    "+ --data.env.training.optimizer adm": "must be one of adam, adamw, sgd, got 'adm'; did you mean 'adam'?",
    "+ --model.policy.memory gru": "model.policy.memory must be one of lstm, none, got 'gru'",
    "+ --telemetry.level d": "must be one of off, minimal, normal, debug, got 'd'; did you mean 'debug'?",
    "+ --model.ppo.lr abc": "model.ppo.lr must be a number or settings (start, end, shape), got 'abc'",
    "+ --data.env 3": "data.env must be settings (",
    "+ --evaluation.against climbing": "evaluation.against must be a list (text each) or null, got 'climbing'",
    "+ --data.env.actions.tempos {FAST:quick}": "data.env.actions.tempos must be a mapping (name: an integer)",
    "+ --data.also {a:3}": "data.also must be a mapping",
    "+ --config type.yaml": "config 'type.yaml': data.n_envs must be an integer, got 'four'",
    "+ --config bool.yaml": "config 'bool.yaml': evaluation.controls must be true or false, got 'maybe'",
    "+ --config choice.yaml": "config 'choice.yaml': model.policy.memory must be one of lstm, none, got 'gru'",
    "+ --config host.yaml": "esper_lightning.hosts.CNN has no argument 'kernal'; did you mean 'kernel'?",
    "+ --config no_host.yaml": "without a value: data.host; give it in a config, or as --data.host",
    "+ --data.host.kernal 3": "has no argument 'kernal'; did you mean 'kernel'?",
    "+ --data.host CNNN": "did you mean 'esper_lightning.hosts.CNN'?",
    "+ --data.task Digit": "did you mean 'esper_lightning.tasks.Digits'?",
    "+ --data.task mine.Task": "data.task: cannot import 'mine' for 'mine.Task': No module named 'mine'; it must",
    "+ --data.task esper_lightning.tasks.Digit": "did you mean 'Digits'?",
    "+ --imports mine": "imports: cannot import 'mine': No module named 'mine'; it must lie in the current folder",
    "+ --imports mine.py": "imports: 'mine.py' is a file; name its module, 'mine'",
    "+ --imports 3": "imports must be a list of modules, got 3",
}
"""Mistakes that the parser answers."""

WITH_HOSTS = {
    "+ --trainer.accelerator gpu": "trainer.accelerator is gpu, and torch finds no GPU here; set cpu, or leave it out",
    "+ --ckpt_path latest": "there is no run with a latest.ckpt below",
    "+ --ckpt_path notes.ckpt": "notes.ckpt",
    "+ --evaluation.against [climb]": "did you mean 'climbing'?",
    "+ --evaluation.schedule nosuch.json": "nosuch.json",
    "+ --best.monitor val_loss": "best.monitor 'val_loss' is not a metric; there are: ",
    "+ --data.env.objective.price -1": "must not be negative, got -1",
    "+ --data.host.init_args.slots [block9]": "did you mean 'block",
    "+ --data.env.training.batch_size 5000": "training samples",
    "+ --config family.yaml": "unexpected keyword argument 'kernal'; did you mean 'kernel'?",
    "grow --config smoke --controller periodc": "did you mean 'periodic'?",
    "grow --config smoke --controller nosuch.json": "nosuch.json",
    "evaluate --config smoke --more x.ckpt": "--more needs a trained policy; give --ckpt_path",
    "evaluate --ckpt_path nosuch.ckpt": "'nosuch.ckpt' does not exist",
    "export": "source",
    "export nosuch --to onnx": "there is no folder or file 'nosuch'",
}
"""Mistakes that are found when the settings are checked, or when the hosts are built."""


class Refused(SharedParserCLI):
    """Command line whose runs must be refused before they begin."""

    def before_fit(self) -> None:
        super().before_fit()
        raise AssertionError("the run begins")


def answer(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the answer to a mistake, which must be one line and leave nothing behind."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    capsys.readouterr()
    words = shlex.split(line)
    args = ["fit", "--config", "smoke", *words[1:]] if words[0] == "+" else words
    with patch.object(sys, "argv", sys.argv[:1]), pytest.raises(SystemExit) as ended:
        main(args)

    assert ended.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ")
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    return said


@pytest.mark.parametrize(("line", "said"), WITHOUT_TORCH.items(), ids=list(WITHOUT_TORCH))
def test_a_mistyped_command_option_or_file_is_answered_before_torch_is_imported(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with patch.dict(sys.modules, {"esper_lightning.cli.main": None}):  # its import is an error
        assert said in answer(line, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(("line", "said"), BY_THE_PARSER.items(), ids=list(BY_THE_PARSER))
def test_a_value_of_another_type_is_answered_in_words(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("esper_lightning.cli.main.EsperCLI", Refused)
    assert said in answer(line, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("line", "said"),
    rest_is_slow(list(WITH_HOSTS.items()), lambda case: "accelerator" in case[0]),
    ids=list(WITH_HOSTS),
)
def test_what_does_not_fit_together_is_answered_before_a_run_begins(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("esper_lightning.cli.main.EsperCLI", Refused)
    if "accelerator" in line:
        monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert said in answer(line, tmp_path, monkeypatch, capsys)
