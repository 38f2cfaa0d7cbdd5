"""The compiled loss of an update is the uncompiled one."""

from collections.abc import Callable

import pytest
import torch

from esper_lightning.module import TamiyoModule
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.compiled_terms import CompiledTerms
from esper_lightning.ppo.losses import PPOConfig, PPOTerms, ppo_terms


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_compiled_loss_and_its_gradient_are_those_of_the_uncompiled(
    make_loop: Callable[..., RolloutCollector], play_rollout: Callable[[RolloutCollector], None], backend: str
) -> None:
    """Minibatches of two sizes, whose steps are far from the policy that acted."""
    loop = make_loop(5)
    play_rollout(loop)
    rollout, _ = loop.finish()
    rollout = rollout._replace(log_prob=rollout.log_prob - 0.1)
    config = PPOConfig(log_ratio_clamp=0.3, entropy_floors={"op": 1.0}, entropy_weights={"slot": 2.0}, value_clip=0.1)
    compiled = CompiledTerms(backend)

    def learned(
        terms_of: Callable[..., PPOTerms], envs: list[int]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        loop.policy.zero_grad()
        terms = terms_of(loop.policy, rollout.select_envs(torch.tensor(envs)), config)
        terms.total(0.5, 0.1).backward()
        return [term.detach() for term in terms], [parameter.grad for parameter in loop.policy.parameters()]

    for envs in ([0, 1, 2], [3, 4]):
        ours, theirs = learned(compiled, envs), learned(ppo_terms, envs)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, equal_nan=True)
        assert any(gradient is not None and gradient.any() for gradient in ours[1])


def test_a_backend_that_there_is_not_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^ppo\.compile: Invalid backend: 'nonsense'.*leave ppo\.compile out$"):
        TamiyoModule(ppo=PPOConfig(compile="nonsense"))


@pytest.mark.slow
def test_a_loss_that_cannot_be_compiled_is_refused_in_one_line(
    make_loop: Callable[..., RolloutCollector], play_rollout: Callable[[RolloutCollector], None]
) -> None:
    def fails(graph: object, example_inputs: object) -> None:
        raise RuntimeError("no C++ compiler\n\nwas found")

    loop = make_loop(2)
    play_rollout(loop)

    with pytest.raises(ValueError, match=r"^ppo\.compile: .*no C\+\+ compiler; mend that, or leave ppo\.compile out$"):
        CompiledTerms(fails)(loop.policy, loop.finish()[0], PPOConfig())
