"""Hosts in training as environments of Gymnasium: one host, or N hosts that are trained together."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from matplotlib.backends.backend_agg import FigureCanvasAgg

from esper_lightning.envs import HostPool
from esper_lightning.envs.host_pool import WAIT_ACTION
from esper_lightning.envs.seeding import TRAINING, draw_rng_seed
from esper_lightning.envs.spaces.actions import to_action
from esper_lightning.gym.spaces import (
    flatten_masks,
    flatten_observation,
    make_action_space,
    make_observation_space,
    observation_names,
)
from esper_lightning.ranks import ALONE
from esper_lightning.telemetry.figures import growth_timeline, set_margins
from esper_lightning.telemetry.hosts import join, observe
from esper_lightning.telemetry.observer import Trace

METADATA: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 2}
VECTOR_METADATA = METADATA | {"autoreset_mode": AutoresetMode.SAME_STEP}

CONDITIONAL_MASKS = ("slot", "blueprint")
"""Fields of `Masks` that the info contains: what a head offers under each choice of the earlier heads."""


class HostStep(NamedTuple):
    """Result of a step of N hosts."""

    reward: np.ndarray  # [N] float64
    terminated: np.ndarray  # [N] bool: rolled back, or at the horizon where it is the end
    truncated: np.ndarray  # [N] bool: at the horizon where it is a time limit
    infos: list[dict[str, Any]]  # [N]


class GymHosts:
    """N hosts with arrays in and out, for `GrowthEnv` and `GrowthVectorEnv`.

    Args:
        pool: The hosts.
        render_mode: `rgb_array` to record what `draw` shows. None: nothing is recorded.
    """

    def __init__(self, pool: HostPool, render_mode: str | None) -> None:
        if render_mode not in (None, *METADATA["render_modes"]):
            raise ValueError(f"render_mode must be rgb_array or None, got {render_mode!r}")
        self.pool = pool
        self.action_space = make_action_space(pool.space)
        self.observation_space = make_observation_space(len(self.names))
        self.traces = None if render_mode is None else [self._make_trace() for _ in pool.envs]

    def _make_trace(self) -> Trace:
        return Trace(self.pool.horizon, 1, len(self.pool.space.slot))

    @property
    def names(self) -> list[str]:
        """Name of each number of an observation."""
        return observation_names(self.pool)

    def begin(self, hosts: Sequence[int], generators: Sequence[np.random.Generator]) -> None:
        """Start an episode of these hosts, whose RNG seed is drawn from the generator of each."""
        self.pool.reset_hosts(hosts, [draw_rng_seed(generator, TRAINING) for generator in generators])
        if self.traces is not None:
            for i in hosts:
                self.traces[i] = self._make_trace()

    def observe(self) -> np.ndarray:  # [N, observation]
        """Return the observation of each host, in new storage."""
        return flatten_observation(self.pool)

    def action_masks(self) -> np.ndarray:  # [N, sum of choices] bool
        """Return the possible choices of each host, the heads one after the other; see `choice_masks`."""
        return flatten_masks(self.pool.masks_on_cpu, self.pool.space)

    def infos(self) -> list[dict[str, Any]]:
        """Return the info of each host, in new storage."""
        found = []
        for i, (env, mask) in enumerate(zip(self.pool.envs, self.action_masks(), strict=True)):
            conditional = {name: getattr(self.pool.masks_on_cpu, name)[i].numpy().copy() for name in CONDITIONAL_MASKS}
            found.append(
                {
                    "action_mask": mask,
                    "masks": conditional,
                    "accuracy": env.update_objective().accuracy,
                    "objective": env.objective,
                    "parameters": env.fossilized_parameters,
                    "rng_seed": env.rng_seed,
                }
            )
        return found

    def step(self, actions: np.ndarray) -> HostStep:
        """Train every host for one epoch. An action [heads] that is not possible is executed as WAIT.

        Raises ValueError if an action is not in the action space.
        """
        if len(actions) != self.pool.n_envs:
            raise ValueError(f"step got {len(actions)} actions for {self.pool.n_envs} environments; give one for each")
        for action in actions:
            if not self.action_space.contains(action):
                raise ValueError(
                    f"{action!r} is no action; an action is one number for each head of {self.action_space}"
                )
        masks, rows = self.pool.masks_on_cpu, actions.tolist()
        possible = [masks.allows(i, row) for i, row in enumerate(rows)]
        executed = [row if allowed else WAIT_ACTION for row, allowed in zip(rows, possible, strict=True)]
        step = self.pool.step(to_action(executed, self.pool.device))
        verdicts = {verdict.host: verdict for verdict in step.verdicts}
        if self.traces is not None:
            seen = join([observe(self.pool, step, 0)], ALONE)
            for i, trace in enumerate(self.traces):
                trace.update(self.pool.envs[i].tick, seen.hosts[i : i + 1], seen.slots[i : i + 1])
        infos = self.infos()
        for i, info in enumerate(infos):
            info["action_possible"] = possible[i]
            info["verdict"] = str(verdicts[i]) if i in verdicts else ""
        rolled_back, at_horizon = (flags.cpu().numpy().copy() for flags in (step.terminated, step.truncated))
        terminated = rolled_back | at_horizon if self.pool.config.reward.horizon_is_end else rolled_back
        return HostStep(
            reward=step.metrics.reward.double().numpy(),
            terminated=terminated,
            truncated=at_horizon & ~terminated,
            infos=infos,
        )

    def draw(self) -> list[np.ndarray] | None:  # [N] of [height, width, 3] uint8
        """Return the timeline of each host's episode so far, with room for all its ticks. None: it is not recorded."""
        if self.traces is None:
            return None
        return [draw_timeline(trace, self.pool.space.slot) for trace in self.traces]


