"""TensorBoard output: every tag with its meaning and its healthy values, the layout, and what scalars do not cover."""

from pathlib import Path
from typing import NamedTuple

import torch

# protobuf makes these classes at run time, and there are no stubs.
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter


class Tag(NamedTuple):
    """Description of one plot, or of one plot for each name in angle brackets."""

    tag: str
    meaning: str
    healthy: str = ""


SCALARS: tuple[Tag, ...] = (
    Tag("rollout/objective", "objective J at the end of the episode, mean over hosts", "rises, then levels off"),
    Tag("rollout/reward", "reward of the last tick, mean over hosts", "near 0 once hosts have grown"),
    Tag(
        "val/<objective, accuracy>",
        "the same for fresh hosts on which the policy takes its most likely actions; best.ckpt has the best objective",
        "rise with those of the rollouts",
    ),
    Tag("hp_metric", "`val/objective` for TensorBoard's HParams table; -1 at the start of a process", "rises"),
    Tag("rollout/return", "sum of rewards of an episode, mean over hosts", "rises with the objective"),
    Tag("rollout/return.p<10, 50, 90>", "quantiles of the return over hosts", "the lowest rises, too"),
    Tag(
        "rollout/reward.<term>",
        "sum of a term of the reward over an episode, mean over hosts; all terms together are `rollout/return`",
        "the large ones are the wanted ones",
    ),
    Tag("rollout/accuracy", "validation accuracy with fossilized seeds only, at the end", "rises"),
    Tag("rollout/parameters", "parameters of host and fossilized seeds", "settles where growth is worth its price"),
    Tag("tasks/<task>/<objective, accuracy, parameters>", "means over the hosts of one task", "each one rises"),
    Tag("rollout/fossils", "seeds fossilized per episode", "settles; 0 for long is a collapse"),
    Tag("rollout/op.<op>", "share of the op where another was possible", "WAIT below 0.95"),
    Tag("rollout/gradient_health", "health of hosts' gradients, 1: every tensor learns", "above 0.9"),
    Tag("rollout/rolled_back", "share of hosts that the Governor rolled back or gave up", "below 0.1"),
    Tag("rollout/reliance", "share of seeds on which their host relies too much", "below 0.25"),
    Tag("rollout/dead_seeds.<blueprint>", "share of the blueprint's seeds without any gradient", "0"),
    Tag("rollout/state_rms", "RMS of the LSTM's state at the end of the episode", "0.1 to 3, and steady"),
    Tag("train/loss.policy", "clipped surrogate loss", "small, negative, noisy"),
    Tag("train/loss.value", "half the critic's squared error, normalised", "falls below 0.5"),
    Tag("train/entropy", "entropy of the policy, sum over the heads", "falls slowly"),
    Tag(
        "train/entropy.<head>", "entropy relative to an even choice, where there was a choice", "from 1 down, not to 0"
    ),
    Tag("train/choice_share.<head>", "share of actions in which the head had a choice", "steady"),
    Tag("train/kl", "KL divergence of the update, estimator k3", "near model.ppo.target_kl"),
    Tag("train/kl_k1", "KL divergence of the update, estimator k1 (may be negative)", "around k3"),
    Tag("train/clip_fraction", "share of ratios beyond the clip", "0.02 to 0.3"),
    Tag("train/first_ratio_error", "largest |ratio - 1| before the first step", "below 1e-5"),
    Tag("train/ratio_low", "least ratio of the update", "above 0.1"),
    Tag("train/ratio_high", "largest ratio of the update", "below 5"),
    Tag("train/weight_change", "relative change of the policy's weights in an update", "falls with the learning rate"),
    Tag("train/explained_variance", "share of the returns' variance that the critic explains", "rises above 0.5"),
    Tag("train/value_error", "RMS of the critic's error, in units of return", "falls"),
    Tag("train/advantage_spread", "standard deviation of advantages before normalisation", "falls slowly"),
    Tag("train/grad_norm", "norm of the policy's gradient before clipping", "steady"),
    Tag("train/minibatches", "optimizer steps until the KL stop", "epochs × minibatches, or a few less"),
    Tag(
        "train/skipped",
        "minibatches skipped since their loss or gradient was not finite",
        "0; three in a row end the run",
    ),
    Tag("train/left_out", "environments left out since a number was not finite or above 1e15", "0"),
    Tag("train/lr", "learning rate", "as configured"),
    Tag("train/entropy_coefficient", "weight of the entropy bonus", "as configured"),
    Tag(
        "train/reward_deviation",
        "number by which rewards are divided (`model.normalize.rewards`)",
        "settles after a few rollouts",
    ),
    Tag("time/ticks_per_second", "environment steps of the pool per second", "steady"),
    Tag("time/env_steps_per_second", "host epochs of all hosts per second", "steady"),
    Tag(
        "time/share.<phase>", "share of the rollout's time spent in the phase", "`train` and `validate` are most of it"
    ),
    Tag(
        "test/<metric>",
        "the policy's further test metrics in the closing comparison, mean over its hosts; `test/<task>/<metric>` with "
        "several tasks",
        "calibration error and perplexity low, accuracies high and alike",
    ),
    Tag("memory/process", "MiB of this process", "flat after the first rollouts"),
    Tag("memory/cuda", "MiB allocated on the GPU", "flat after the first rollouts"),
    Tag("memory/share", "memory in use (GPU: the most so far), of the device's", "below 0.85"),
    Tag("anomaly/<name>", "0: quiet, 1: warning, 2: critical", "0"),
    Tag("hosts/accuracy", "validation accuracy after the tick, mean over hosts", "rises within an episode"),
    Tag("hosts/loss", "validation loss after the tick, mean over hosts", "falls within an episode"),
    Tag("hosts/objective", "objective J after the tick, mean over hosts", "rises within an episode"),
    Tag("hosts/parameters", "parameters of host and fossilized seeds, mean over hosts", "rises within an episode"),
    Tag("hosts/reward", "reward of the tick, mean over hosts", "above 0 on average"),
    Tag("hosts/skipped_steps", "optimizer steps of all hosts skipped for fp16 overflow", "a few at the beginning"),
    Tag("skipped_steps/host<number>", "optimizer steps of one host skipped for fp16 overflow", "alike for all"),
    Tag("reward/<term>", "each term of the reward, mean over hosts", "the large ones are the wanted ones"),
    Tag("growth/<slot>/<stage>", "share of hosts whose seed there is in that stage", "FOSSILIZED grows"),
    Tag("growth/ticks.<stage>", "ticks that a seed spent in the stage", "as the lifecycle is configured"),
    Tag(
        "growth/potential",
        "gain of seeds if they were blended now, mean in accuracy points; needs `lifecycle.min_potential`",
        "above 0",
    ),
    Tag("governor/suspicious", "hosts whose loss is out of range", "0, or a few"),
    Tag("governor/rollbacks", "rollbacks since the episode began", "few"),
    Tag("governor/ended", "hosts that were given up", "0"),
    Tag("governor/vetoes", "actions that were vetoed in the tick", "0"),
    Tag("gradients/<host or seed>_norm", "gradient norm, mean over hosts or over live seeds", "steady, 0.01 to 10"),
    Tag("gradients/<host or seed>_health", "health of gradients, 1: every tensor learns", "above 0.9"),
    Tag("blueprint/<blueprint>/germinated", "seeds germinated per episode", "falls where it is not worth it"),
    Tag("blueprint/<blueprint>/kept", "seeds fossilized per episode", "rises where it is worth it"),
    Tag("blueprint/<blueprint>/churn", "share of the blueprint's seeds that were culled", "falls"),
    Tag("blueprint/<blueprint>/contribution", "accuracy points when fossilized or culled", "above 0"),
    Tag("credit/<blueprint>", "Shapley value of fossilized seeds in accuracy points", "above its rent"),
    Tag("credit/interaction", "mean interaction of pairs of fossilized seeds", "below 0: they replace each other"),
    Tag("lstm/hidden_rms", "RMS of the hidden state at the end of the episode", "0.05 to 0.8"),
    Tag("lstm/cell_rms", "RMS of the cell state at the end of the episode", "0.1 to 5"),
    Tag("lstm/saturated", "share of hidden units beyond ±0.95", "below 0.3"),
    Tag("heads/<head>.<choice>", "share of the choice where the head mattered", "leaves an even choice"),
    Tag("masks/<op>", "share of steps in which the op was possible", "not 0"),
    Tag("masks/forced", "share of steps without a choice", "small"),
    Tag("time/<clock>.<phase>", "seconds per tick by phase, as measured by the named clock", "steady"),
)

