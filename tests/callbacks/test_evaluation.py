"""Evaluation: the same unseen hosts for every controller, and for every run."""

import csv
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from esper_lightning.callbacks import Evaluation
from esper_lightning.envs.seeding import EVALUATION, TRAINING, episode_rng_seeds
from esper_lightning.module import TamiyoModule
from tests.runs import fit, only_run


def evaluate(root: Path, *flags: str) -> dict[str, list[str]]:
    """Return the test accuracies of each controller's hosts after a tiny training."""
    fit(root, "--trainer.max_epochs=1", "--data.env.training.batches=1", "--evaluation.hosts=3", *flags)
    found: dict[str, list[str]] = {}
    with (only_run(root).folder / "evaluation" / "evaluation.csv").open() as file:
        for row in csv.DictReader(file):
            found.setdefault(row["controller"], []).append(row["loss"])
    return found


@pytest.mark.parametrize("hosts", [1, -1])
def test_too_few_hosts_for_an_interval_are_refused(hosts: int) -> None:
    with pytest.raises(ValueError, match=r"evaluation\.hosts must be 0 \(none\) or at least 2"):
        Evaluation(hosts=hosts)


def test_the_policy_plays_on_the_device_of_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning moves the module to the CPU before `on_fit_end`."""
    played = []
    monkeypatch.setattr(
        "esper_lightning.callbacks.evaluation.run_comparison",
        lambda comparison, data, policies, **others: played.extend(policies) or {},
    )
    module = TamiyoModule()
    module.policy, module.observation_norm = nn.Linear(1, 1), nn.Identity()
    trainer = Mock(run_path=Path(), loggers=[], **{"datamodule.pool.device": torch.device("meta")})

    Evaluation(hosts=2).on_fit_end(trainer, module)

    assert [policy.policy.weight.device.type for policy in played] == ["meta"]


@pytest.mark.slow
def test_no_hosts_means_no_evaluation(tmp_path: Path) -> None:
    fit(tmp_path, "--trainer.max_epochs=1", "--evaluation.hosts=0")

    assert not list(tmp_path.rglob("evaluation.*"))


@pytest.mark.slow
def test_the_hosts_depend_on_the_evaluations_seed_alone(tmp_path: Path) -> None:
    once = evaluate(tmp_path / "once", "--seed_everything=1")
    again = evaluate(tmp_path / "again", "--seed_everything=2")
    others = evaluate(tmp_path / "others", "--seed_everything=1", "--evaluation.seed=1")

    for controller in ("random", "small static", "heuristic"):  # controllers without training
        assert again[controller] == once[controller] != others[controller]
    assert len(once["small static"]) == 3


def test_no_evaluated_host_was_ever_trained_on() -> None:
    trained = {seed for episode in range(50) for seed in episode_rng_seeds(0, TRAINING, episode, n_envs=48)}

    assert len(trained) == 50 * 48
    assert not trained & set(episode_rng_seeds(0, EVALUATION, 0, n_envs=64))
    assert {seed % 2 for seed in trained} == {0}
    assert {seed % 2 for seed in episode_rng_seeds(0, EVALUATION, 0, n_envs=64)} == {1}
