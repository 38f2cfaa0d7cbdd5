"""benchmarks/tune.py: controllers get their best settings, on training hosts alone."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from benchmarks import tune
from esper_lightning.__main__ import main
from esper_lightning.controllers.hill_climbing import ClimbingConfig
from esper_lightning.controllers.periodic import PeriodicConfig
from esper_lightning.envs import HostPool
from esper_lightning.envs.context.distribution import FamilyConfig
from esper_lightning.rewards import ObjectiveConfig
from tests.runs import CONFIGS

MakePool = Callable[..., HostPool]


def test_all_settings_differ_and_can_be_played(make_pool: MakePool) -> None:
    pool = make_pool(2)
    for rules in tune.candidate_settings(pool).values():
        assert len({repr(rule) for rule in rules}) == len(rules) > 10
        for rule in rules:
            tune.make_controller(rule).reset(pool)


@pytest.mark.slow
def test_the_best_settings_are_found_on_equally_many_training_hosts_of_each_context(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FamilyConfig(train=[{"objective.price": [0.5, 0.9]}])
    pool = make_pool(4, family=family, horizon=6, objective=ObjectiveConfig(price=0.5))
    met: list[int] = []
    real = pool.reset

    def watched(seeds: Sequence[int]) -> Any:
        met.extend(seeds)
        return real(seeds)

    monkeypatch.setattr(pool, "reset", watched)
    # Growth is very expensive, so the setting that grows least is best; the last one grows only once.
    dear, cheap = PeriodicConfig(every=1, blueprints=["conv_light"]), PeriodicConfig(every=5, blueprints=["norm"])
    best, objective = tune.tune(pool, [dear, cheap, dear], rng_seed=3)

    assert best == cheap and -0.5 < objective < 1.0
    assert not any(seed % 2 for seed in met), "odd ones are for evaluations"
    prices = [pool.env_factory.context_distribution.draw(seed).price for seed in met[:4]]
    assert sorted(prices) == [0.5, 0.5, 0.9, 0.9]
    assert len(set(met)) == 4 * (1 + tune.ROUNDS), "finalists meet others"


@pytest.mark.slow
def test_the_file_is_one_that_the_command_line_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {
        "periodic": [PeriodicConfig(every=2, blueprints=["norm"])],
        "climbing": [ClimbingConfig(order="cheapest", patience=1)],
    }
    monkeypatch.setattr(tune, "candidate_settings", lambda pool: few)
    smoke, out = str(CONFIGS / "smoke.yaml"), tmp_path / "settings" / "smoke.yaml"
    tune.main(["--config", smoke, "--out", str(out), "--hosts", "2"])

    assert "# periodic: " in out.read_text()
    said = StringIO()
    with pytest.raises(SystemExit), redirect_stdout(said), patch.object(sys, "argv", sys.argv[:1]):
        main(["evaluate", "--config", smoke, "--config", str(out), "--print_config"])
    evaluation = yaml.safe_load(said.getvalue())["evaluation"]
    assert evaluation["periodic"] == {"every": 2, "blueprints": ["norm"]}
    written = yaml.safe_load(out.read_text())["evaluation"]
    assert written == {name: evaluation[name] for name in written}, "whole, so that nothing of another config is left"
    assert (evaluation["climbing"]["order"], evaluation["climbing"]["patience"]) == ("cheapest", 1)


@pytest.mark.slow
def test_hosts_of_several_tasks_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tune.main(["--config", str(CONFIGS / "mixed.yaml"), "--out", str(tmp_path / "out.yaml"), "--hosts", "2"])
    assert ended.value.code == 2
    assert "several tasks; tune the rules for each in a config of its own" in capsys.readouterr().err


@pytest.mark.slow
def test_hosts_are_rounded_up_to_equally_many_of_each_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def watched(pool: HostPool, rules: Sequence[tune.Rule], seed: int) -> tuple[tune.Rule, float]:
        hosts = tune.draw_rng_seeds(pool, seed)
        seen.extend(Counter(str(pool.env_factory.context_distribution.draw(host)) for host in hosts).values())
        return rules[0], 0.5

    monkeypatch.setattr(tune, "tune", watched)
    tune.main(["--config", str(CONFIGS / "digits_family.yaml"), "--out", str(tmp_path / "out.yaml"), "--hosts", "30"])

    assert seen and set(seen) == {2}
