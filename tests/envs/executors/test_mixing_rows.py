"""Hosts whose rows see each other in evaluation are validated one combination of seeds at a time."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.envs import ActionConfig, HostPool
from esper_lightning.growth import slots_of
from esper_lightning.growth.blueprints import registry
from esper_lightning.growth.slot import SeedSlot
from tests.conftest import SMALL
from tests.decisions import WAIT, act, germinate
from tests.growth.mixing import MIXING

MakePool = Callable[..., HostPool]


def host_with(behind: Callable[[], nn.Module]) -> Callable[[Sequence[int], int], nn.Module]:
    """Return a host [B, 1, 8, 8] -> [B, 10] with one slot for vectors."""

    def host(input_shape: Sequence[int], outputs: int) -> nn.Module:
        slot = SeedSlot("place", "vector", 16)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), slot, behind(), nn.Linear(16, outputs))

    return host


def scores(pool: HostPool, variants: Sequence[bool], rng_state: Tensor) -> list[float]:
    """Return the accuracy on validation data with and without the seed, each in a pass of its own."""
    network, (inputs, targets) = pool.envs[0].network.eval(), pool.data.validation
    (slot,) = slots_of(network).values()
    found = []
    for has_seed in variants:
        slot.override = None if has_seed else (lambda slot, x: x)
        torch.set_rng_state(rng_state)
        with torch.no_grad():
            found.append((network(inputs).argmax(1) == targets).float().mean().item())
    slot.override = None
    return found


def check(pool: HostPool) -> None:
    """Compare the executor's scores with those of plain passes."""
    pool.reset([3])
    for row in (germinate(0, 0), WAIT, WAIT, WAIT):
        pool.step(act(row))
    env = pool.envs[0]
    assert env.slots[0].blended and env.variants()[:2] == [{"place"}, frozenset()]
    state = torch.get_rng_state()

    measured = pool.executor.validate([env], pool.data.validation)[0, 1, :2].tolist()

    assert measured == pytest.approx(scores(pool, [True, False], state), abs=1e-6)


SETTINGS = {"horizon": 12, "actions": ActionConfig(blueprints=["mlp_small"], tempos={"SLOW": 5})}


@pytest.mark.parametrize("executor", ["loop", "threads"])
@pytest.mark.parametrize("behind", MIXING.values(), ids=MIXING)
def test_scores_are_those_of_plain_passes(make_pool: MakePool, behind: Callable[[], nn.Module], executor: str) -> None:
    if executor == "threads" and behind is MIXING["dropout in evaluation"]:
        pytest.skip("each thread draws from the same generator, at any time")
    pool = make_pool(1, host_with(behind), executor=executor, **SETTINGS)

    assert len(pool.executor.mixing) == 1
    check(pool)


class MinusTheBatch(nn.Module):
    """Seed whose rows see each other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def initialise(self, generator: torch.Generator) -> None:
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * F.normalize(x - x.mean(0), dim=1)


def test_a_seed_of_the_user_is_tried_too_and_ordinary_hosts_share_their_pass(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_BLUEPRINTS", dict(registry._BLUEPRINTS))
    registry.register("minus_the_batch", {"vector"}, parameters=lambda c: c, flops=lambda c, n: 0)(MinusTheBatch)
    actions = ActionConfig(blueprints=["minus_the_batch"], tempos={"SLOW": 5})
    lifecycle = replace(SMALL.lifecycle, birth="random")
    pool = make_pool(1, host_with(nn.Identity), executor="loop", horizon=12, actions=actions, lifecycle=lifecycle)

    assert len(pool.executor.mixing) == 1
    assert not make_pool(1, host_with(nn.Identity), executor="loop", **SETTINGS).executor.mixing
    check(pool)