def draw_timeline(trace: Trace, slots: Sequence[str]) -> np.ndarray:  # [height, width, 3] uint8
    """Draw the timeline of one host as an image whose size depends on horizon and number of slots alone."""
    ticks, horizon = trace.length, len(trace.op)
    trace.length = horizon  # the rest of the episode is shown as empty slots
    figure = growth_timeline(trace, slots)
    trace.length = ticks
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.5)
    set_margins(figure, bottom=1.05, top=0.6)
    for panel in figure.axes:  # a single host needs no axis of hosts
        panel.set_yticks([])
        panel.set_ylabel("")
    figure.suptitle(f"tick {ticks} of {horizon}", fontsize=10)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def check_options(options: Mapping[str, Any] | None) -> None:
    """Raise ValueError if there are options of a reset."""
    if options:
        raise ValueError(f"reset takes no options, got {', '.join(map(str, options))}; leave them out")


class GrowthEnv(gymnasium.Env[np.ndarray, np.ndarray]):
    """One host in training. A step is one host epoch; the reward is the change of the host's objective by default.

    An action that the masks forbid is executed as WAIT. The RNG seed of an episode is drawn from the environment's
    generator; no comparison of this project evaluates these hosts.

    Args:
        pool: Pool of one host.
        render_mode: `rgb_array` to render the timeline of the episode. None: no rendering.
    """

    metadata: dict[str, Any] = METADATA

    def __init__(self, pool: HostPool, render_mode: str | None = None) -> None:
        if pool.n_envs != 1:
            raise ValueError(f"GrowthEnv takes a pool of 1 host, got {pool.n_envs}; use GrowthVectorEnv")
        self.hosts = GymHosts(pool, render_mode)
        self.render_mode = render_mode
        self.action_space = self.hosts.action_space
        self.observation_space = self.hosts.observation_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode with a new host. With a seed, this and all later episodes are determined by it."""
        super().reset(seed=seed)
        check_options(options)
        self.hosts.begin([0], [self.np_random])
        return self.hosts.observe()[0], self.hosts.infos()[0]

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Train the host for one epoch; see `GymHosts.step`."""
        step = self.hosts.step(np.asarray(action)[None])
        ended = bool(step.terminated[0]), bool(step.truncated[0])
        return self.hosts.observe()[0], float(step.reward[0]), *ended, step.infos[0]

    def action_masks(self) -> np.ndarray:  # [sum of choices] bool
        """Return the possible choices, the heads one after the other, as MaskablePPO expects them."""
        return self.hosts.action_masks()[0]

    @property
    def observation_names(self) -> list[str]:
        """Name of each number of an observation."""
        return self.hosts.names

    def render(self) -> np.ndarray | None:
        """Return the timeline of the episode as an image [height, width, 3] of uint8."""
        frames = self.hosts.draw()
        return None if frames is None else frames[0]


