"""Compare the time of a PPO update with and without `model.ppo.compile`, in alternating rounds of one process.

    python -m benchmarks.compiled_update [--rounds 20] [--backend inductor]
    python -m benchmarks.compiled_update --decision

The rollout is that of 48 digits hosts with the settings of configs/digits.yaml for slots and episodes, and an untrained
policy. An update is 6 passes of 4 minibatches: loss, gradient and a step of Adam. Processor time of one thread, so that
other programs hardly matter. The first update, which compiles, has a column of its own, in seconds of the clock.

With `--decision` it measures one decision of a policy over sets instead, for 64 hosts with 12 slots and 8 blueprints:
normalisation, network, and the most likely action of each host.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from esper_lightning.envs import EnvConfig, HostPool
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.spaces.masks import make_masks
from esper_lightning.envs.spaces.observation import ObservationConfig
from esper_lightning.envs.vector_env import VectorObservation
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.hosts import CNN
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.compiled_terms import CompiledTerms
from esper_lightning.ppo.losses import PPOConfig, PPOTerms, ppo_terms
from esper_lightning.ppo.rollout_buffer import Rollout
from esper_lightning.ppo.running_norm import RowNorm, RunningMeanStd
from esper_lightning.tamiyo.policy import Policy, PolicyConfig, policy_shape
from esper_lightning.tamiyo.set_policy import make_policy
from esper_lightning.tasks import Digits

HOSTS = 48
WIDTHS = (64, 256)
DECIDED_HOSTS, DECIDED_SLOTS, DECIDED_BLUEPRINTS = 64, 12, 8

Terms = Callable[[Policy, Rollout, PPOConfig], PPOTerms]


def make_pool(hosts: int, sight: ObservationConfig) -> HostPool:
    """Return hosts that train as little as possible: only the policy's part is measured."""
    task = Digits()
    slots = ["block1.pool", "block2.pool", "block3"]
    env = EnvConfig(
        executor="fused",
        training=HostTraining(batches=1, max_grad_norm=None),
        lifecycle=LifecycleConfig(training_ticks=0, min_contribution=None, auto_cull=False, embargo_ticks=0),
        sight=sight,
    )

    def host(shape: Sequence[int], outputs: int) -> CNN:
        return CNN(shape, outputs, base=4, kernel=1, pools=2, slots=slots, isolate=False, channels_last=False)

    return HostPool(task, task.load(), host, config=env, n_envs=hosts, device=torch.device("cpu"))


def play(pool: HostPool, width: int) -> tuple[Policy, Rollout]:
    """Return an untrained policy of the given width and one rollout."""
    torch.manual_seed(0)
    policy = Policy(policy_shape(pool), PolicyConfig(width=width))
    loop = RolloutCollector(
        pool,
        policy,
        observation_norm=RunningMeanStd((len(pool.feature_names),)),
        value_norm=RunningMeanStd((), clip=float("inf")),
        config=PPOConfig(),
        run_rng_seed=0,
    )
    loop.reset()
    for _ in range(pool.horizon):
        loop.step()
    return policy, loop.finish()[0]


def seconds_of_update(terms_of: Terms, policy: Policy, rollout: Rollout) -> float:
    """Return the seconds of the processor for one update, which leaves the policy as it is."""
    config = PPOConfig()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(0)
    begin = time.process_time()
    for minibatch in rollout.minibatches(config.epochs, config.minibatches, generator):
        optimizer.zero_grad()
        terms_of(policy, minibatch, config).total(0.5, 0.03).backward()
        optimizer.step()
    return time.process_time() - begin


def seconds_of_decisions(rounds: int) -> list[float]:
    """Return the seconds of the processor for each of some decisions of an untrained policy over sets."""
    pool = make_pool(1, ObservationConfig(layout="rows"))
    assert pool.rows is not None
    n, slots, blueprints = DECIDED_HOSTS, DECIDED_SLOTS, DECIDED_BLUEPRINTS
    names = [[str(i) for i in range(count)] for count in (slots, blueprints)]
    space = pool.space._replace(slot=names[0], blueprint=names[1])
    torch.manual_seed(0)
    policy = make_policy(policy_shape(pool)._replace(space=space), PolicyConfig(width=WIDTHS[0]))
    norm = RowNorm(pool.rows)
    rows = torch.randn(n, slots, pool.rows.host + pool.rows.slot + blueprints * pool.rows.blueprint)
    rows[..., pool.rows.host] = 1.0
    rows[..., pool.rows.host + pool.rows.slot :: pool.rows.blueprint] = 1.0
    norm.update(rows)
    masks = make_masks(n, space, torch.ones(slots, blueprints, dtype=torch.bool))
    masks.slot.fill_(True)
    state, starts = policy.initial_state(n), torch.zeros(n, dtype=torch.bool)
    seconds = []
    with torch.no_grad():
        for _ in range(rounds):
            begin = time.process_time()
            _, state = policy.decide(VectorObservation(norm(rows)), state, masks, starts=starts)
            seconds.append(time.process_time() - begin)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="updates of each kind that count")
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile")
    parser.add_argument("--decision", action="store_true", help="measure a decision of a policy over sets instead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.decision:
        low, median, high = np.quantile(seconds_of_decisions(20 * args.rounds), (0.25, 0.5, 0.75))
        print(f"one decision for {DECIDED_HOSTS} hosts: {1e3 * median:.1f} ms ({1e3 * low:.1f} … {1e3 * high:.1f})")
        return
    pool = make_pool(HOSTS, ObservationConfig())
    print("| width | uncompiled, ms | compiled, ms | uncompiled / compiled (quartiles) | first update, s |")
    print("|---|---|---|---|---|")
    for width in WIDTHS:
        policy, rollout = play(pool, width)
        compiled = CompiledTerms(args.backend)
        seconds_of_update(ppo_terms, policy, rollout)
        begin = time.perf_counter()
        seconds_of_update(compiled, policy, rollout)
        first = time.perf_counter() - begin
        rounds = [
            [seconds_of_update(terms_of, policy, rollout) for terms_of in (ppo_terms, compiled)]
            for _ in range(args.rounds)
        ]
        plain, fast = np.array(rounds).T
        low, high = np.quantile(plain / fast, (0.25, 0.75))
        cells = f"{1e3 * np.median(plain):.0f} | {1e3 * np.median(fast):.0f}"
        ratio = f"{np.median(plain / fast):.2f} ({low:.2f} … {high:.2f})"
        print(f"| {width} | {cells} | {ratio} | {first:.0f} |", flush=True)


if __name__ == "__main__":
    main()
