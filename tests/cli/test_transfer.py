"""`evaluate --transfer`: a policy that was trained on other hosts."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from esper_lightning.checkpointing.policy_file import write_policy
from tests.cli.test_evaluate import evaluate, rows_of, without_time
from tests.runs import CONFIGS, Run, fit, only_run
from tests.tasks.stored import write_cifar10
from tests.tiers import rest_is_slow

ELSEWHERE = (
    *("--config", str(CONFIGS / "tabular.yaml"), "--data.n_envs=2", "--model.ppo.minibatches=2"),
    *("--evaluation.hosts=3", "--data.env.horizon=5", "--data.env.training.batches=2", "--evaluation.credit.hosts=0"),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("trained")
    fit(root, "--model.policy.width=32", "--model.normalize.clip=5")
    return only_run(root)


@pytest.mark.slow
def test_transfer_to_the_training_hosts_changes_nothing(trained: Run, tmp_path: Path) -> None:
    evaluate("--ckpt_path", str(trained.latest), "--evaluation.hosts=3")
    evaluate("--ckpt_path", str(trained.latest), "--evaluation.hosts=3", "--transfer=true")

    rows = rows_of(trained.folder / "evaluation")
    with (trained.folder / "transfer" / "evaluation.csv").open(newline="") as file:
        assert without_time(list(csv.DictReader(file))) == without_time(rows)


@pytest.mark.slow
def test_on_hosts_of_another_task_the_policy_is_compared_with_rules(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_ins = '{"conv_light": "mlp_small", "bottleneck": "lora", "attention": "gated"}'
    evaluate(
        *ELSEWHERE,
        "--ckpt_path",
        str(trained.latest),
        "--transfer=true",
        "--stand_ins",
        stand_ins,
        "--out",
        str(tmp_path),
    )

    rows = rows_of(tmp_path)
    names = list(dict.fromkeys(row["controller"] for row in rows))
    assert names[:3] == ["tamiyo", "sampled", "random"] and "periodic" in names
    hosts = {row["parameters"] for row in rows if row["controller"] == "small static"}
    assert hosts == {"682"}, "the table's hosts, not the digits'"
    assert "│ tamiyo " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [  # each reads a checkpoint and builds hosts, which takes seconds
        (("--transfer=false",), "cannot be evaluated"),
        pytest.param(
            ("--transfer=true", '--stand_ins={"conv_light": "mlpp"}'), "did you mean 'mlp'?", marks=pytest.mark.slow
        ),
        pytest.param(
            ("--transfer=false", '--stand_ins={"conv_light": "mlp"}'), "set --transfer true", marks=pytest.mark.slow
        ),
        pytest.param(
            ("--transfer=true", "--data.env.actions.tempos={SLOW: 3}"), "with its tempo head", marks=pytest.mark.slow
        ),
        (("--transfer=true", "--data.env.actions.blueprints=[mlp]"), "name stand_ins among mlp"),
        pytest.param(
            ("--transfer=true", "--data.host.init_args={width: 16, layers: 4}"),
            "these hosts have 4 slots, the policy has 3",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_does_not_fit_ends_in_one_line(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        evaluate(*ELSEWHERE, "--ckpt_path", str(trained.latest), "--out", str(tmp_path / "out"), *flags)

    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_results_of_a_policy_without_a_run_folder_lie_in_the_root_folder(trained: Run, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    write_policy(trained.latest, shared / "mine.safetensors", {})
    hosts = ("--config", str(trained.folder / "config.yaml"), "--evaluation.hosts=2")

    evaluate(
        *hosts,
        *("--ckpt_path", str(shared / "mine.safetensors"), "--transfer=true", "--evaluation.against=[]"),
        f"--trainer.default_root_dir={tmp_path / 'mine'}",
    )

    assert [row["controller"] for row in rows_of(tmp_path / "mine" / "transfer")][:1] == ["tamiyo"]
    assert [path.name for path in shared.iterdir()] == ["mine.safetensors"]


def test_policies_of_different_observations_are_not_compared_in_one_table(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = ("--ckpt_path", str(trained.latest), "--more", "tamiyo")
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        evaluate(*ELSEWHERE, *policies, "--transfer=true", "--out", str(tmp_path / "out"))

    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "tamiyo: its policy observes other features than that of" in line and str(trained.latest) in line


@pytest.mark.parametrize(
    "damage",
    rest_is_slow(
        [
            {"esper_identity": {"observed features": 3}},
            {"esper_identity": {"choices of the slot head": ["a"]}},
            {"esper_module": {"policy": {"width": "wide"}}},
        ],
        lambda damage: "esper_module" in damage,
    ),
    ids=str,
)
def test_a_damaged_checkpoint_ends_in_one_line(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: dict[str, Any]
) -> None:
    damaged = torch.load(trained.latest, weights_only=True)
    for part, values in damage.items():
        damaged[part] |= values
    torch.save(damaged, tmp_path / "damaged.ckpt")
    capsys.readouterr()

    with pytest.raises(SystemExit) as ended:
        evaluate(*ELSEWHERE, "--ckpt_path", str(tmp_path / "damaged.ckpt"), "--transfer=true")

    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "damaged.ckpt" in line


def test_a_tamiyo_of_digits_runs_unchanged_on_cifar10(
    trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = write_cifar10(tmp_path, monkeypatch, each=40)
    evaluate(
        *("--config", str(CONFIGS / "cifar10.yaml"), f"--data.task.init_args.root={stored}"),
        *("--data.task.init_args.validation=20", "--data.env.executor=loop", "--data.env.training.batch_size=8"),
        *("--data.env.training.batches=1", "--data.env.horizon=3", "--data.n_envs=2", "--model.ppo.minibatches=2"),
        *("--data.env.actions.tempos={FAST: 2}", "--evaluation.hosts=2", "--evaluation.controls=false"),
        *("--trainer.accelerator=cpu", "--evaluation.against=[small static]", "--transfer=true"),
        *("--ckpt_path", str(trained.latest), "--out", str(tmp_path / "out")),
    )

    rows = rows_of(tmp_path / "out")
    assert {row["parameters"] for row in rows if row["controller"] == "small static"} == {"6418"}
    assert len([row for row in rows if row["controller"] == "tamiyo"]) == 2