class GrowthVectorEnv(VectorEnv[np.ndarray, np.ndarray, np.ndarray]):
    """N hosts that are trained together. An environment whose episode ends is reset in the same step.

    Environment i, once reset with a seed, equals a `GrowthEnv` with this seed bit for bit with the executors `loop` and
    `threads`. With `fused` it does up to rounding, which training amplifies.

    Args:
        pool: The hosts.
        render_mode: `rgb_array` to render the timeline of each episode. None: no rendering.
    """

    metadata: dict[str, Any] = VECTOR_METADATA

    def __init__(self, pool: HostPool, render_mode: str | None = None) -> None:
        self.hosts = GymHosts(pool, render_mode)
        self.render_mode = render_mode
        self.num_envs = pool.n_envs
        self.single_action_space = self.hosts.action_space
        self.single_observation_space = self.hosts.observation_space
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self._generators = [seeding.np_random(None)[0] for _ in range(self.num_envs)]

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode in every environment.

        Args:
            seed: Seed of each environment; None for one that continues its generator. A single number s stands for s,
                s + 1, s + 2 … None: all continue.
            options: None or empty.
        """
        check_options(options)
        if isinstance(seed, int | np.integer):
            seed = [int(seed) + i for i in range(self.num_envs)]
        seeds = [None] * self.num_envs if seed is None else list(seed)
        if len(seeds) != self.num_envs:
            raise ValueError(f"reset got {len(seeds)} seeds for {self.num_envs} environments; give one for each")
        for i, own in enumerate(seeds):
            if own is not None:
                self._generators[i] = seeding.np_random(int(own))[0]
        self.hosts.begin(range(self.num_envs), self._generators)
        return self.hosts.observe(), self._join_infos(self.hosts.infos(), {})

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Train every host for one epoch, and reset those whose episode ends; see `GymHosts.step`.

        Where an episode ends, observation and info are those of the next one; the last ones are in the info under
        `final_obs` and `final_info`.
        """
        step, observation = self.hosts.step(np.asarray(actions)), self.hosts.observe()
        ended = (step.terminated | step.truncated).nonzero()[0].tolist()
        infos, final = step.infos, {}
        if ended:
            final = {i: {"final_obs": observation[i], "final_info": infos[i]} for i in ended}
            self.hosts.begin(ended, [self._generators[i] for i in ended])
            observation, new_infos = self.hosts.observe(), self.hosts.infos()
            infos = [new_infos[i] if i in final else info for i, info in enumerate(infos)]
        return observation, step.reward, step.terminated, step.truncated, self._join_infos(infos, final)

    def _join_infos(self, infos: Sequence[dict[str, Any]], final: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        """Return the infos of all environments as arrays, by key."""
        joined: dict[str, Any] = {}
        for i, info in enumerate(infos):
            joined = self._add_info(joined, info | final.get(i, {}), i)
        return joined

    def action_masks(self) -> np.ndarray:  # [N, sum of choices] bool
        """Return the possible choices of each environment, the heads one after the other."""
        return self.hosts.action_masks()

    @property
    def observation_names(self) -> list[str]:
        """Name of each number of an observation."""
        return self.hosts.names

    def render(self) -> tuple[np.ndarray, ...] | None:
        """Return the timeline of each episode as an image [height, width, 3] of uint8."""
        frames = self.hosts.draw()
        return None if frames is None else tuple(frames)
