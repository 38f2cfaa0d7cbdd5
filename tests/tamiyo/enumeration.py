"""Enumeration of all legal actions, for brute-force checks of the factored distribution."""

from itertools import product

import torch
from torch import Tensor

from esper_lightning.envs import HEADS, Masks, Op
from esper_lightning.tamiyo.heads import HeadTables, HostDistribution, table_shapes
from tests.decisions import WAIT, Row, act, advance, cull, fossilize, germinate, set_alpha

Sizes = dict[str, int]

OPS, SLOTS, BLUEPRINTS, STYLES, TEMPOS, TARGETS, SPEEDS, CURVES = len(Op), 3, 4, 2, 2, 3, 3, 2
ALL = dict(zip(HEADS, (OPS, SLOTS, BLUEPRINTS, STYLES, TEMPOS, TARGETS, SPEEDS, CURVES), strict=True))
DEFAULT = ALL | {"op": 4, "style": 1, "target": 1, "speed": 1, "curve": 1}


def random_masks(rows: int, seed: int, sizes: Sizes = ALL) -> Masks:
    """Return random masks, with waiting, a change at once and one blueprint per slot always possible.

    A change at once has no curve. At least one target for alpha is possible, and a ramp has at least one curve.
    """
    generator = torch.Generator().manual_seed(seed)

    def chance(*heads: str) -> Tensor:
        mask = torch.rand(rows, *(sizes[head] for head in heads), generator=generator) < 0.6
        if heads[-1] != "slot":
            mask[..., 0] |= ~mask.any(-1)
        return mask

    slot, blueprint, target = chance("op", "slot"), chance("slot", "blueprint"), chance("slot", "target")
    speed, curve = chance("op", "slot", "speed"), chance("speed", "curve")
    slot[:, Op.WAIT] = True
    speed[..., 0] = True
    curve[:, 0] = torch.arange(sizes["curve"]) == 0
    return Masks(slot, blueprint, target, speed, curve, torch.zeros(rows, dtype=torch.bool))


def random_logits(rows: int, seed: int, sizes: Sizes = ALL, spread: float = 1.5) -> HeadTables:
    generator = torch.Generator().manual_seed(seed)
    shapes = table_shapes(sizes)
    return {head: spread * torch.randn(rows, *shape, generator=generator) for head, shape in shapes.items()}


def true(mask: Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def legal_actions(masks: Masks, row: int, sizes: Sizes = ALL) -> list[Row]:
    """Return every distinct legal action; heads that do not matter are 0."""
    slot, blueprint, target, speed, curve, _ = (mask[row] for mask in masks)
    slots = {op: true(slot[op]) if op < sizes["op"] else [] for op in Op}
    actions = [WAIT]
    actions += map(fossilize, slots[Op.FOSSILIZE])
    actions += map(advance, slots[Op.ADVANCE])
    for k in slots[Op.GERMINATE]:
        actions += [
            germinate(k, p, m, s)
            for p, m, s in product(true(blueprint[k]), range(sizes["tempo"]), range(sizes["style"]))
        ]
    for k in slots[Op.CULL]:
        actions += [cull(k, v, c) for v in true(speed[Op.CULL, k]) for c in true(curve[v])]
    for k in slots[Op.SET_ALPHA]:
        changes = [(v, c) for v in true(speed[Op.SET_ALPHA, k]) for c in true(curve[v])]
        actions += [set_alpha(k, t, *change) for t in true(target[k]) for change in changes]
    return actions


def every_action(sizes: Sizes) -> list[Row]:
    """Return every combination of choices of all heads."""
    return list(product(*(range(sizes[head]) for head in HEADS)))


def log_probs(logits: HeadTables, masks: Masks, row: int, actions: list[Row]) -> Tensor:
    """Return the log-probabilities of several actions in one environment."""
    n = len(actions)
    tables = {head: table[row].expand(n, *table.shape[1:]) for head, table in logits.items()}
    return HostDistribution(tables, Masks(*(m[row].expand(n, *m.shape[1:]) for m in masks))).log_prob(act(*actions))


def probabilities(logits: HeadTables, masks: Masks, row: int, sizes: Sizes = ALL) -> dict[Row, float]:
    """Return the probability of every legal action in one environment."""
    actions = legal_actions(masks, row, sizes)
    return dict(zip(actions, log_probs(logits, masks, row, actions).double().exp().tolist(), strict=True))
