"""Rows F of the findings: what was wrong in an earlier implementation, and is right here."""

import ast
import io
import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.data import HostPoolData
from esper_lightning.envs import HEADS, Action, EnvConfig, HostPool, Observation, Op, StepResult
from esper_lightning.envs.training import HostTraining
from esper_lightning.growth.gradients import NO_GRADIENT, GradientStats, gradient_stats
from esper_lightning.growth.network import slots_of
from esper_lightning.growth.optimizer import find_group
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from esper_lightning.ppo.losses import PPOConfig, ppo_terms
from esper_lightning.rollout import RolloutLoop
from esper_lightning.tamiyo.heads import FactoredDistribution, uniform
from esper_lightning.tamiyo.policy import Policy
from esper_lightning.tasks import Digits
from esper_lightning.telemetry.metrics import skipped_metrics
from tests.conftest import FREE
from tests.decisions import WAIT, Row, act, advance, cull, fossilize, germinate, set_alpha
from tests.runs import ROOT, differences, fit, load, only_run, tiny_host

MakeLoop = Callable[..., RolloutLoop]
MakePool = Callable[..., HostPool]
Play = Callable[[RolloutLoop], None]

SOURCES = [path for folder in ("esper_lightning", "callbacks", "benchmarks") for path in (ROOT / folder).rglob("*.py")]


def total_norm(gradients: list[Tensor]) -> float:
    return nn.utils.get_total_norm(gradients).item()


def test_f3_what_is_stored_is_what_was_seen(make_loop: MakeLoop, play_rollout: Play) -> None:
    """F3: the buffer holds the normalised observation that was acted upon; the first ratio is 1."""
    loop = make_loop(3)
    play_rollout(loop)
    loop.finish_rollout()  # from now on normalised and raw features differ
    loop.begin_rollout()
    for t in range(loop.buffer.ticks):
        raw = loop.pool.observation.features.clone()
        loop.tick()
        assert torch.equal(loop.buffer.observation.features[t], loop.observation_norm(raw))
        assert not torch.equal(loop.buffer.observation.features[t], raw)
    rollout, _ = loop.finish_rollout()

    assert ppo_terms(loop.policy, rollout, PPOConfig()).ratio_error < 1e-5


def test_f4_host_and_seeds_skip_a_step_together(make_pool: MakePool) -> None:
    """F4: if one gradient of a host or its seeds leaves fp16's range, none of them steps, and that host counts it."""
    pool = make_pool(2, training=HostTraining(batches=1, precision="fp16"))
    pool.step(act(germinate(0, 1), germinate(0, 1)))
    seed = pool.envs[0].slots[0].seed
    next(seed.parameters()).register_hook(lambda gradient: gradient * math.inf)
    counted = [env.skipped_steps for env in pool.envs]
    before = [[p.clone() for p in env.network.parameters()] for env in pool.envs]
    pool.step(act(WAIT, WAIT))

    stood = [
        [torch.equal(p, then) for p, then in zip(env.network.parameters(), weights, strict=True)]
        for env, weights in zip(pool.envs, before, strict=True)
    ]
    assert all(stood[0]) and not any(stood[1])
    assert [env.skipped_steps for env in pool.envs] == [counted[0] + 1, counted[1]]
    assert skipped_metrics(pool.envs) == {
        "hosts/skipped_steps": sum(counted) + 1,
        "skipped_steps/host0": counted[0] + 1,
        "skipped_steps/host1": counted[1],
    }


