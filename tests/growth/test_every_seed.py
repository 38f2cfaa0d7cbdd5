"""Every blueprint learns in every style, on every layout and with both births."""

from collections.abc import Iterable
from typing import get_args

import pytest
from torch import nn
from torch.optim import SGD, Adam

from esper_lightning.blueprints import Birth, blueprint_names
from esper_lightning.growth.alpha import DEFAULT_RAMP
from esper_lightning.growth.blend import BlendStyle, GatedSeed
from esper_lightning.growth.lifecycle import germinate, slots_of
from esper_lightning.growth.slot import Layout, SeedSlot
from esper_lightning.growth.stages import Stage
from tests.growth.grown import LAYOUTS, LIFE, STYLES, batch_of, generator_of, host_of, loss_on

MATRIX = [
    pytest.param(layout, blueprint, style, birth, id=f"{layout}-{blueprint}-{style}-{birth}")
    for layout in LAYOUTS
    for blueprint in blueprint_names(layout)
    for style in STYLES
    for birth in get_args(Birth)
]

every_seed = pytest.mark.parametrize(("layout", "blueprint", "style", "birth"), MATRIX)


def newborn(
    layout: Layout, blueprint: str, style: BlendStyle, birth: Birth, stage: Stage
) -> tuple[nn.Module, SeedSlot]:
    """Return a host and its first slot with an untrained seed in `stage`; alpha is 1 once it is blended."""
    host = host_of(layout).train()
    slot = next(iter(slots_of(host).values()))
    germinate(slot, blueprint, DEFAULT_RAMP, generator=generator_of(1), style=style, birth=birth)
    for step in LIFE[1 : LIFE.index(stage) + 1]:
        slot.move_to(step)
    return host, slot


def without_gradient_for(
    host: nn.Module, layout: Layout, watched: nn.Module, learning: nn.Module, steps: int
) -> set[str]:
    """Return names of the parameters of `watched` with zero gradient in every one of `steps` steps of `learning`."""
    silent = {name for name, _ in watched.named_parameters()}
    optimizer = SGD(learning.parameters(), lr=0.1)
    for step in range(steps):
        host.zero_grad()
        loss_on(host, batch_of(layout, seed=step)).backward()
        silent -= {name for name, p in watched.named_parameters() if p.grad is not None and p.grad.any()}
        optimizer.step()
    return silent


@pytest.mark.thinned(5)
@every_seed
def test_every_tensor_of_a_training_seed_has_a_gradient_within_two_steps(
    layout: Layout, blueprint: str, style: BlendStyle, birth: Birth
) -> None:
    host, slot = newborn(layout, blueprint, style, birth, Stage.TRAINING)
    seed = slot.seed.seed if isinstance(slot.seed, GatedSeed) else slot.seed
    assert without_gradient_for(host, layout, seed, learning=seed, steps=2) == set()


@pytest.mark.thinned(5)
@every_seed
@pytest.mark.parametrize("stage", [Stage.BLENDING, Stage.PROBATIONARY], ids=lambda stage: stage.name)
def test_every_tensor_of_a_blended_seed_and_its_gate_has_a_gradient_within_two_steps(
    stage: Stage, layout: Layout, blueprint: str, style: BlendStyle, birth: Birth
) -> None:
    host, slot = newborn(layout, blueprint, style, birth, stage)
    assert slot.alpha.item() == 1.0
    assert without_gradient_for(host, layout, slot.seed, learning=host, steps=2) == set()


def losses(host: nn.Module, layout: Layout, seed: nn.Module, steps: int) -> Iterable[float]:
    optimizer, batch = Adam(seed.parameters(), lr=0.01), batch_of(layout)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_on(host, batch)
        loss.backward()
        optimizer.step()
        yield loss.item()


@pytest.mark.thinned(5)
@every_seed
def test_the_loss_falls_within_fifty_steps_of_the_seed_alone(
    layout: Layout, blueprint: str, style: BlendStyle, birth: Birth
) -> None:
    host, slot = newborn(layout, blueprint, style, birth, Stage.PROBATIONARY)
    host.requires_grad_(False)
    slot.seed.requires_grad_()
    falling = iter(losses(host, layout, slot.seed, steps=50))
    first = next(falling)
    assert any(loss < 0.99 * first for loss in falling)
