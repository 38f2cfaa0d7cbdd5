"""Dropout with the random numbers of its own host."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from esper_lightning.blueprints import build_on
from esper_lightning.envs import HostPool
from esper_lightning.hosts import GPT
from esper_lightning.hosts.parts import Dropout
from tests.envs.executors.fused.hosts import FAST_CONFIG, distance, make, play
from tests.runs import differences

LENGTH, WORDS, TICKS = 8, 9, 6


def built(seed: int = 0, **options: object) -> GPT:
    settings = {"width": 16, "blocks": 2, "heads": 2, "context": LENGTH, "dropout": 0.25} | options
    generator = torch.Generator().manual_seed(seed)
    return build_on(torch.device("cpu"), lambda: GPT((LENGTH,), WORDS, **settings), generator)


def tokens(samples: int = 6) -> Tensor:  # [B, T]
    return torch.randint(WORDS, (samples, LENGTH), generator=torch.Generator().manual_seed(1))


def dropping(executor: str = "loop", n_envs: int = 3, **changes: object) -> HostPool:
    few = replace(FAST_CONFIG.actions, blueprints=["norm", "lora"], styles=["linear_add"])
    return make(executor, "gpt, dropout", n_envs, actions=few, **changes)


@pytest.fixture(scope="module")
def played() -> HostPool:
    """Hosts after some ticks of random actions, whose state no test may change."""
    pool = dropping()
    play(pool, ticks=TICKS)
    return pool


def test_dropout_zeroes_a_share_of_the_elements_and_keeps_the_mean() -> None:
    dropout, ones = Dropout(0.25), torch.ones(40, 50, 20)
    dropout.initialise(torch.Generator().manual_seed(0))

    kept = dropout(ones)

    assert kept.unique().tolist() == [0.0, pytest.approx(1.0 / 0.75)]
    assert (kept == 0.0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert not torch.equal(dropout(ones), kept), "every pass has a mask of its own"
    assert torch.equal(dropout.eval()(ones), ones)


def test_dropout_draws_from_the_generator_of_the_host_alone() -> None:
    networks, before = [built().train() for _ in range(2)], torch.get_rng_state()

    first, again = (network(tokens()) for network in networks)

    assert torch.equal(first, again)
    assert not torch.equal(networks[0](tokens()), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_changes_neither_weights_nor_evaluation() -> None:
    plain, dropping = built(dropout=0.0).eval(), built().eval()

    assert differences(plain.state_dict(), dropping.state_dict()) == []
    assert torch.equal(plain(tokens()), dropping(tokens()))
    assert not torch.equal(plain.train()(tokens()), dropping.train()(tokens()))


def test_recomputed_activations_have_the_same_masks() -> None:
    results = []
    for again in (False, True):
        network = built(checkpoint_activations=again).train()
        losses = [network(tokens()).square().mean() for _ in range(2)]
        sum(losses).backward()
        masks_after = network(tokens())
        results.append([*losses, masks_after, *(p.grad for p in network.parameters())])

    assert all(torch.equal(kept, recomputed) for kept, recomputed in zip(*results, strict=True))


@pytest.mark.parametrize("executor", ["threads", "fused"])
def test_every_executor_draws_the_masks_of_the_loop(played: HostPool, executor: str) -> None:
    other = dropping(executor)

    play(other, ticks=TICKS)

    assert distance(played, other) == 0.0 if executor == "threads" else distance(played, other) < 1e-9
    for ours, theirs in zip(played.envs, other.envs, strict=True):
        assert torch.equal(ours.generator.get_state(), theirs.generator.get_state())


def test_the_masks_of_a_host_depend_on_no_other_host() -> None:
    alone, together = dropping(n_envs=1), dropping(n_envs=2)

    for pool, seeds in ((alone, [7]), (together, [5, 7])):
        pool.reset(seeds)
        pool.train_without_actions(2)

    assert differences(alone.envs[0].state_dict(), together.envs[1].state_dict()) == []


def test_a_host_with_dropout_resumes_bit_for_bit(played: HostPool) -> None:
    uninterrupted, resumed = dropping(), dropping()
    play(uninterrupted, ticks=TICKS)
    resumed.load_state_dict(played.state_dict())

    for pool in (uninterrupted, resumed):
        pool.train_without_actions(1)

    assert differences(uninterrupted.state_dict(), resumed.state_dict()) == []