def test_f6_a_rollout_resumes_at_every_tick(make_loop: MakeLoop) -> None:
    """F6: hidden state, rollout in flight and random numbers are saved; what follows is bit-identical at every tick."""
    loop, resumed = make_loop(2), make_loop(2)
    loop.begin_rollout()
    for _ in range(loop.pool.config.horizon):
        torch.save([loop.state_dict(), loop.pool.state_dict()], file := io.BytesIO())
        file.seek(0)
        states = torch.load(file, map_location="cpu", weights_only=True)
        for part, state in zip((resumed, resumed.pool), states, strict=True):
            part.load_state_dict(state)
        loop.tick()
        resumed.tick()

        assert loop.state.hidden.any()
        assert differences(loop.state_dict(), resumed.state_dict()) == []
        assert differences(loop.pool.state_dict(), resumed.pool.state_dict()) == []


def test_f7_a_checkpoint_holds_all_statistics_of_the_normalisers(tmp_path: Path) -> None:
    """F7: mean, variance and count of both normalisers are buffers of the module, and so in its checkpoint."""
    built = fit(tmp_path, "--trainer.max_epochs", "1")
    saved = load(only_run(tmp_path).latest)["state_dict"]

    for name in ("observation_norm", "value_norm"):
        norm = getattr(built.model, name)
        assert {part for part, _ in norm.named_buffers()} == {"mean", "var", "count"}
        for part, value in norm.named_buffers():
            assert torch.equal(saved[f"{name}.{part}"], value)
        assert saved[f"{name}.count"] == 2 * 5  # hosts times ticks


def test_f8_seeds_are_clipped_each_for_itself(make_pool: MakePool) -> None:
    """F8: at every optimizer step the gradient of each group, host or seed, is within the limit."""
    largest: dict[float | None, float] = {}
    for limit in (1e-2, None):
        pool = make_pool(1, training=HostTraining(batches=3, max_grad_norm=limit))
        optimizer, norms = pool.envs[0].optimizer, []

        def watch(optimizer: torch.optim.Optimizer, *_: object, norms: list[float] = norms) -> None:
            norms += [total_norm([p.grad for p in group["params"]]) for group in optimizer.param_groups]

        optimizer.register_step_pre_hook(watch)
        pool.step(act(germinate(1, 1)))
        assert len(norms) == 2 * 3  # host and seed, three batches
        largest[limit] = max(norms)

    assert largest[1e-2] <= 1e-2 * (1 + 1e-4)
    assert largest[None] > 1e-1


