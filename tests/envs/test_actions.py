import torch

from esper_lightning.envs import HEADS, Action, ActionConfig, ActionSpace, Op
from esper_lightning.envs.actions import relevance_table, to_action, zero_irrelevant_heads
from esper_lightning.envs.env_factory import probe_action_space
from esper_lightning.growth.blueprints import build_on
from esper_lightning.hosts import GPT
from tests.decisions import WAIT, cull, fossilize, germinate
from tests.imitated_gpu import CPU, GPU, ImitatedGpu

SPACE = ActionSpace(
    op=[op.name for op in Op],
    slot=["block1", "block2.pool"],
    blueprint=["norm", "conv_light"],
    tempo=["FAST", "SLOW"],
)


def test_an_action_is_spelled_out_head_by_head_and_in_words() -> None:
    chosen = SPACE.decode(germinate(1, 0, tempo=1))

    assert chosen == ("GERMINATE", "block2.pool", "norm", "SLOW")
    assert chosen._fields == HEADS
    rows = WAIT, germinate(1, 1, tempo=1), cull(1), fossilize(0)
    words = ["WAIT", "GERMINATE conv_light in block2.pool (SLOW)", "CULL block2.pool", "FOSSILIZE block1"]
    assert [SPACE.describe(row) for row in rows] == words


def test_each_head_matters_for_the_ops_that_read_it_and_is_0_for_the_others() -> None:
    matters, ones = relevance_table(), torch.ones(len(Op), dtype=torch.int64)

    by_op = {op: {head for head, yes in zip(HEADS, matters[op].tolist(), strict=True) if yes} for op in Op}
    assert by_op == {
        Op.WAIT: {"op"},
        Op.GERMINATE: {"op", "slot", "blueprint", "tempo"},
        Op.CULL: {"op", "slot"},
        Op.FOSSILIZE: {"op", "slot"},
    }
    blank = zero_irrelevant_heads(Action(torch.arange(len(Op)), *[ones] * 3), matters)
    rows = [tuple(row) for row in torch.stack(blank, 1).tolist()]
    assert rows == [WAIT, germinate(1, 1, 1), cull(1), fossilize(1)]


def test_heads_that_an_action_leaves_out_are_0() -> None:
    action = to_action([(Op.GERMINATE, 2), (Op.WAIT,), germinate(1, 2, 1)], CPU)

    assert [tuple(row) for row in torch.stack(action, 1).tolist()] == [germinate(2), WAIT, germinate(1, 2, 1)]


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
