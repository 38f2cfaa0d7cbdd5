"""Measure the speed-up by prefix sharing: one shared counterfactual pass against one plain pass per combination.

    make bench

For each host with three blended seeds, and for leave-one-out (4 combinations) and the full family (8), the benchmark
prints the time of the plain passes divided by that of the shared pass, next to the ratio predicted from the host's
segments. A segment is the part of a host between two slots; it is timed in plain passes, and the prediction counts how
often each family runs it. The three measurements alternate, so that other load on the machine affects all of them; the
numbers are medians and quartiles. `make` keeps freed memory in the process: without that, page faults of the longer
batches cost up to a quarter of the speed-up.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median, quantiles

import torch
from torch import Tensor, nn

from esper_lightning.blueprints import build_on
from esper_lightning.growth.counterfactual import SeedVariant, all_variants, forward_variants, leave_one_out
from esper_lightning.growth.lifecycle import germinate, slots_of
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN, GPT

CPU = torch.device("cpu")


def cnn(generator: torch.Generator) -> tuple[nn.Module, Tensor, str]:
    """Return a convolutional host, a batch and the name of a blueprint."""
    host = build_on(CPU, lambda: CNN((3, 32, 32), 10, base=16), generator)
    return host, torch.randn(64, 3, 32, 32, generator=generator), "conv_light"


def gpt(generator: torch.Generator) -> tuple[nn.Module, Tensor, str]:
    """Return a transformer host, a batch and the name of a blueprint."""
    host = build_on(CPU, lambda: GPT((64,), 128, width=192), generator)
    return host, torch.randint(128, (8, 64), generator=generator), "mlp_small"


HOSTS: dict[str, Callable[[torch.Generator], tuple[nn.Module, Tensor, str]]] = {"CNN": cnn, "GPT": gpt}
FAMILIES: dict[str, Callable[[Sequence[str]], list[SeedVariant]]] = {
    "leave one out": leave_one_out,
    "full family": all_variants,
}


def grow_everywhere(host: nn.Module, blueprint: str, generator: torch.Generator) -> None:
    """Grow a blended seed with random weights in every slot."""
    for slot in slots_of(host).values():
        germinate(slot, blueprint, generator=generator, birth="random")
        for stage in (Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY):
            slot.move_to(stage)


class Segments:
    """Timer of the segments of one plain pass: the parts of the host between its slots, and the seeds."""

    def __init__(self, host: nn.Module) -> None:
        self.host = host
        self.slots = list(slots_of(host).values())

    def __call__(self, x: Tensor) -> tuple[list[float], list[float]]:  # seconds: K + 1 of the host, K of the seeds
        stamps: list[float] = []

        def timed(slot: SeedSlot, feature: Tensor) -> Tensor:
            stamps.append(time.perf_counter())
            feature = slot.blend_output(feature)
            stamps.append(time.perf_counter())
            return feature

        for slot in self.slots:
            slot.override = timed
        begin = time.perf_counter()
        self.host(x)
        stamps = [begin, *stamps, time.perf_counter()]
        for slot in self.slots:
            slot.override = None
        lengths = [after - before for before, after in pairwise(stamps)]
        return lengths[::2], lengths[1::2]


def runs(family: Sequence[SeedVariant], slots: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return how often a shared pass runs each of the host's K + 1 segments, and each of the K seeds."""
    starts = [frozenset(variant & frozenset(slots[:k]) for variant in family) for k in range(len(slots) + 1)]
    host = [len(prefixes) for prefixes in starts]
    seeds = [len({prefix for prefix in starts[k + 1] if slots[k] in prefix}) for k in range(len(slots))]
    return host, seeds


def predicted(
    family: Sequence[SeedVariant], slots: Sequence[str], host: Sequence[float], seeds: Sequence[float]
) -> float:
    """Return the predicted time of the plain passes divided by that of the shared pass, from times of segments."""
    host_runs, seed_runs = runs(family, slots)
    plain = len(family) * sum(host) + sum(
        length * sum(slot in variant for variant in family) for slot, length in zip(slots, seeds, strict=True)
    )
    shared = sum(n * length for n, length in zip([*host_runs, *seed_runs], [*host, *seeds], strict=True))
    return plain / shared


def seconds(work: Callable[[], object]) -> float:
    """Return the duration of one call in seconds."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@torch.inference_mode()
def compare(name: str, family_name: str, repeats: int) -> str:
    """Measure one host with one family and return a row of the table."""
    generator = torch.Generator().manual_seed(0)
    host, x, blueprint = HOSTS[name](generator)
    grow_everywhere(host, blueprint, generator)
    host.eval()
    slots = list(slots_of(host))
    family = FAMILIES[family_name](slots)
    segments = Segments(host)

    def plain() -> list[Tensor]:
        return [forward_variants(host, [variant], x)[0] for variant in family]

    def shared() -> Tensor:
        return forward_variants(host, family, x)[0]

    outputs, positions = forward_variants(host, family, x)
    chunks = outputs.chunk(len(family))
    difference = max((chunks[p] - own).abs().max().item() for p, own in zip(positions, plain(), strict=True))
    measured, predictions = [], []
    for _ in range(repeats):
        measured.append(seconds(plain) / seconds(shared))
        predictions.append(predicted(family, slots, *segments(x)))
    low, _, high = quantiles(measured)
    ratio, prediction = median(measured), median(predictions)
    return (
        f"{name:4} {family_name:14} {len(family):12} {ratio:8.2f} ({low:.2f} … {high:.2f}) {prediction:10.2f} "
        f"{ratio / prediction - 1.0:+8.1%} {difference:18.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30, help="rounds of measurement")
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print("host family         combinations    ratio (quartiles)    predicted      off  largest difference")
    for name in HOSTS:
        for family in FAMILIES:
            print(compare(name, family, repeats), flush=True)


if __name__ == "__main__":
    main()