def test_f10_an_end_in_mid_rollout_cuts_one_environment(
    make_loop: MakeLoop, play_rollout: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F10: what ends one environment leaves the others, and its own earlier transitions, bit for bit as they were."""
    whole, cut = (make_loop(3, gamma=1.0, gae_lambda=1.0) for _ in range(2))
    real = cut.pool.step

    def ends_host_1_at_tick_2(action: Action) -> StepResult:
        return real(action)._replace(terminated=torch.tensor([False, cut.buffer.length == 2, False]))

    monkeypatch.setattr(cut.pool, "step", ends_host_1_at_tick_2)
    returns = []
    for loop in (whole, cut):
        play_rollout(loop)
        returns.append(loop.value_norm.inverse(loop.finish_rollout()[0].targets))

    for theirs, ours in zip(whole.buffer.state_dict()["ticks"], cut.buffer.state_dict()["ticks"], strict=True):
        assert torch.equal(theirs[:, [0, 2]], ours[:, [0, 2]])
        assert torch.equal(theirs[:2, 1], ours[:2, 1])
    assert cut.buffer.starts[:, 1].tolist() == [True, False, False, True, False, False]
    torch.testing.assert_close(returns[0][:, [0, 2]], returns[1][:, [0, 2]], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(returns[1][0, 1], cut.buffer.rewards[:3, 1].sum(), rtol=1e-4, atol=1e-5)


def test_f11_the_bootstrap_is_the_value_after_the_last_action(make_loop: MakeLoop, play_rollout: Play) -> None:
    """F11: the last return is reward + V(s_T), with V found by one pass over the whole sequence and s_T behind it."""
    loop = make_loop(2, horizon_is_end=False, gamma=1.0, gae_lambda=0.0)
    with torch.no_grad():
        loop.policy.value[-1].weight.mul_(20.0)  # so that values differ from tick to tick
    play_rollout(loop)
    buffer = loop.buffer
    after = Observation(loop.observation_norm(loop.pool.observation.features), loop.pool.observation.blueprints)
    longer = [
        type(past)(*(torch.cat([p, n[None]]) for p, n in zip(past, now, strict=True)))
        for past, now in ((buffer.observation, after), (buffer.masks, loop.pool.masks))
    ]
    starts = torch.cat([buffer.starts, torch.zeros(1, 2, dtype=torch.bool)])
    with torch.no_grad():
        _, values, _ = loop.policy(longer[0], buffer.state, longer[1], starts)
    rollout, _ = loop.finish_rollout()

    assert (values[-1] - values[-2]).abs().min() > 1e-3
    last = loop.value_norm.inverse(rollout.targets)[-1]
    torch.testing.assert_close(last, buffer.rewards[-1] + values[-1], rtol=1e-4, atol=1e-4)


def test_f12_the_value_clip_has_its_own_range(make_loop: MakeLoop, play_rollout: Play) -> None:
    """F12: off by default; the policy's clip never touches the value loss, nor the value's clip the policy's."""
    loop = make_loop(3)
    play_rollout(loop)
    rollout, _ = loop.finish_rollout()
    with torch.no_grad():
        loop.policy.value[-1].bias.add_(1.0)  # values have moved since the rollout
        loop.policy.heads.tables["op"].output.bias.add_(torch.tensor([2.0, 0.0, 0.0, 0.0]))  # and so have the ratios

    def losses(**changes: float) -> tuple[float, float]:
        terms = ppo_terms(loop.policy, rollout, PPOConfig(**changes))
        return terms.policy.item(), terms.value.item()

    free, narrow, value_clipped = losses(), losses(clip=1e-3), losses(value_clip=1e-3)
    assert narrow[0] != free[0] and narrow[1] == free[1]
    assert value_clipped[0] == free[0] and value_clipped[1] > free[1]


def test_f13_norm_and_rms_are_global_each_named_and_defined_for_nothing() -> None:
    """F13: norm and RMS are over all numbers at once, each by its name; what has no gradients has a defined answer."""
    three, four = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 7))

    def stats(parameters: list[nn.Parameter]) -> GradientStats:
        return GradientStats(*gradient_stats(parameters).tolist())

    assert stats([]) == NO_GRADIENT == GradientStats(norm=0.0, rms=0.0, vanished=0.0, exploded=0.0)
    assert stats([three, four]) == NO_GRADIENT._replace(vanished=1.0)
    three.grad, four.grad = torch.tensor([3.0, 0.0]), torch.zeros(2, 7)
    four.grad[1, 3] = 4.0

    both = stats([three, four])
    assert both == GradientStats(norm=5.0, rms=5.0 / math.sqrt(2 + 14), vanished=0.0, exploded=0.0)
    assert stats([four]).rms == pytest.approx(math.sqrt(four.grad.square().mean().item()))
    assert both.norm == total_norm([three.grad, four.grad])


def test_f15_one_measure_serves_images_and_sequences() -> None:
    """F15: loss and accuracy per sample for targets [B] and [B, T], on the outputs' device and in their dtype."""
    chances = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [0.7, 0.2, 0.1]]).double()
    targets = torch.tensor([0, 1, 2, 2])
    task = Digits()
    images = task.measure(chances.log(), targets)
    sequences = task.measure(chances.log().view(2, 2, 3), targets.view(2, 2))

    torch.testing.assert_close(images.loss, -torch.tensor([0.5, 0.8, 0.6, 0.1]).double().log(), rtol=0, atol=1e-7)
    assert images.correct.tolist() == [1, 1, 1, 0]
    torch.testing.assert_close(sequences.loss, images.loss.view(2, 2).mean(1))
    assert sequences.correct.tolist() == [1, 0.5]
    assert {measure.dtype for measure in (*images, *sequences)} == {torch.float64}