HISTOGRAMS: tuple[Tag, ...] = (
    Tag("histograms/ratio", "probability ratio, new over old, in the update's last pass", "around 1, thin tails"),
    Tag("histograms/advantage", "normalised advantages without forced steps", "around 0, no lonely bars far out"),
    Tag("histograms/contribution", "contributions in accuracy points of all seeds at the end", "moves to the right"),
)

FIGURES: tuple[Tag, ...] = (
    Tag("figures/growth", "each slot's stage by tick, alpha as height, rollbacks", "rows end alike or for a reason"),
    Tag("figures/ops", "op on each host before each tick, and shares of ops", "stripes: the policy follows a plan"),
    Tag("figures/hosts", "accuracy against parameters at the end", "a cloud up and to the left"),
    Tag("figures/blueprints", "seeds, share fossilized and contribution, since the run began", "few clear winners"),
)

TEXTS: tuple[Tag, ...] = (
    Tag("guide", "this page"),
    Tag("blueprints", "the scoreboard as a table, since the run began"),
)

CUSTOM_SCALARS = {
    "Is the policy learning?": {
        "objective": ["Multiline", ["rollout/objective"]],
        "return, p10 p50 p90": ["Margin", ["rollout/return.p50", "rollout/return.p10", "rollout/return.p90"]],
        "explained variance": ["Multiline", ["train/explained_variance"]],
        "KL, two estimators": ["Multiline", ["train/kl", "train/kl_k1"]],
        "entropy by head": ["Multiline", [r"train/entropy\..*"]],
    },
    "What does the policy grow?": {
        "ops": ["Multiline", [r"rollout/op\..*"]],
        "fossilized, by blueprint": ["Multiline", ["blueprint/.*/kept"]],
        "contribution, by blueprint": ["Multiline", ["blueprint/.*/contribution"]],
        "reward terms": ["Multiline", ["reward/.*"]],
    },
    "Is anything wrong?": {
        "anomalies": ["Multiline", ["anomaly/.*"]],
        "Governor": ["Multiline", ["governor/.*"]],
        "gradient health": ["Multiline", [".*_health"]],
    },
    "How fast is it?": {
        "host epochs per second": ["Multiline", ["time/env_steps_per_second"]],
        "where time goes": ["Multiline", [r"time/share\..*"]],
        "memory": ["Multiline", ["memory/process", "memory/cuda"]],
    },
}
"""Custom-scalar charts by category. `Multiline` takes patterns of tags; `Margin` a tag, its lower and upper bound."""


def guide() -> str:
    """Return the page that explains all plots, in Markdown."""
    parts = []
    for title, tags in (("Scalars", SCALARS), ("Histograms", HISTOGRAMS), ("Images", FIGURES), ("Text", TEXTS)):
        rows = [f"| `{tag.tag}` | {tag.meaning} | {tag.healthy} |" for tag in tags]
        parts.append("\n".join([f"## {title}\n", "| tag | what it shows | healthy |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def has_earlier_files(writer: SummaryWriter) -> bool:
    """Return True if an earlier process has written to this folder."""
    return len(list(Path(writer.log_dir).glob("events.out.tfevents.*"))) > 1


def discard_after(writer: SummaryWriter, tick: int) -> None:
    """Make readers drop everything that an earlier process wrote after `tick`."""
    assert writer.file_writer is not None, "the run's logger is open"
    writer.file_writer.add_event(Event(step=tick + 1, session_log=SessionLog(status=SessionLog.START)))


def write_histogram(writer: SummaryWriter, tag: str, values: Tensor, tick: int) -> None:
    """Write a histogram of the finite `values`; write nothing if there are none."""
    finite = values[torch.isfinite(values)]
    if finite.numel():
        writer.add_histogram(tag, finite, tick)
