"""Accuracy on letters at equal training FLOPs: grown early and late, with each isolation, and built in."""

from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.isolation.hosts import TEST_BATCH, Case, draw_epochs, train
from benchmarks.rows import appended_rows, read_rows
from esper_lightning.envs.flops import measure_flops
from esper_lightning.evaluation.flops_meter import step_flops
from esper_lightning.evaluation.static_host import STAGES_TO_FOSSILIZED
from esper_lightning.growth import GrowingNetwork, LifecycleConfig
from esper_lightning.growth.alpha import DEFAULT_RAMP
from esper_lightning.growth.blend import Isolation
from esper_lightning.growth.lifecycle import count_parameters
from esper_lightning.growth.stages import Stage
from esper_lightning.tasks import Glyphs, Split

LR = 0.003
"""Learning rate of Adam; it falls linearly to 0 over the last quarter of a run."""

BLENDING_TICKS, TRAINING_TICKS = 3, 1

BLUEPRINT = "conv_heavy"


class Plan(NamedTuple):
    """When and how the seeds of a host grow, one in each of its three slots."""

    name: str
    ticks: int = 24
    at: tuple[int, ...] = ()
    """Ticks of the germinations, from the first slot to the last. Empty: none."""
    isolation: Isolation = "straight_through"
    stage: Literal["GERMINATED", "BLENDING"] = "GERMINATED"
    built_in: bool = False
    """The seeds are fossilized from the first minibatch."""


EARLY, LATE = (2, 4, 6), (10, 12, 14)

BUILT_IN = "built in"

PLANS = (
    Plan("small"),
    *(Plan(f"{BUILT_IN}, {ticks} ticks", ticks, built_in=True) for ticks in (12, 16, 20, 24, 36)),
    *(
        Plan(f"{when}, {isolation}", at=at, isolation=isolation)
        for (when, at), isolation in product(
            (("early", EARLY), ("late", LATE)), ("straight_through", "proximal", "trial")
        )
    ),
    Plan("early, direct", at=EARLY, stage="BLENDING"),
    Plan("late, direct", at=LATE, stage="BLENDING"),
    Plan("late, direct, 48 ticks", 48, (20, 24, 28), stage="BLENDING"),
    Plan("late, proximal, 48 ticks", 48, (20, 24, 28), isolation="proximal"),
)
"""All plans. Seeds that are not direct learn behind the host for a tick after that of their germination.

All are blended over three ticks, and fossilized as soon as the gates allow it."""


class Row(NamedTuple):
    """Result of a run; accuracies in points of 100."""

    plan: str
    rng_seed: int
    parameters: int
    flops: int
    seen: float  # new images of the training fonts
    unseen: float  # images of other fonts
    kept: int  # fossilized seeds


def measure_plans(path: Path, rng_seeds: list[int]) -> None:
    """Measure all plans that the file has not got yet; each row is appended when its run ends."""
    known = {(row.plan, row.rng_seed) for row in read_rows(path, Row)}
    wanted = [(plan, seed) for seed, plan in product(rng_seeds, PLANS) if (plan.name, seed) not in known]
    case = Case(Glyphs(train=80_000, validation=1, test=8_000).load(), 128, 10_000, (BLUEPRINT,))
    unseen = Glyphs(train=1, validation=1, test=8_000, unseen_fonts=True).load().test
    with appended_rows(path, Row) as append:
        for plan, rng_seed in wanted:
            row = run(plan, rng_seed, case, unseen=unseen)
            append([row])
            print(*row, sep=", ", flush=True)