def test_f16_duplicate_slots_are_caught_everywhere_with_one_message() -> None:
    """F16: a host asked for one slot twice and a network that holds two of one name say the same."""
    message = "^slot 'block1' is named twice; name each slot once$"
    with pytest.raises(ValueError, match=message):
        CNN((1, 8, 8), 10, slots=["block1", "block2", "block1"])
    network = nn.Sequential(SeedSlot("block1", "image", 4), SeedSlot("block1", "image", 4))
    with pytest.raises(ValueError, match=message):
        slots_of(network)


def test_f17_the_configured_batch_size_runs(make_pool: MakePool) -> None:
    """F17: a host's training batches are as many and as large as configured."""
    pool = make_pool(1, training=HostTraining(batch_size=7, batches=3))
    rows: list[int] = []

    def watch(network: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if network.training:
            rows.append(len(inputs[0]))

    pool.envs[0].network.register_forward_pre_hook(watch)
    pool.step(act(WAIT))

    assert rows == [7, 7, 7]


def test_f18_nothing_to_do_is_refused_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """F18: horizon, environments, epochs and rollouts must be positive."""
    with pytest.raises(ValueError, match="horizon must be at least 1"):
        EnvConfig(horizon=0)
    with pytest.raises(ValueError, match="n_envs must be at least 1"):
        HostPoolData(Digits(), tiny_host, n_envs=0)
    with pytest.raises(ValueError, match=r"ppo\.epochs must be at least 1"):
        PPOConfig(epochs=0)
    with pytest.raises(SystemExit):
        fit(tmp_path, "--trainer.max_epochs", "0")
    assert "trainer.max_epochs must be at least 1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def swallowing(code: ast.AST) -> list[int]:
    """Lines of handlers that catch everything or do nothing."""
    broad = {"Exception", "BaseException"}
    return [
        node.lineno
        for node in ast.walk(code)
        if isinstance(node, ast.ExceptHandler)
        and (
            node.type is None
            or broad & {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)}
            or all(isinstance(line, ast.Pass) for line in node.body)
        )
    ]


def test_f19_no_broad_except() -> None:
    """F19: nothing catches every error, or catches one to say nothing."""
    lines = "try:\n    f()\nexcept (KeyError, Exception):\n    g()\nexcept A:\n    pass\nexcept:\n    g()\n"
    assert swallowing(ast.parse(lines)) == [3, 5, 7], "the check below sees them"
    assert len(SOURCES) > 40
    assert {path.name: lines for path in SOURCES if (lines := swallowing(ast.parse(path.read_text())))} == {}


def test_f20_a_group_can_be_collected_twice(make_pool: MakePool) -> None:
    """F20: parameters of a group are lists: what is asked of them twice is answered twice."""
    pool = make_pool(1)
    pool.step(act(germinate(0, 1)))
    for name in ("host", "seed.block1.pool"):
        parameters = find_group(pool.envs[0].optimizer, name)["params"]
        first, second = gradient_stats(parameters), gradient_stats(parameters)
        assert first[0] > 0
        assert torch.equal(first, second)


def test_f21_a_seed_that_begins_to_blend_keeps_its_momentum(make_pool: MakePool) -> None:
    """F21: TRAINING → BLENDING leaves the seed's momentum buffers where and what they are."""
    pool = make_pool(1, training=HostTraining(optimizer="sgd", batches=2, momentum=0.9))
    env, slot = pool.envs[0], pool.envs[0].slots[0]
    learned: list[Tensor] = []

    def momenta() -> list[Tensor]:
        return [env.optimizer.state[p]["momentum_buffer"] for p in slot.seed.parameters()]

    def remember(*_: object) -> None:
        learned[:] = [momentum.clone() for momentum in momenta()]

    pool.step(act(germinate(0, 1)))
    assert slot.stage is Stage.TRAINING
    before = momenta()
    env.optimizer.register_step_post_hook(remember)
    pool.step(act(WAIT))

    assert slot.stage is Stage.BLENDING
    assert all(now is then for now, then in zip(momenta(), before, strict=True))
    assert all(now.any() and torch.equal(now, then) for now, then in zip(momenta(), learned, strict=True))


