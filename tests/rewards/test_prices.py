"""Price of compute, prices that differ between episodes, and their observation by the policy."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper_lightning.blueprints import blueprint_names
from esper_lightning.controllers.random import RandomValid, WaitOnly
from esper_lightning.envs import ActionConfig, HostPool
from esper_lightning.envs.flops import measure_flops
from esper_lightning.evaluation.play import play_episode
from esper_lightning.growth.alpha import DEFAULT_RAMP
from esper_lightning.growth.lifecycle import germinate, slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN, GPT, MLP
from esper_lightning.rewards import ObjectiveConfig, Prices, compute_rent
from tests.decisions import WAIT, act
from tests.decisions import fossilize as keep
from tests.decisions import germinate as grow

HOSTS = {
    "image": (lambda: CNN((1, 8, 8), 10, base=4, pools=2), torch.randn(1, 1, 8, 8)),
    "sequence": (lambda: GPT((16,), 11, width=8, blocks=2, heads=2), torch.zeros(1, 16, dtype=torch.int64)),
    "vector": (lambda: MLP((6,), 3, width=8), torch.randn(1, 6)),
}


def count_flops(network: nn.Module, x: torch.Tensor) -> int:
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(x)
    return counter.get_total_flops()


@pytest.mark.parametrize("style", ["add", "gate"])
@pytest.mark.parametrize("layout", HOSTS)
def test_what_a_grown_host_computes_is_known_without_running_it(layout: str, style: str) -> None:
    build, x = HOSTS[layout]
    compute = measure_flops(build(), x)
    assert compute.host == count_flops(build().eval(), x) > 0
    for blueprint in blueprint_names(layout):
        network = build().eval()
        for slot in slots_of(network).values():
            germinate(slot, blueprint, DEFAULT_RAMP, generator=torch.Generator().manual_seed(0), style=style)
            for stage in (Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED):
                slot.move_to(stage)
        grown = compute.host + sum(compute.seed_flops(slot) for slot in slots_of(network).values())
        assert grown == count_flops(network, x), blueprint
        assert grown > compute.host or blueprint == "norm"


def transformer(width: int, hidden: int) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 4, hidden, batch_first=True), 2)


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        # Per layer: queries, keys and values; scores and their sums; output; two layers of the perceptron.
        (transformer(16, 24), 2 * (2 * 10 * 16 * 48 + 4 * 10 * 10 * 16 + 2 * 10 * 16 * 16 + 4 * 10 * 16 * 24)),
        (nn.LSTM(16, 8, batch_first=True), 2 * 10 * 4 * 8 * (16 + 8)),
        (nn.GRU(16, 8, batch_first=True), 2 * 10 * 3 * 8 * (16 + 8)),
    ],
    ids=["transformer", "lstm", "gru"],
)
def test_layers_that_torch_fuses_in_evaluation_mode_are_counted(network: nn.Module, expected: int) -> None:
    before = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled

    assert measure_flops(network, torch.randn(1, 10, 16)).host == expected
    assert (torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled) == before == (True, True)


def test_compute_rent_is_the_price_of_each_growth_by_a_factor_of_e() -> None:
    flops = torch.tensor([1000, 2718, 2000])
    charged = compute_rent(flops, 1000, torch.tensor([0.1, 0.1, 0.0]))
    torch.testing.assert_close(charged, torch.tensor([0.0, 0.1, 0.0]), rtol=0.0, atol=1e-4)


def test_the_objective_charges_what_is_kept_for_its_compute(make_pool: Callable[..., HostPool]) -> None:
    pool = make_pool(2, objective=ObjectiveConfig(price=0.0, compute_price=0.2))
    pool.reset([1, 2])
    script = [[grow(0, 2), WAIT], [WAIT, WAIT], [WAIT, WAIT], [keep(0), WAIT]]
    start = torch.tensor([env.objective for env in pool.envs])
    rewards = torch.stack([pool.step(act(*rows)).reward for rows in script])
    env, bare = pool.envs
    # conv_light, 3×3 on 4 channels of 4×4 positions: 2·9·4·4·16 operations.
    assert env.fossilized_flops - env.flops.host == 4608
    rent = 0.2 * torch.log1p(torch.tensor(4608 / env.flops.host))
    worth = torch.tensor([env.history.accuracy[-1] - rent, bare.history.accuracy[-1]])
    torch.testing.assert_close(rewards.sum(0) + start, worth, rtol=0.0, atol=1e-5)
    seen = dict(zip(pool.feature_names, pool.observation.features[0].tolist(), strict=True))
    assert seen["price.compute"] == pytest.approx(0.2)
    assert seen["compute.committed"] > 0.0


def test_compute_is_neither_counted_nor_shown_where_it_is_free(make_pool: Callable[..., HostPool]) -> None:
    free, priced = make_pool(1), make_pool(1, objective=ObjectiveConfig(compute_price=0.1))
    more = [name for name in priced.feature_names if name not in free.feature_names]
    assert more == ["price.compute", "compute.committed"]
    assert "compute_price" not in " ".join(free.feature_names)


@given(st.integers(0, 2**63))
def test_a_price_of_an_episode_lies_between_the_two_that_are_given(seed: int) -> None:
    config = ObjectiveConfig(price=0.02, price_to=0.1, compute_price=0.3, compute_price_to=0.1)
    prices = config.prices(seed)
    assert prices == config.prices(seed)
    assert 0.02 <= prices.parameters <= 0.1
    assert 0.1 <= prices.compute <= 0.3
    assert ObjectiveConfig().prices(seed) == Prices(0.05, 0.0)


def test_prices_of_episodes_are_evenly_spread() -> None:
    drawn = torch.tensor([ObjectiveConfig(price=0.0, price_to=1.0).prices(2 * seed).parameters for seed in range(2000)])
    torch.testing.assert_close(
        drawn.quantile(torch.tensor([0.1, 0.5, 0.9])), torch.tensor([0.1, 0.5, 0.9]), atol=0.04, rtol=0
    )


def test_each_host_has_and_observes_the_price_of_its_episode(make_pool: Callable[..., HostPool]) -> None:
    pool = make_pool(3, objective=ObjectiveConfig(price=0.1, price_to=0.6))
    pool.reset([1, 2, 3])
    script = [[grow(0, 2)] * 3, *[[WAIT] * 3] * 4, [keep(0)] * 3]
    step = [pool.step(act(*rows)) for rows in script][-1]
    at = pool.feature_names.index("price")
    prices = [pool.config.objective.prices(env.rng_seed).parameters for env in pool.envs]
    assert len(set(prices)) == 3
    assert step.observation.features[:, at].tolist() == pytest.approx(prices)
    rent = step.metrics.accuracy - step.metrics.objective
    growth = torch.log1p(torch.tensor(148 / pool.envs[0].host_parameters))
    torch.testing.assert_close(rent, torch.tensor(prices) * growth, rtol=0.0, atol=1e-6)


def test_the_same_hosts_cost_the_same_under_every_controller(make_pool: Callable[..., HostPool]) -> None:
    config = ObjectiveConfig(price=0.1, price_to=0.6, compute_price_to=0.3)
    pool = make_pool(3, objective=config, actions=ActionConfig(blueprints=["conv_light"], tempos={"FAST": 1}))
    for controller in (RandomValid(1), WaitOnly()):
        outcome = play_episode(pool, "controller", controller, rng_seeds=[7, 8, 9])
        for i, env in enumerate(pool.envs):
            price, compute_price = config.prices((7, 8, 9)[i])
            rent = price * torch.log1p(torch.tensor(outcome.parameters[i] / env.host_parameters - 1.0))
            rent += compute_price * torch.log1p(torch.tensor(env.fossilized_flops / env.flops.host - 1.0))
            assert outcome.objective[i] == pytest.approx(outcome.accuracy[i] - rent.item(), abs=1e-5)


@pytest.mark.parametrize("name", ["price_to", "compute_price", "compute_price_to"])
def test_prices_are_not_negative(name: str) -> None:
    with pytest.raises(ValueError, match=f"objective.{name} must not be negative, got -0.1"):
        ObjectiveConfig(**{name: -0.1})
