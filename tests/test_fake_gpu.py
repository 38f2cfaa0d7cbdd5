"""Forward passes on fake tensors of a GPU: torch raises an error where one of them meets a tensor of the CPU.

Torch fakes no random generators, no backward passes, no copies of modules, and no LSTM; these run on the imitated GPU.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from esper_lightning.envs.actions import Masks, Op, relevance_table
from esper_lightning.envs.host_training import next_scale
from esper_lightning.growth.blueprints import default_blueprints, get_blueprint
from esper_lightning.growth.counterfactual import forward_variants, leave_one_out
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import OCCUPIED, Stage
from esper_lightning.hosts import CNN, GPT, MLP
from esper_lightning.ppo.distribution import HostDistribution, host_table_shapes
from esper_lightning.tasks.augment import AugmentConfig, AugmentParams, augment

CUDA = torch.device("cuda", 0)

WIDTH = 16

FEATURES = {"image": (4, WIDTH, 6, 6), "sequence": (4, 7, WIDTH), "vector": (4, WIDTH)}
"""Shape of a feature by layout of the slot."""

SEEDS = [(layout, name) for layout in FEATURES for name in default_blueprints(layout)]

HOSTS = {
    "cnn": (partial(CNN, (1, 8, 8), 10, base=4, pools=2), (8, 1, 8, 8)),
    "cnn, contiguous": (partial(CNN, (1, 8, 8), 10, base=4, pools=2, channels_last=False), (8, 1, 8, 8)),
    "gpt": (partial(GPT, (8,), 9, width=16, blocks=3, heads=2, context=8), (8, 8)),
    "gpt, rotary": (partial(GPT, (8,), 9, width=16, blocks=2, heads=2, context=8, rotary=True, rms_norm=True), (8, 8)),
    "mlp": (partial(MLP, (12,), 9, width=16), (8, 12)),
}
"""Constructor of a host, and the shape of its inputs."""


@pytest.fixture(autouse=True)
def fake_gpu() -> Iterator[None]:
    """Let all new tensors be fake ones on a GPU."""
    relevance_table.cache_clear()
    with FakeTensorMode(), CUDA:
        yield
    relevance_table.cache_clear()


def grow(slot: SeedSlot, blueprint: str, stage: Stage) -> None:
    """Put a seed in a stage, without a random generator."""
    slot.seed = get_blueprint(blueprint, slot.layout).build(slot.width)
    slot.stage = stage


def test_a_mix_of_devices_is_an_error() -> None:
    on_cpu = torch.ones(2, device="cpu")
    with pytest.raises(RuntimeError, match="cuda:0"):
        torch.ones(2) + on_cpu


@pytest.mark.parametrize(("layout", "blueprint"), SEEDS)
def test_a_seed_of_every_kind_runs_in_every_stage(layout: str, blueprint: str) -> None:
    for stage, isolation in product(OCCUPIED, ("proximal", "straight_through")):
        slot = SeedSlot("here", layout, WIDTH)
        slot.isolation = isolation
        grow(slot, blueprint, stage)
        assert slot(torch.randn(FEATURES[layout])).device == CUDA


@pytest.mark.parametrize("name", HOSTS)
def test_a_host_with_seeds_is_trained_and_measured_without_each_of_them(name: str) -> None:
    build, shape = HOSTS[name]
    network: nn.Module = build()
    slots = slots_of(network)
    inputs = torch.randn(shape) if "gpt" not in name else torch.randint(9, shape)
    for slot in slots.values():
        grow(slot, default_blueprints(slot.layout)[0], Stage.BLENDING)
    with torch.autocast("cuda", torch.bfloat16):
        outputs = network(inputs)
        targets = torch.randint(9, outputs.shape[:-1])
        assert F.cross_entropy(outputs.flatten(0, -2), targets.flatten()).device == CUDA
        with torch.inference_mode():
            outputs, index = forward_variants(network.eval(), leave_one_out(slots), inputs, mixes=False)
    assert outputs.device == CUDA and len(index) == 1 + len(slots)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_images_are_augmented(memory: torch.memory_format) -> None:
    images = torch.randn(4, 3, 6, 5).to(memory_format=memory)
    drawn = AugmentParams(shift=torch.randint(-2, 3, (4, 2)), flip=torch.ones(4, dtype=torch.bool))
    assert augment(images, drawn, AugmentConfig(pad=2, flip=True)).device == CUDA


def test_a_loss_scale_is_adapted() -> None:
    scales = next_scale(torch.ones(3), torch.zeros(3, dtype=torch.int32), torch.ones(3, dtype=torch.bool))
    assert {scale.device for scale in scales} == {CUDA}


def test_a_policy_knows_probabilities_and_entropies_of_actions() -> None:
    sizes = {"op": len(Op), "slot": 2, "blueprint": 3, "tempo": 2}
    shapes = host_table_shapes(sizes).items()
    ones = partial(torch.ones, dtype=torch.bool)
    masks = Masks(slot=ones(4, len(Op), 2), blueprint=ones(4, 2, 3), ended=ones(4))
    distribution = HostDistribution({head: torch.randn(4, *shape) for head, shape in shapes}, masks)
    found: list[Tensor] = [distribution.log_prob(distribution.mode()), *distribution.entropy()]
    assert {tensor.device for tensor in [*found, distribution.choice_probability()]} == {CUDA}
