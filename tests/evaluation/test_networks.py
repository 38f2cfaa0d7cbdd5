"""Grown hosts are saved in folders that hold all that is needed to load them again."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.controllers.rules import Periodic, PeriodicConfig
from esper_lightning.envs import HostPool
from esper_lightning.evaluation.networks import (
    HOST_FILE,
    NUM_SAMPLES,
    SAMPLES_FILE,
    describe_host,
    fossilized_copy,
    load_host,
    read_description,
    read_samples,
    save_host,
)
from esper_lightning.evaluation.play import Outcome, play_episode
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from esper_lightning.runtime.registry import describe_factory
from tests.conftest import small_host

SEEDS = [1, 3, 5]

Host = tuple[nn.Module, dict[str, Any], Tensor]


@pytest.fixture(scope="module")
def pool(make_pool: Callable[..., HostPool]) -> HostPool:
    return make_pool(len(SEEDS))


@pytest.fixture(scope="module")
def played(pool: HostPool) -> tuple[Outcome, list[Host]]:
    """Return the outcome of an episode, and networks, descriptions and inputs of two of its hosts."""
    outcome = play_episode(pool, "periodic", Periodic(PeriodicConfig(every=1)), rng_seeds=SEEDS)
    inputs = pool.data.test.inputs[:NUM_SAMPLES]
    grown = [(fossilized_copy(pool.envs[host]), describe_host(pool, host, outcome), inputs) for host in range(2)]
    play_episode(pool, "again", Periodic(), rng_seeds=SEEDS)  # overwrites the pool
    return outcome, grown


def test_hosts_are_loaded_as_they_were_tested(
    pool: HostPool, played: tuple[Outcome, list[Host]], tmp_path: Path
) -> None:
    outcome, hosts = played
    inputs, targets = pool.data.test
    for host, grown in enumerate(hosts):
        save_host(tmp_path, *grown)
        description, samples = read_description(tmp_path), read_samples(tmp_path / SAMPLES_FILE)
        network = load_host(tmp_path, description)
        with torch.no_grad():
            score = (network(inputs).argmax(1) == targets).double().mean().item()
            assert torch.equal(samples["outputs"], network(inputs[:8]))
        assert torch.equal(samples["inputs"], inputs[:8])
        assert score == pytest.approx(outcome.score[host], abs=1e-7)
        assert (description["rng_seed"], description["objective"]) == (SEEDS[host], outcome.objective[host])
        fossils = [slot.name for slot in slots_of(network).values() if slot.stage is Stage.FOSSILIZED]
        assert fossils == [seed["slot"] for seed in description["seeds"]] != []
        assert not any(slot.live for slot in slots_of(network).values())


def test_a_factory_is_described_as_in_a_config() -> None:
    as_configured = partial(partial(lambda call, *args, **options: call(*args, **options), print), CNN, base=4)
    public = "esper_lightning.hosts.CNN"
    assert describe_factory(CNN, {}) == {"class_path": public, "init_args": {}}
    assert describe_factory(partial(CNN, base=4), {"kernel": 1})["init_args"] == {"base": 4, "kernel": 1}
    assert describe_factory(as_configured, {}) == {"class_path": public, "init_args": {"base": 4}}
    assert describe_factory(small_host, {})["class_path"] == f"{small_host.__module__}.small_host"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "", "is no JSON"),
        (lambda text: json.dumps(json.loads(text) | {"format": 2}), "is not of format 1"),
        (lambda text: json.dumps(json.loads(text) | {"host": "CNN"}), "the host cannot be made"),
        (lambda text: text.replace('"base"', '"basis"'), r"the host cannot be made: .*'basis'"),
        (lambda text: text.replace('"block3"', '"block2"'), "is of another network"),
    ],
)
def test_files_that_are_damaged_or_do_not_belong_together_are_refused_in_one_line(
    damage: Callable[[str], str], message: str, played: tuple[Outcome, list[Host]], tmp_path: Path
) -> None:
    network, description, inputs = played[1][0]
    cnn = {"base": 4, "kernel": 1, "pools": 2, "slots": ["block1.pool", "block2.pool", "block3"], "isolate": False}
    host = {"class_path": "esper_lightning.hosts.CNN", "init_args": cnn | {"channels_last": False}}
    save_host(tmp_path, network, description | {"host": host}, inputs)
    (tmp_path / HOST_FILE).write_text(damage((tmp_path / HOST_FILE).read_text()))
    with pytest.raises(ValueError, match=message) as refusal:
        load_host(tmp_path, read_description(tmp_path))
    assert "\n" not in str(refusal.value)
