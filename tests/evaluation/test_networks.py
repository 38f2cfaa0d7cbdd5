"""Grown hosts are saved in folders that hold all that is needed to load them again."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esper_lightning.controllers.rules import Periodic, PeriodicConfig
from esper_lightning.envs import HostPool
from esper_lightning.evaluation.networks import (
    HOST_FILE,
    NETWORK_FILE,
    SAMPLES_FILE,
    GrownHost,
    best_hosts,
    describe_factory,
    load_host,
    read_description,
    read_samples,
    save_best,
    save_host,
)
from esper_lightning.evaluation.play import Outcome, play_episode
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from tests.conftest import small_host

SEEDS = [1, 3, 5]


@pytest.fixture(scope="module")
def pool(make_pool: Callable[..., HostPool]) -> HostPool:
    return make_pool(len(SEEDS))


@pytest.fixture(scope="module")
def played(pool: HostPool) -> tuple[Outcome, list[GrownHost]]:
    """Return the outcome of an episode, and its two best hosts."""
    outcome = play_episode(pool, "periodic", Periodic(PeriodicConfig(every=1)), rng_seeds=SEEDS)
    best = best_hosts(pool, outcome, 2)
    play_episode(pool, "again", Periodic(), rng_seeds=SEEDS)  # overwrites the pool
    return outcome, best


def test_the_best_hosts_are_loaded_as_they_were_tested(
    pool: HostPool, played: tuple[Outcome, list[GrownHost]], tmp_path: Path
) -> None:
    outcome, best = played
    inputs, targets = pool.data.test
    for folder, host in zip(save_best(best, tmp_path), np.argsort(-outcome.objective), strict=False):
        description = read_description(folder)
        network = load_host(folder, description)
        with torch.no_grad():
            accuracy = (network(inputs).argmax(1) == targets).double().mean().item()
        samples = read_samples(folder / SAMPLES_FILE)
        assert accuracy == pytest.approx(outcome.accuracy[host], abs=1e-7)
        assert torch.equal(samples["inputs"], inputs[:8])
        assert torch.equal(samples["outputs"], network(inputs[:8]))
        assert description["rng_seed"] == SEEDS[host]
        assert description["objective"] == outcome.objective[host]
        grown = [slot.name for slot in slots_of(network).values() if slot.stage is Stage.FOSSILIZED]
        assert grown == [seed["slot"] for seed in description["seeds"]] != []
        assert not any(slot.live for slot in slots_of(network).values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_a_factory_is_described_as_in_a_config() -> None:
    as_configured = partial(partial(lambda call, *args, **options: call(*args, **options), print), CNN, base=4)
    public = "esper_lightning.hosts.CNN"
    assert describe_factory(CNN, {}) == {"class_path": public, "init_args": {}}
    assert describe_factory(partial(CNN, base=4), {"kernel": 1}) == {
        "class_path": public,
        "init_args": {"base": 4, "kernel": 1},
    }
    assert describe_factory(as_configured, {}) == {"class_path": public, "init_args": {"base": 4}}
    assert describe_factory(small_host, {})["class_path"] == f"{small_host.__module__}.small_host"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "", "is no JSON"),
        (lambda text: "[" * 100_000, "is no JSON"),
        (lambda text: "[]", "is not of format 1"),
        (lambda text: json.dumps(json.loads(text) | {"format": 2}), "is not of format 1"),
        (lambda text: json.dumps(json.loads(text) | {"host": "CNN"}), "does not tell how the host is made"),
        (lambda text: json.dumps(json.loads(text) | {"input_shape": [1, -8, 8]}), "does not tell how"),
        (lambda text: json.dumps(json.loads(text) | {"slots": [1]}), "does not tell how the host is made"),
    ],
)
def test_a_damaged_description_is_refused_in_one_line(
    damage: Callable[[str], str], message: str, played: tuple[Outcome, list[GrownHost]], tmp_path: Path
) -> None:
    save_host(played[1][0], tmp_path)
    (tmp_path / HOST_FILE).write_text(damage((tmp_path / HOST_FILE).read_text()))
    with pytest.raises(ValueError, match=message) as refusal:
        read_description(tmp_path)
    assert "\n" not in str(refusal.value)


def test_files_that_do_not_belong_together_are_refused(played: tuple[Outcome, list[GrownHost]], tmp_path: Path) -> None:
    save_host(played[1][0], tmp_path)
    description: dict[str, Any] = read_description(tmp_path)
    cnn = {"class_path": "esper_lightning.hosts.CNN", "init_args": {"kernal": 1}}
    with pytest.raises(ValueError, match=r"the host cannot be made: .*'kernal'"):
        load_host(tmp_path, description | {"host": cnn})
    with pytest.raises(ValueError, match="this one has"):
        load_host(tmp_path, description | {"host": cnn | {"init_args": {"slots": ["block1"]}}})
    with pytest.raises(ValueError, match=f"holds no {HOST_FILE}"):
        read_description(tmp_path / "nosuch")
    with pytest.raises(ValueError, match="and no tensor 'inputs'"):
        read_samples(tmp_path / NETWORK_FILE)
