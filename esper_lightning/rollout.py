"""RolloutLoop: acts in the environments tick by tick and records what PPO learns from."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from esper_lightning.envs.vector import Ended, VectorEnv
from esper_lightning.growth.restoring import check_below, check_count, check_finite, check_like, check_parts
from esper_lightning.ppo.buffer import Experience, Rollout, RolloutBuffer
from esper_lightning.ppo.gae import explained_variance, gae, normalise
from esper_lightning.ppo.losses import PPOConfig
from esper_lightning.ppo.normalize import RunningMeanStd
from esper_lightning.tamiyo.policy import Policy, RecurrentState

TRAINING, EVALUATION = 0, 1


def episode_seeds(run_seed: int, purpose: int, episode: int, n_envs: int) -> list[int]:
    """Seeds of `n_envs` hosts: even for training, odd for evaluation, so that no evaluated host was ever trained on."""
    drawn = np.random.SeedSequence([run_seed, purpose, episode]).generate_state(n_envs, np.uint64)
    return [int(seed) >> 2 << 1 | purpose for seed in drawn]


def copied(record: Any) -> Any:
    """A record of tensors that does not change when the original does."""
    return type(record)(*(part.clone() for part in record))


class RolloutSummary(NamedTuple):
    """Of one rollout, before the policy learns from it."""

    returns: Tensor  # [N] undiscounted sum of rewards per environment
    explained_variance: float
    value_error: float
    """Root of the mean square of what the critic was wrong by, in units of the return."""
    advantage_spread: float
    """Deviation of advantages before they are normalised."""
    advantages: Tensor  # [T, N] normalised; not a number where there was nothing to decide


class RolloutLoop:
    """The acting half of PPO: one rollout is one episode of every host; other environments may go on.

    Args:
        pool: The environments.
        policy: Decides; its recurrent state is kept here, between ticks.
        observation_norm, value_norm: Frozen within a rollout; updated when it ends.
        config: Of PPO.
        run_seed: Decides which hosts are met, and the exploration.
        privileged_norm: Of what the critic alone sees, if it does.
    """

    def __init__(
        self,
        pool: VectorEnv,
        policy: Policy,
        observation_norm: nn.Module,
        value_norm: RunningMeanStd,
        config: PPOConfig,
        run_seed: int,
        privileged_norm: nn.Module | None = None,
    ) -> None:
        self.pool = pool
        self.policy = policy
        self.observation_norm = observation_norm
        self.value_norm = value_norm
        self.privileged_norm = (privileged_norm or nn.Identity()) if policy.asymmetric else None
        self.config = config
        self.run_seed = run_seed
        self.episode = 0
        self.ticks = 0  # since the run began: the x-axis of every plot
        self.generator = torch.Generator(pool.device).manual_seed(run_seed)  # exploration and minibatches
        self.buffer = RolloutBuffer(pool, policy, config.sequence)
        self.raw = torch.zeros(pool.horizon, *pool.observation.features.shape, device=pool.device)
        self.raw_privileged = torch.zeros_like(self.buffer.privileged) if policy.asymmetric else None
        # V of the states in which a time limit has ended an episode, where the next one began at once.
        self.beyond = torch.zeros_like(self.buffer.values) if pool.goes_on else None
        self.state = policy.initial_state(pool.n_envs)
        self.starts = torch.ones(pool.n_envs, dtype=torch.bool, device=pool.device)
        self.begun = False  # in this process: environments that go on are reset once
        self.last: Any = None  # step of this process: for whoever watches
        self.watchers: list[Callable[[], None]] = []  # called after every step

    def begin_rollout(self) -> None:
        """New hosts, and a recurrent state that knows nothing of them; environments that go on are left alone."""
        if not (self.begun and self.pool.goes_on):
            self.pool.reset(episode_seeds(self.run_seed, TRAINING, self.episode, self.pool.n_envs))
            self.state = self.policy.initial_state(self.pool.n_envs)
            self.starts.fill_(True)
            self.begun = True
        self.episode += 1
        self.buffer.clear(self.state)

    @torch.no_grad()
    def tick(self) -> Any:
        """One decision per environment, one step (a host epoch), and what came of it."""
        with self.pool.clock.measure("policy"):
            length = self.buffer.length
            # Copies: the step overwrites what the environments show.
            masks, privileged = copied(self.pool.masks), self._see_privileged(self.pool.privileged)
            seen, state = self._see(copied(self.pool.observation)), self.state
            privileged = None if privileged is None else privileged.clone()
            distribution, values, self.state = self.policy.step(seen, state, masks, self.starts, privileged)
            action = distribution.sample(self.generator)
            self.raw[length].copy_(self.pool.observation.features)
            if self.raw_privileged is not None:
                self.raw_privileged[length].copy_(self.pool.privileged)
        with torch.enable_grad():
            step = self.pool.step(action)
        with self.pool.clock.measure("policy"):
            self.buffer.add(
                Experience(
                    observation=seen,
                    masks=masks,
                    # What counts is what was done: the Governor may have refused a part of it.
                    action=step.action,
                    log_prob=distribution.log_prob(step.action),
                    values=values,
                    starts=self.starts,
                    state=state,
                    rewards=step.reward,
                    terminated=step.terminated,
                    truncated=step.truncated,
                    privileged=privileged,
                )
            )
            # Where an episode was cut the recurrent state must not leak into what follows.
            self.starts.copy_(step.terminated)
            if self.beyond is not None:
                self.starts.logical_or_(step.truncated)
                if step.ended is not None:
                    self.beyond[length].copy_(self._worth(step.ended))
        self.ticks += 1
        self.last = step
        for watch in self.watchers:
            watch()
        return step

    def _worth(self, ended: Ended) -> Tensor:  # [N]
        """V of states after the last action, with the recurrent state after it."""
        none_start = torch.zeros_like(self.starts)
        privileged = self._see_privileged(ended.privileged)
        return self.value_norm.inverse(
            self.policy.worth(self._see(ended.observation), self.state, none_start, privileged)
        )

    def _see(self, observation: Any) -> Any:
        """An observation as the policy is shown it, and as it is stored."""
        return observation._replace(features=self.observation_norm(observation.features))

    def _see_privileged(self, privileged: Tensor | None) -> Tensor | None:
        """The same of what the critic alone sees; None if it sees no more than the policy."""
        return None if self.privileged_norm is None else self.privileged_norm(privileged)

    @torch.no_grad()
    def finish_rollout(self) -> tuple[Rollout, RolloutSummary]:
        """Advantages and value targets of the full buffer; then the normalisers take it in, for the next rollout."""
        buffer, config = self.buffer, self.config
        assert buffer.length == buffer.ticks, "the rollout is not finished"
        # V of the state after the last action, with the recurrent state and the masks after it.
        privileged = self._see_privileged(self.pool.privileged)
        last_value = self.policy.worth(self._see(self.pool.observation), self.state, self.starts, privileged)
        values = self.value_norm.inverse(buffer.values)
        next_values = torch.cat([values[1:], self.value_norm.inverse(last_value)[None]])
        terminated, truncated = buffer.terminated, buffer.truncated
        if self.beyond is not None:
            next_values = torch.where(truncated, self.beyond, next_values)
        elif config.horizon_is_end:
            terminated = terminated | truncated
        advantages, returns = gae(
            buffer.rewards, values, next_values, terminated, truncated & ~terminated, config.gamma, config.gae_lambda
        )
        real = ~buffer.masks.ended  # after an end before the horizon nothing happens: there is nothing to learn
        explained = explained_variance(values[real], returns[real]).item()
        learned = ~buffer.masks.forced
        normalised = normalise(advantages, learned, config.advantage_floor)
        self.value_norm.update(returns[real])
        rollout = Rollout(
            observation=buffer.observation,
            masks=buffer.masks,
            action=buffer.action,
            log_prob=buffer.log_prob,
            values=buffer.values,
            starts=buffer.starts,
            state=buffer.state,
            advantages=normalised,
            targets=self.value_norm(returns),
            privileged=buffer.privileged,
        )
        if isinstance(self.observation_norm, RunningMeanStd):
            # The minibatches hold what the policy saw; the new statistics apply from the next rollout on.
            self.observation_norm.update(self.raw[real])
        if isinstance(self.privileged_norm, RunningMeanStd):
            self.privileged_norm.update(self.raw_privileged[real])
        if buffer.later is not None:
            rollout = rollout.cut(buffer.sequence, buffer.later)
        return rollout, RolloutSummary(
            returns=buffer.rewards.sum(0).cpu(),
            explained_variance=explained,
            value_error=(values - returns)[real].square().mean().sqrt().item(),
            advantage_spread=advantages[learned].std(correction=0).item() if learned.any() else 0.0,
            advantages=torch.where(learned, normalised, torch.nan),
        )

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
            **{name: part[: self.buffer.length].clone() for name, part in self._more().items()},
        }

    def _more(self) -> dict[str, Tensor]:
        """What only some environments and policies have."""
        more = {"raw_privileged": self.raw_privileged, "beyond": self.beyond}
        return {name: part for name, part in more.items() if part is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict` was taken; the tensors may come from another device.

        Raises ValueError if it is of another run, or damaged.
        """
        parts = ("episode", "ticks", "generator", "state", "starts", "buffer", "raw", *self._more())
        check_parts("the rollout", state, parts)
        self.episode, self.ticks = check_count("episode", state["episode"]), check_count("ticks", state["ticks"])
        generator = check_like("the generator's state", state["generator"].cpu(), self.generator.get_state())
        self.generator.set_state(generator.clone())
        parts = zip(RecurrentState._fields, state["state"], self.state, strict=True)
        self.state = RecurrentState(*(check_like(name, part, ours).to(ours.device) for name, part, ours in parts))
        self.starts.copy_(check_like("starts", state["starts"], self.starts))
        self.buffer.load_state_dict(state["buffer"])
        length = self.buffer.length
        self.raw[:length].copy_(check_like("the observed features", state["raw"], self.raw[:length]))
        for name, part in self._more().items():
            part[:length].copy_(check_like(name, state[name], part[:length]))
        for tensor in (*self.state, self.raw[:length], *(part[:length] for part in self._more().values())):
            check_finite("the rollout", tensor)
        for head, choices in self.pool.space.heads_of(self.buffer.action):
            check_below("an action", head[:length], choices)
        for part in self.buffer.observation[1:]:
            check_below("what was seen", part[:length], self.pool.categories)
        finished = {self.episode - 1, self.episode} if length == 0 else {self.episode - 1}  # it may have yet to begin
        if self.ticks not in {rollouts * self.buffer.ticks + length for rollouts in finished}:
            raise ValueError(
                f"the rollout is at tick {length}, but {self.ticks} ticks and {self.episode} rollouts began"
            )
