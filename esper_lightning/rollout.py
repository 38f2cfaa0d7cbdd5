"""RolloutLoop: acts in the pool tick by tick and records what PPO learns from."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from esper_lightning.envs import HostPool, Observation, StepResult
from esper_lightning.growth.restoring import check_below, check_count, check_finite, check_like, check_parts
from esper_lightning.ppo.buffer import Rollout, RolloutBuffer
from esper_lightning.ppo.gae import explained_variance, gae, normalise
from esper_lightning.ppo.losses import PPOConfig
from esper_lightning.ppo.normalize import RunningMeanStd
from esper_lightning.tamiyo.policy import Policy, RecurrentState

TRAINING, EVALUATION = 0, 1


def episode_seeds(run_seed: int, purpose: int, episode: int, n_envs: int) -> list[int]:
    """Seeds of `n_envs` hosts: even for training, odd for evaluation, so that no evaluated host was ever trained on."""
    drawn = np.random.SeedSequence([run_seed, purpose, episode]).generate_state(n_envs, np.uint64)
    return [int(seed) >> 2 << 1 | purpose for seed in drawn]


class RolloutSummary(NamedTuple):
    """Of one rollout, before the policy learns from it."""

    returns: Tensor  # [N] undiscounted sum of rewards per environment
    explained_variance: float


class RolloutLoop:
    """The acting half of PPO: one rollout is one episode of every host.

    Args:
        pool: The environments.
        policy: Decides; its recurrent state is kept here, between ticks.
        observation_norm, value_norm: Frozen within a rollout; updated when it ends.
        config: Of PPO.
        run_seed: Decides which hosts are met, and the exploration.
    """

    def __init__(
        self,
        pool: HostPool,
        policy: Policy,
        observation_norm: nn.Module,
        value_norm: RunningMeanStd,
        config: PPOConfig,
        run_seed: int,
    ) -> None:
        self.pool = pool
        self.policy = policy
        self.observation_norm = observation_norm
        self.value_norm = value_norm
        self.config = config
        self.run_seed = run_seed
        self.episode = 0
        self.ticks = 0  # since the run began: the x-axis of every plot
        self.generator = torch.Generator(pool.device).manual_seed(run_seed)  # exploration and minibatches
        self.buffer = RolloutBuffer(pool.config.horizon, pool.observation, pool.masks, policy.width)
        self.raw = torch.zeros(pool.config.horizon, *pool.observation.features.shape, device=pool.device)
        self.state = policy.initial_state(pool.n_envs)
        self.starts = torch.ones(pool.n_envs, dtype=torch.bool, device=pool.device)
        self.last: StepResult | None = None  # of this process: for whoever watches

    def begin_rollout(self) -> None:
        """New hosts, and a recurrent state that knows nothing of them."""
        self.pool.reset(episode_seeds(self.run_seed, TRAINING, self.episode, self.pool.n_envs))
        self.episode += 1
        self.state = self.policy.initial_state(self.pool.n_envs)
        self.starts.fill_(True)
        self.buffer.clear(self.state)

    @torch.no_grad()
    def tick(self) -> StepResult:
        """One decision per host, one host epoch, and what came of it."""
        with self.pool.clock.measure("policy"):
            seen = self._see()
            distribution, values, self.state = self.policy.step(seen, self.state, self.pool.masks, self.starts)
            action = distribution.sample(self.generator)
            self.raw[self.buffer.length].copy_(self.pool.observation.features)
            self.buffer.add_sight(seen, self.pool.masks, values, self.starts)
        with torch.enable_grad():
            step = self.pool.step(action)
        with self.pool.clock.measure("policy"):
            # What counts is what was done: the Governor may have refused a part of it.
            self.buffer.add_decision(step.action, distribution.log_prob(step.action))
            # Where an episode was cut the recurrent state must not leak into what follows.
            self.starts.copy_(step.terminated)
            self.buffer.add_outcome(step.reward, step.terminated, step.truncated)
        self.ticks += 1
        self.last = step
        return step

    def _see(self) -> Observation:
        """The pool's observation as the policy is shown it, and as it is stored."""
        return Observation(self.observation_norm(self.pool.observation.features), self.pool.observation.blueprints)

    @torch.no_grad()
    def finish_rollout(self) -> tuple[Rollout, RolloutSummary]:
        """Advantages and value targets of the full buffer; then the normalisers take it in, for the next rollout."""
        buffer, config = self.buffer, self.config
        assert buffer.length == buffer.ticks, "the rollout is not finished"
        # V of the state after the last action, with the recurrent state and the masks after it.
        _, last_value, _ = self.policy.step(self._see(), self.state, self.pool.masks, self.starts)
        values = self.value_norm.inverse(buffer.values)
        next_values = torch.cat([values[1:], self.value_norm.inverse(last_value)[None]])
        at_horizon = buffer.truncated
        terminated = buffer.terminated | at_horizon if config.horizon_is_end else buffer.terminated
        advantages, returns = gae(
            buffer.rewards, values, next_values, terminated, at_horizon & ~terminated, config.gamma, config.gae_lambda
        )
        real = ~buffer.masks.ended  # after an end before the horizon nothing happens: there is nothing to learn
        explained = explained_variance(values[real], returns[real]).item()
        self.value_norm.update(returns[real])
        rollout = Rollout(
            observation=buffer.observation,
            masks=buffer.masks,
            action=buffer.action,
            log_prob=buffer.log_prob,
            values=buffer.values,
            starts=buffer.starts,
            state=buffer.state,
            advantages=normalise(advantages, ~buffer.masks.forced, config.advantage_floor),
            targets=self.value_norm(returns),
        )
        if isinstance(self.observation_norm, RunningMeanStd):
            # The minibatches hold what the policy saw; the new statistics apply from the next rollout on.
            self.observation_norm.update(self.raw[real])
        return rollout, RolloutSummary(buffer.rewards.sum(0).cpu(), explained)

    def state_dict(self) -> dict[str, Any]:
        """Everything between the module's weights and the pool: types that `weights_only=True` accepts."""
        return {
            "episode": self.episode,
            "ticks": self.ticks,
            "generator": self.generator.get_state(),
            "state": [part.clone() for part in self.state],
            "starts": self.starts.clone(),
            "buffer": self.buffer.state_dict(),
            "raw": self.raw[: self.buffer.length].clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict` was taken; the tensors may come from another device.

        Raises ValueError if it is of another run, or damaged.
        """
        check_parts("the rollout", state, ("episode", "ticks", "generator", "state", "starts", "buffer", "raw"))
        self.episode, self.ticks = check_count("episode", state["episode"]), check_count("ticks", state["ticks"])
        generator = check_like("the generator's state", state["generator"].cpu(), self.generator.get_state())
        self.generator.set_state(generator.clone())
        parts = zip(RecurrentState._fields, state["state"], self.state, strict=True)
        self.state = RecurrentState(*(check_like(name, part, ours).to(ours.device) for name, part, ours in parts))
        self.starts.copy_(check_like("starts", state["starts"], self.starts))
        self.buffer.load_state_dict(state["buffer"])
        length = self.buffer.length
        self.raw[:length].copy_(check_like("the observed features", state["raw"], self.raw[:length]))
        for tensor in (*self.state, self.raw[:length]):
            check_finite("the rollout", tensor)
        for head, choices in zip(self.buffer.action, self.pool.space.sizes.values(), strict=True):
            check_below("an action", head[:length], choices)
        check_below("a blueprint", self.buffer.observation.blueprints[:length], self.pool.space.sizes["blueprint"] + 1)
        finished = {self.episode - 1, self.episode} if length == 0 else {self.episode - 1}  # it may have yet to begin
        if self.ticks not in {rollouts * self.buffer.ticks + length for rollouts in finished}:
            raise ValueError(
                f"the rollout is at tick {length}, but {self.ticks} ticks and {self.episode} rollouts began"
            )
