"""Write the table of all blueprints: parameters, floating-point operations, and the time of one forward pass.

    python benchmarks/blueprints.py --output docs/reference/blueprints.md

Times are for one CPU thread, medians over rounds. A round runs every blueprint of a layout once, so that other load on
the machine affects all of them equally.
"""

import argparse
import os
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper_lightning.growth.blueprints import blueprint_names, build_seed, get_blueprint

CPU = torch.device("cpu")
WARM_UP = 3
"""Number of initial rounds that are not counted."""


class Setting(NamedTuple):
    """The features on which a layout's blueprints are compared."""

    layout: str
    width: int
    spatial_shape: tuple[int, ...]
    baseline: str

    @property
    def positions(self) -> int:
        return torch.Size(self.spatial_shape).numel()

    def feature(self, batch: int) -> Tensor:
        shape = (self.width, *self.spatial_shape) if self.layout == "image" else (*self.spatial_shape, self.width)
        return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))

    def title(self) -> str:
        sizes = {"image": "C = {}, H×W = {}×{}", "sequence": "C = {}, T = {}", "vector": "C = {}"}
        return f"{self.layout}: {sizes[self.layout].format(self.width, *self.spatial_shape)}"


SETTINGS = [
    Setting("image", 64, (16, 16), "conv_small"),
    Setting("sequence", 384, (256,), "lora"),
    Setting("vector", 256, (), "lora"),
]


@torch.inference_mode()
def seconds(seed: nn.Module, x: Tensor) -> float:
    begin = time.perf_counter()
    seed(x)
    return time.perf_counter() - begin


def forward_times(setting: Setting, batch: int, repeats: int) -> dict[str, float]:
    """Return the median milliseconds of a forward pass of each blueprint that runs on a CPU."""
    # Random initial weights, because seeds that start as the identity compute with many zeros.
    seeds = {
        name: build_seed(
            name, setting.layout, setting.width, device=CPU, generator=torch.Generator().manual_seed(0), birth="random"
        ).eval()
        for name in blueprint_names(setting.layout)
    }
    x = setting.feature(batch)
    rounds = [{name: seconds(seed, x) for name, seed in seeds.items()} for _ in range(WARM_UP + repeats)]
    return {name: 1e3 * statistics.median(each[name] for each in rounds[WARM_UP:]) for name in seeds}


def table(setting: Setting, times: dict[str, float]) -> list[str]:
    lines = [
        f"## {setting.title()}",
        "",
        f"| blueprint | parameters | MFLOPs per sample | ms per batch | × `{setting.baseline}` |",
        "|---|--:|--:|--:|--:|",
    ]
    for name in blueprint_names(setting.layout):
        blueprint = get_blueprint(name, setting.layout)
        parameters, flops = blueprint.parameters(setting.width), blueprint.flops(setting.width, setting.positions)
        milliseconds, ratio = "–", "–"
        if name in times:
            milliseconds, ratio = f"{times[name]:.3g}", f"{times[name] / times[setting.baseline]:.2f}"
        lines.append(f"| `{name}` | {parameters:,} | {flops / 1e6:,.3f} | {milliseconds} | {ratio} |")
    return [*lines, ""]


def preface(batch: int, repeats: int) -> list[str]:
    """Return the text above the tables, which says how they are made."""
    return [
        "# Blueprints",
        "",
        "A blueprint is a kind of seed. These tables list all blueprints by the layout of the feature they grow on, "
        "with the cost of each; [extending](../guides/extending.md#a-blueprint) adds one of your own.",
        "",
        "```sh",
        f"python benchmarks/blueprints.py --batch {batch} --repeats {repeats} --output docs/reference/blueprints.md",
        "```",
        "",
        f"The command made this page with PyTorch {version('torch')} on one thread of a shared {os.cpu_count()}-core "
        f"virtual machine. Its load average was {os.getloadavg()[0]:.1f} at the start, and other work on it disturbs "
        f"the times. A time is that of one forward pass of {batch} samples under `torch.inference_mode`, median of "
        f"{repeats} rounds.",
        "",
        "FLOPs are those of the forward pass of one sample: two per multiply-add of matrix products, convolutions and "
        "attention. Normalisation and elementwise work take time, but do not count. A causal mask or a window saves "
        "nothing by this count.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="Markdown file to write; printed if left out")
    parser.add_argument("--batch", type=int, default=32, help="samples in a batch (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=30, help="rounds that are counted (default: %(default)s)")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    lines = preface(arguments.batch, arguments.repeats)
    for setting in SETTINGS:
        lines += table(setting, forward_times(setting, arguments.batch, arguments.repeats))
    text = "\n".join(lines)
    if arguments.output is None:
        print(text, end="")
    else:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