def run(plan: Plan, rng_seed: int, case: Case, *, unseen: Split) -> Row:
    """Train one host according to a plan."""
    torch.manual_seed(rng_seed)
    host = case.make_host()
    compute = measure_flops(host, case.data.train.inputs[:1])
    growing = GrowingNetwork(
        host,
        torch.optim.Adam(host.parameters(), lr=LR),
        horizon=plan.ticks,
        lifecycle=LifecycleConfig(
            isolation=plan.isolation, training_ticks=TRAINING_TICKS, min_contribution=None, auto_cull=False
        ),
        generator=torch.Generator().manual_seed(rng_seed),
    )
    if plan.built_in:
        for name, slot in growing.slots.items():
            growing.germinate(name, BLUEPRINT)
            slot.start_ramp(DEFAULT_RAMP)
            for stage in STAGES_TO_FOSSILIZED:
                slot.move_to(stage)
    flops = 0
    for tick, batches in enumerate(draw_epochs(case, rng_seed, plan.ticks)):
        for name, germination in zip(growing.slots, plan.at, strict=False):
            if germination == tick:
                growing.germinate(name, BLUEPRINT, ticks=BLENDING_TICKS, stage=plan.stage)
        for group in growing.optimizer.param_groups:
            group["lr"] = LR * min(1.0, 4.0 * (plan.ticks - tick) / plan.ticks)
        flops += step_flops(compute, list(growing.slots.values())) * sum(len(indices) for indices in batches)
        train(growing, case, batches)
        growing.end_epoch()
        for name in growing.slots:
            if not growing.reasons_against_fossilizing(name):
                growing.fossilize(name)
    kept = sum(slot.stage is Stage.FOSSILIZED for slot in growing.slots.values())
    seen_accuracy, unseen_accuracy = (round(accuracy(host, split), 2) for split in (case.data.test, unseen))
    return Row(plan.name, rng_seed, count_parameters(host), flops, seen_accuracy, unseen_accuracy, kept)


@torch.no_grad()
def accuracy(network: nn.Module, test: Split) -> float:
    """Return the accuracy in points of 100."""
    network.eval()
    batches = zip(test.inputs.split(TEST_BATCH), test.targets.split(TEST_BATCH), strict=True)
    correct: list[Tensor] = [(network(inputs).argmax(1) == targets).double() for inputs, targets in batches]
    return 100.0 * torch.cat(correct).mean().item()


def table(rows: list[Row]) -> list[str]:
    """Return a Markdown table of means over RNG seeds.

    The last columns compare each run with hosts of the same RNG seed that had the grown network from the start, at
    equal FLOPs, by linear interpolation in the logarithm of the FLOPs.
    """
    lines = ["| plan | parameters | TFLOP | seen fonts | unseen fonts | kept | ahead of built in at equal FLOPs |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for plan in PLANS:
        own = [row for row in rows if row.plan == plan.name]
        if own:
            seen, unseen = (
                f"{np.mean(values):.1f} ({', '.join(f'{value:.1f}' for value in values)})"
                for values in ([row.seen for row in own], [row.unseen for row in own])
            )
            leads = [lead for row in own if not plan.built_in and (lead := lead_over_built_in(row, rows)) is not None]
            ahead = f"{np.mean(leads):+.1f} ({', '.join(f'{lead:+.1f}' for lead in leads)})" if leads else ""
            parameters, flops, kept = (
                np.mean([getattr(row, name) for row in own]) for name in ("parameters", "flops", "kept")
            )
            lines.append(
                f"| {plan.name} | {parameters:.0f} | {flops / 1e12:.3f} | {seen} | {unseen} | {kept:.1f} | {ahead} |"
            )
    return lines


def lead_over_built_in(row: Row, rows: list[Row]) -> float | None:
    """Return the accuracy on seen fonts minus that of built-in seeds at equal FLOPs; None beyond their range."""
    frontier = sorted(
        (other.flops, other.seen)
        for other in rows
        if other.plan.startswith(BUILT_IN) and other.rng_seed == row.rng_seed
    )
    if not frontier or not frontier[0][0] <= row.flops <= frontier[-1][0]:
        return None
    flops, seen = np.array(frontier).T
    return row.seen - float(np.interp(np.log(row.flops), np.log(flops), seen))