def test_f21_to_forget_momentum_is_a_choice_and_costs_something(make_pool: MakePool) -> None:
    """F21: by default the host's momentum outlives a germination; `carry_over: false` is the ablation that drops it."""
    after: dict[bool, list[Tensor]] = {}
    for carry_over in (True, False):
        pool = make_pool(1, training=HostTraining(batches=2, carry_over=carry_over))
        env, host = pool.envs[0], pool.envs[0].optimizer.param_groups[0]["params"]
        pool.step(act(WAIT))
        before = [env.optimizer.state[p]["exp_avg"].clone() for p in host]
        env.apply(germinate(0, 1))
        kept = all(torch.equal(env.optimizer.state[p]["exp_avg"], then) for p, then in zip(host, before, strict=True))
        assert kept is carry_over
        pool.executor.train_epoch(pool.envs, pool.data.train)
        after[carry_over] = [p.detach().clone() for p in host]

    assert HostTraining().carry_over
    assert not any(torch.equal(ours, theirs) for ours, theirs in zip(after[True], after[False], strict=True))


def test_f22_impossible_actions_are_never_drawn_and_never_carried_out(
    make_pool: MakePool, make_policy: Callable[..., Policy]
) -> None:
    """F22: whatever is sampled is possible; what is impossible raises and changes no host."""
    pool = make_pool(2)
    pool.step(act(germinate(0, 1), WAIT))
    policy, generator = make_policy(pool), torch.Generator().manual_seed(0)
    distribution, _, _ = policy.step(pool.observation, policy.initial_state(2), pool.masks, torch.zeros(2) > 0)
    ops = set()
    for _ in range(200):
        action = distribution.sample(generator)
        rows = zip(*(head.tolist() for head in action), strict=True)
        assert all(pool.masks.allow(i, row) for i, row in enumerate(rows))
        ops |= set(action.op.tolist())
    assert ops == {Op.WAIT, Op.GERMINATE, Op.CULL}

    before = deepcopy(pool.state_dict())
    with pytest.raises(ValueError, match=r"host 1: FOSSILIZE block2\.pool is masked"):
        pool.step(act(WAIT, fossilize(1)))
    assert differences(before, pool.state_dict()) == []


@pytest.mark.parametrize(
    ("row", "reached"),
    [
        (WAIT, ["op"]),
        (germinate(0), ["op", "slot", "blueprint", "style", "tempo"]),
        (cull(0), ["op", "slot", "speed"]),
        (cull(0, speed=1), ["op", "slot", "speed", "curve"]),
        (fossilize(0), ["op", "slot"]),
        (advance(0), ["op", "slot"]),
        (set_alpha(0, target=1), ["op", "slot", "target", "speed"]),
        (set_alpha(0, target=1, speed=2), ["op", "slot", "target", "speed", "curve"]),
    ],
)
def test_f23_only_heads_that_matter_get_a_gradient(make_pool: MakePool, row: Row, reached: list[str]) -> None:
    """F23: the log-probability of an op reaches the heads that have an effect on it, and no other."""
    pool = make_pool(1, **FREE)
    masks = pool.masks
    everything = masks._replace(**{name: torch.ones_like(getattr(masks, name)) for name in ("slot", "target", "speed")})
    logits = {head: table.requires_grad_() for head, table in uniform(pool.space.sizes, 1).items()}
    FactoredDistribution(logits, everything).log_prob(act(row)).sum().backward()

    assert [head for head in HEADS if logits[head].grad.any()] == reached
