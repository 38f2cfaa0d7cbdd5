"""Stacked hosts in half precision."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.envs import HostPool
from esper_lightning.envs.executors.fused.layers import StackedConv2d, StackedLinear
from tests.envs.executors.fused.hosts import FAST_CONFIG, make, play
from tests.tiers import rest_is_slow

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}

CLOSE = {"bf16": 2e-2, "fp16": 5e-3}
"""Relative tolerance of losses after 3 environment steps: about the difference of the loop from float32."""

in_half = pytest.mark.parametrize("precision", HALVES)

each_host_in_half = pytest.mark.parametrize(
    ("host", "precision"), rest_is_slow(product(["cnn", "gpt"], HALVES), {("cnn", "fp16"), ("gpt", "bf16")})
)


def half(executor: str, host: str, precision: str) -> HostPool:
    return make(executor, host, 3, torch.float32, training=replace(FAST_CONFIG.training, precision=precision))


@each_host_in_half
def test_it_is_as_near_to_the_loop_as_the_precision_allows(host: str, precision: str) -> None:
    ours, theirs = (play(half(name, host, precision), 3) for name in ("fused", "loop"))

    torch.testing.assert_close(ours.losses, theirs.losses, rtol=CLOSE[precision], atol=0.0)


@each_host_in_half
def test_all_layers_of_hosts_and_seeds_compute_in_it(host: str, precision: str) -> None:
    pool = half("fused", host, precision)
    pool.reset(range(3))
    for env, style in zip(pool.envs, ("add", "multiply", "gate"), strict=True):
        env.growing.germinate(env.slots[0].name, "attention", style=style)
    pool.train_without_actions(1)
    seen = set()

    def watch(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, name: str) -> None:
        seen.add((name, module.training, output.dtype))

    layers = {
        n: m
        for n, m in next(iter(pool.executor.stacks.values())).network.named_modules()
        if isinstance(m, StackedConv2d | StackedLinear)
    }
    for name, layer in layers.items():
        layer.register_forward_hook(partial(watch, name=name))
    pool.train_without_actions(2)

    assert sum(".seed." in name for name in layers) >= 3
    assert seen == {(name, mode, HALVES[precision]) for name in layers for mode in (True, False)}
    assert {p.dtype for env in pool.envs for p in env.network.parameters()} == {torch.float32}


@in_half
def test_what_is_measured_is_not_rounded(precision: str) -> None:
    pool = half("fused", "cnn", precision)
    shares = torch.arange(51) / 50  # of 50 images
    measured = pool.executor.validate(pool.envs, pool.data.validation)

    assert measured.dtype == torch.float32
    torch.testing.assert_close(measured[:, 1], shares[(measured[:, 1] * 50).round().long()], rtol=0.0, atol=1e-7)
    assert not torch.equal(measured[:, 0], measured[:, 0].to(HALVES[precision]).float())
