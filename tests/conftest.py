"""Shared fixtures: one thread, digits loaded once, and small pools and rollouts."""

import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import settings
from jsonargparse import _core, _subcommands
from torch import Tensor, nn

from esper_lightning.envs import ActionConfig, EnvConfig, HostPool
from esper_lightning.envs.executors.fused.proof import check_batched
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.hosts import CNN
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.losses import PPOConfig
from esper_lightning.ppo.policy import Policy, PolicyConfig, policy_shape
from esper_lightning.ppo.running_norm import RunningMeanStd, make_norm
from esper_lightning.tasks import Digits
from tests.envs.executors.fake_cuda import FakeCuda
from tests.runs import SharedParserCLI, remembered

# A shell starts programs in the background with SIGINT ignored, and processes that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Reproducible, and without example files in the checkout.
settings.register_profile("esper", deadline=None, max_examples=25, derandomize=True, database=None)
settings.load_profile("esper")

# Hosts are tiny: a second thread slows them down, on a busy machine tenfold.
torch.set_num_threads(1)

# The first backward pass of a process decides whether autograd has threads. After a torch.export it would start some,
# and forks, by which runs are stopped and killed, could not train.
torch.ones((), requires_grad=True).backward()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave every n-th case of a thinned table in the fast tier; n has no factor in common with the table's sides."""
    seen: Counter[str] = Counter()
    for item in items:
        thinned = item.get_closest_marker("thinned")
        if thinned is not None:
            name = item.nodeid.partition("[")[0]
            if seen[name] % thinned.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[name] += 1


SMALL = EnvConfig(
    horizon=6,
    training=HostTraining(batches=2, lr=0.02),  # tiny hosts learn at once
    # Short lifecycles: within six ticks a seed can reach every stage.
    lifecycle=LifecycleConfig(training_ticks=1, min_contribution=None, auto_cull=False, embargo_ticks=1),
    actions=ActionConfig(blueprints=["norm", "conv_small", "conv_light"], tempos={"FAST": 1, "SLOW": 2}),
)

FREE: dict[str, Any] = {
    "horizon": 12,
    "lifecycle": replace(SMALL.lifecycle, birth="random"),
    "actions": ActionConfig(blueprints=["norm", "conv_small"], tempos={"FAST": 1, "SLOW": 2}),
}
"""Changes to SMALL that give a controller choices in all heads."""


def small_host(input_shape: Sequence[int], outputs: int) -> nn.Module:
    """A CNN host with 390 parameters and three slots."""
    slots = ["block1.pool", "block2.pool", "block3"]
    return CNN(input_shape, outputs, base=4, kernel=1, pools=2, slots=slots, isolate=False, channels_last=False)


@pytest.fixture(autouse=True)
def one_thread_per_operator() -> None:
    """Reset the number of threads, which an earlier test may have raised."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """End the process group of a Trainer with DDP: later tests, and their forks, would wait for it."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session", autouse=True)
def one_parser_per_process() -> Iterator[None]:
    """Share one parser between all starts of the command line in this process; it looks up each key once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper_lightning.cli.commands.EsperCLI", SharedParserCLI)
        find = remembered(_subcommands.find_action_and_subcommand)
        for module in (_subcommands, _core):
            patch.setattr(module, "find_action_and_subcommand", find)
        yield


@pytest.fixture(scope="session", autouse=True)
def batched_hosts_of_ours_are_proven_once() -> Iterator[None]:
    """Compare batched hosts of a kind with the loop once per process: the comparison takes most of a short test.

    Hosts that tests define are compared every time.
    """
    proven: set[str] = set()

    def check(env: HostEnv, inputs: Tensor) -> None:
        network, slots = env.network, slots_of(env.network)
        ours = type(network).__module__.startswith("esper_lightning.hosts")
        settings = [value for value in vars(network).values() if isinstance(value, bool | int | float | str)]
        grown_in = [(name, slot.detach_input, slot.on_single_path) for name, slot in slots.items()]
        dtype, shape = next(network.parameters()).dtype, inputs.shape[1:]
        case = str((network, settings, grown_in, env.space.blueprint, dtype, shape))
        if not ours or case not in proven:
            check_batched(env, inputs)
            proven.add(case)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper_lightning.envs.executors.fused.executor.check_batched", check)
        yield


@pytest.fixture(scope="session")
def make_pool() -> Callable[..., HostPool]:
    """`make_pool(n_envs, host=…, governor=…, …)` returns a small pool on digits; the rest replaces EnvConfig's.

    `governor` holds the rules by which the hosts are watched. None: they are not watched.
    """
    task = Digits(validation=100, test=100)
    data = task.load()

    def make(
        n_envs: int = 2,
        host: Callable[[Sequence[int], int], nn.Module] = small_host,
        *,
        governor: GovernorConfig | None = GovernorConfig(),
        **changes: Any,
    ) -> HostPool:
        config = replace(SMALL, **changes)
        device = torch.device("cpu")
        return HostPool(task, data, host, config=config, n_envs=n_envs, device=device, governor=governor)

    return make


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Replace the streams and events of a GPU by fakes."""
    return FakeCuda(monkeypatch)


@pytest.fixture(scope="session")
def make_policy() -> Callable[..., Policy]:
    """`make_policy(pool, seed)` returns a small untrained policy that fits the pool."""

    def make(pool: HostPool, seed: int = 0) -> Policy:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return Policy(policy_shape(pool), PolicyConfig(width=16))

    return make


@pytest.fixture(scope="session")
def make_loop(
    make_pool: Callable[..., HostPool], make_policy: Callable[..., Policy]
) -> Callable[..., RolloutCollector]:
    """`make_loop(n_envs, gamma=…, …)` returns a collector with its own small pool; the rest goes to PPOConfig."""

    def make(n_envs: int = 3, governor: GovernorConfig | None = GovernorConfig(), **ppo: Any) -> RolloutCollector:
        pool = make_pool(n_envs, governor=governor)
        return RolloutCollector(
            pool,
            make_policy(pool),
            observation_norm=make_norm(pool.rows),
            value_norm=RunningMeanStd((), clip=float("inf")),
            config=PPOConfig(**ppo),
            run_rng_seed=7,
        )

    return make
