"""Numbers of parameters and FLOPs of a seed, computed before it is built."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper_lightning.blueprints import build_seed, get_blueprint
from tests.blueprints.features import CPU, EVERYTHING, HERE, LAYOUTS, feature, seeded

SIZES = {
    "image": {  # at 8 and at 64 channels
        "norm": (17, 129),
        "attention": (8 * 4 + 4 + 4 * 8 + 8, 64 * 16 + 16 + 16 * 64 + 64),
        "conv_small": (72, 4160),
        "depthwise": (80 + 72, 640 + 4160),
        "bottleneck": (72 + 584 + 72, 1040 + 2320 + 1088),
        "conv_light": (584, 36928),
        "conv_heavy": (1168, 73856),
    },
    "sequence": {
        "norm": (17, 129),
        "lora": (128, 1024),
        "lora_large": (512, 4096),
        "mlp_small": (144 + 136, 8320 + 8256),
        "mlp": (288 + 264, 16640 + 16448),
        "attention": (216 + 72, 12480 + 4160),
        "flex_attention": (216 + 72, 12480 + 4160),
    },
    "vector": {
        "norm": (17, 129),
        "lora": (128, 1024),
        "mlp_small": (144 + 136, 8320 + 8256),
        "mlp": (288 + 264, 16640 + 16448),
        "gated": (144 + 72, 8320 + 4160),
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_are_those_of_the_manual(layout: str) -> None:
    offered = [name for its_layout, name in EVERYTHING if its_layout == layout]
    counts = {name: get_blueprint(name, layout).parameters for name in offered}
    assert {name: (count(8), count(64)) for name, count in counts.items()} == SIZES[layout]


@pytest.mark.parametrize(("layout", "name"), EVERYTHING)
def test_the_number_of_parameters_is_known_before_the_seed_is_built(layout: str, name: str) -> None:
    blueprint = get_blueprint(name, layout)
    for width in range(1, 41):
        with torch.device("meta"):
            seed = blueprint.build(width)
        assert blueprint.parameters(width) == sum(p.numel() for p in seed.parameters()), width


@pytest.mark.thinned(7)
@pytest.mark.parametrize(("layout", "name"), HERE)
@pytest.mark.parametrize("width", [1, 3, 8, 33, 64])
@pytest.mark.parametrize("positions", [(1, 2), (5, 7), (8, 8)])
def test_the_number_of_operations_is_what_pytorch_counts(
    layout: str, name: str, width: int, positions: tuple[int, int]
) -> None:
    seed = build_seed(name, layout, width, device=CPU, generator=seeded())
    count = 1 if layout == "vector" else positions[0] * positions[1]
    for samples in (1, 3):
        # Attention as plain matrix products: not every PyTorch counts its fused kernel on a CPU.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            seed(feature(layout, width, samples, positions))
        assert counter.get_total_flops() == samples * get_blueprint(name, layout).flops(width, count)


def test_a_window_is_counted_like_attention_without_one() -> None:
    with_window, without = (get_blueprint(name, "sequence").flops for name in ("flex_attention", "attention"))
    # One head of 2 channels, 3 positions: projections 2·3·2·(6 + 2), scores 2·3·3·2, weighted values as many.
    assert with_window(2, 3) == without(2, 3) == 96 + 36 + 36
