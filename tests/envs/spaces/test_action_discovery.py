"""Discovery of the action space."""

import torch

from esper_lightning.blueprints import build_on
from esper_lightning.envs import ActionConfig
from esper_lightning.envs.spaces.action_discovery import probe_action_space
from esper_lightning.hosts import GPT
from tests.imitated_gpu import CPU, GPU, ImitatedGpu


def blueprints_on(device: torch.device) -> list[str]:
    """Return the blueprints on offer for a text host on a device, if none are named."""
    generator = torch.Generator(device).manual_seed(0)
    host = build_on(device, lambda: GPT((8,), 5, width=16, blocks=1, heads=1, context=8), generator)
    tokens = torch.zeros(2, 8, dtype=torch.long, device=device)
    space, _ = probe_action_space(
        host, lambda network: network(tokens).square().mean(), actions=ActionConfig(), birth="identity"
    )
    return space.blueprint


def test_the_action_space_does_not_depend_on_the_device() -> None:
    with ImitatedGpu():
        on_gpu = blueprints_on(GPU)
    assert on_gpu == blueprints_on(CPU)
    assert "attention" in on_gpu
