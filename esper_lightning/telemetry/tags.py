"""Every tag that telemetry writes to TensorBoard, with its meaning and its healthy values."""

import re
from typing import NamedTuple

from esper_lightning.telemetry.level import Level


class Tag(NamedTuple):
    """Description of one plot, or of one plot for each name in angle brackets."""

    tag: str
    level: Level
    """Lowest level of telemetry at which the tag is written."""
    meaning: str
    healthy: str = ""
    """Description of healthy values."""

    @property
    def pattern(self) -> re.Pattern[str]:
        """Regular expression that matches the tags of the plots."""
        return re.compile("".join(".+" if part[0] == "<" else re.escape(part) for part in self.parts))

    @property
    def parts(self) -> list[str]:
        """Parts of the tag: names in angle brackets, and the texts between them."""
        return [part for part in re.split(r"(<[^>]+>)", self.tag) if part]


SCALARS: tuple[Tag, ...] = (
    Tag(
        "rollout/objective",
        "minimal",
        "objective J at the end of the episode, mean over hosts",
        "rises, then levels off",
    ),
    Tag("rollout/reward", "minimal", "reward of the last tick, mean over hosts", "near 0 once hosts have grown"),
    Tag(
        "val/<objective, accuracy>",
        "minimal",
        "the same for fresh hosts on which the policy takes its most likely actions; best.ckpt has the best objective",
        "rise with those of the rollouts",
    ),
    Tag(
        "hp_metric", "minimal", "`val/objective` for TensorBoard's HParams table; -1 at the start of a process", "rises"
    ),
    Tag("rollout/return", "minimal", "sum of rewards of an episode, mean over hosts", "rises with the objective"),
    Tag("rollout/return.p<10, 50, 90>", "minimal", "quantiles of the return over hosts", "the lowest rises, too"),
    Tag(
        "rollout/reward.<term>",
        "minimal",
        "sum of a term of the reward over an episode, mean over hosts; all terms together are `rollout/return`",
        "the large ones are the wanted ones",
    ),
    Tag("rollout/accuracy", "minimal", "validation accuracy with fossilized seeds only, at the end", "rises"),
    Tag(
        "rollout/parameters",
        "minimal",
        "parameters of host and fossilized seeds",
        "settles where growth is worth its price",
    ),
    Tag(
        "tasks/<task>/<objective, accuracy, parameters>",
        "minimal",
        "means over the hosts of one task",
        "each one rises",
    ),
    Tag("rollout/fossils", "minimal", "seeds fossilized per episode", "settles; 0 for long is a collapse"),
    Tag("rollout/op.<op>", "minimal", "share of the op where another was possible", "WAIT below 0.95"),
    Tag("rollout/gradient_health", "minimal", "health of hosts' gradients, 1: every tensor learns", "above 0.9"),
    Tag("rollout/rolled_back", "minimal", "share of hosts that the Governor rolled back or gave up", "below 0.1"),
    Tag("rollout/reliance", "minimal", "share of seeds on which their host relies too much", "below 0.25"),
    Tag("rollout/dead_seeds.<blueprint>", "minimal", "share of the blueprint's seeds without any gradient", "0"),
    Tag("rollout/state_rms", "minimal", "RMS of the LSTM's state at the end of the episode", "0.1 to 3, and steady"),
    Tag("train/loss.policy", "minimal", "clipped surrogate loss", "small, negative, noisy"),
    Tag("train/loss.value", "minimal", "half the critic's squared error, normalised", "falls below 0.5"),
    Tag("train/entropy", "minimal", "entropy of the policy, sum over the heads", "falls slowly"),
    Tag(
        "train/entropy.<head>",
        "minimal",
        "entropy relative to an even choice, where there was a choice",
        "from 1 down, not to 0",
    ),
    Tag("train/choice_share.<head>", "minimal", "share of actions in which the head had a choice", "steady"),
    Tag("train/kl", "minimal", "KL divergence of the update, estimator k3", "near model.ppo.target_kl"),
    Tag("train/kl_k1", "minimal", "KL divergence of the update, estimator k1 (may be negative)", "around k3"),
    Tag("train/clip_fraction", "minimal", "share of ratios beyond the clip", "0.02 to 0.3"),
    Tag("train/first_ratio_error", "minimal", "largest |ratio - 1| before the first step", "below 1e-5"),
    Tag("train/ratio_low", "minimal", "least ratio of the update", "above 0.1"),
    Tag("train/ratio_high", "minimal", "largest ratio of the update", "below 5"),
    Tag(
        "train/weight_change",
        "minimal",
        "relative change of the policy's weights in an update",
        "falls with the learning rate",
    ),
    Tag(
        "train/explained_variance",
        "minimal",
        "share of the returns' variance that the critic explains",
        "rises above 0.5",
    ),
    Tag("train/value_error", "minimal", "RMS of the critic's error, in units of return", "falls"),
    Tag("train/advantage_spread", "minimal", "standard deviation of advantages before normalisation", "falls slowly"),
    Tag("train/grad_norm", "minimal", "norm of the policy's gradient before clipping", "steady"),
    Tag("train/minibatches", "minimal", "optimizer steps until the KL stop", "epochs × minibatches, or a few less"),
    Tag(
        "train/skipped",
        "minimal",
        "minibatches skipped since their loss or gradient was not finite",
        "0; three in a row end the run",
    ),
    Tag("train/left_out", "minimal", "environments left out since a number was not finite or above 1e15", "0"),
    Tag("train/lr", "minimal", "learning rate", "as configured"),
    Tag("train/entropy_coefficient", "minimal", "weight of the entropy bonus", "as configured"),
    Tag(
        "train/reward_deviation",
        "minimal",
        "number by which rewards are divided (`model.normalize.rewards`)",
        "settles after a few rollouts",
    ),
    Tag("time/ticks_per_second", "minimal", "environment steps of the pool per second", "steady"),
    Tag("time/env_steps_per_second", "minimal", "host epochs of all hosts per second", "steady"),
    Tag(
        "time/share.<phase>",
        "minimal",
        "share of the rollout's time spent in the phase",
        "`train` and `validate` are most of it",
    ),
    Tag("time/samples_per_second.<phase>", "minimal", "samples of all hosts, in `train` and in `validate`", "steady"),
    Tag(
        "test/<metric>",
        "minimal",
        "the policy's further test metrics in the closing comparison, mean over its hosts; `test/<task>/<metric>` with "
        "several tasks",
        "calibration error and perplexity low, accuracies high and alike",
    ),
    Tag("memory/process", "minimal", "MiB of this process", "flat after the first rollouts"),
    Tag("memory/cuda", "minimal", "MiB allocated on the GPU", "flat after the first rollouts"),
    Tag(
        "memory/phase.<phase>",
        "minimal",
        "MiB, the most within a phase (CPU: at its end)",
        "flat; says which phase to cut",
    ),
    Tag("memory/share", "minimal", "memory in use (GPU: the most so far), of the device's", "below 0.85"),
    Tag("anomaly/<name>", "minimal", "0: quiet, 1: warning, 2: critical", "0"),
    Tag("telemetry/level", "minimal", "0: off … 3: debug", "as configured; rises by itself on an anomaly"),
    Tag("hosts/accuracy", "normal", "validation accuracy after the tick, mean over hosts", "rises within an episode"),
    Tag("hosts/loss", "normal", "validation loss after the tick, mean over hosts", "falls within an episode"),
    Tag("hosts/objective", "normal", "objective J after the tick, mean over hosts", "rises within an episode"),
    Tag(
        "hosts/parameters",
        "normal",
        "parameters of host and fossilized seeds, mean over hosts",
        "rises within an episode",
    ),
    Tag("hosts/reward", "normal", "reward of the tick, mean over hosts", "above 0 on average"),
    Tag(
        "hosts/skipped_steps",
        "normal",
        "optimizer steps of all hosts skipped for fp16 overflow",
        "a few at the beginning",
    ),
    Tag(
        "skipped_steps/host<number>", "normal", "optimizer steps of one host skipped for fp16 overflow", "alike for all"
    ),
    Tag("reward/<term>", "normal", "each term of the reward, mean over hosts", "the large ones are the wanted ones"),
    Tag("growth/<slot>/<stage>", "normal", "share of hosts whose seed there is in that stage", "FOSSILIZED grows"),
    Tag("growth/ticks.<stage>", "normal", "ticks that a seed spent in the stage", "as the lifecycle is configured"),
    Tag(
        "growth/potential",
        "normal",
        "gain of seeds if they were blended now, mean in accuracy points; needs `lifecycle.min_potential`",
        "above 0",
    ),
    Tag("governor/suspicious", "normal", "hosts whose loss is out of range", "0, or a few"),
    Tag("governor/rollbacks", "normal", "rollbacks since the episode began", "few"),
    Tag("governor/ended", "normal", "hosts that were given up", "0"),
    Tag("governor/vetoes", "normal", "actions that were vetoed in the tick", "0"),
    Tag(
        "gradients/<host or seed>_norm",
        "normal",
        "gradient norm, mean over hosts or over live seeds",
        "steady, 0.01 to 10",
    ),
    Tag("gradients/<host or seed>_health", "normal", "health of gradients, 1: every tensor learns", "above 0.9"),
    Tag("blueprint/<blueprint>/germinated", "normal", "seeds germinated per episode", "falls where it is not worth it"),
    Tag("blueprint/<blueprint>/kept", "normal", "seeds fossilized per episode", "rises where it is worth it"),
    Tag("blueprint/<blueprint>/churn", "normal", "share of the blueprint's seeds that were culled", "falls"),
    Tag("blueprint/<blueprint>/contribution", "normal", "accuracy points when fossilized or culled", "above 0"),
    Tag("credit/<blueprint>", "normal", "Shapley value of fossilized seeds in accuracy points", "above its rent"),
    Tag(
        "credit/interaction",
        "normal",
        "mean interaction of pairs of fossilized seeds",
        "below 0: they replace each other",
    ),
    Tag("lstm/hidden_rms", "normal", "RMS of the hidden state at the end of the episode", "0.05 to 0.8"),
    Tag("lstm/cell_rms", "normal", "RMS of the cell state at the end of the episode", "0.1 to 5"),
    Tag("lstm/saturated", "normal", "share of hidden units beyond ±0.95", "below 0.3"),
    Tag("heads/<head>.<choice>", "normal", "share of the choice where the head mattered", "leaves an even choice"),
    Tag("masks/<op>", "normal", "share of steps in which the op was possible", "not 0"),
    Tag("masks/forced", "normal", "share of steps without a choice", "small"),
    Tag("time/<clock>.<phase>", "normal", "seconds per tick by phase, as measured by the named clock", "steady"),
    Tag(
        "layers/<parameter>",
        "debug",
        "norm of the parameter's gradient, mean over a few hosts",
        "no layer at 0, none far above",
    ),
    Tag(
        "policy/<parameter>",
        "debug",
        "norm of the gradient of the policy's parameter before clipping, mean over an update's optimizer steps",
        "no parameter at 0 for long, none far above the others",
    ),
)

HISTOGRAMS: tuple[Tag, ...] = (
    Tag(
        "histograms/ratio",
        "normal",
        "probability ratio, new over old, in the update's last pass",
        "around 1, thin tails",
    ),
    Tag(
        "histograms/advantage",
        "normal",
        "normalised advantages without forced steps",
        "around 0, no lonely bars far out",
    ),
    Tag(
        "histograms/contribution",
        "normal",
        "contributions in accuracy points of all seeds at the end",
        "moves to the right",
    ),
)

FIGURES: tuple[Tag, ...] = (
    Tag(
        "figures/growth",
        "normal",
        "each slot's stage by tick, alpha as height, rollbacks",
        "rows end alike or for a reason",
    ),
    Tag(
        "figures/ops",
        "normal",
        "op on each host before each tick, and shares of ops",
        "stripes: the policy follows a plan",
    ),
    Tag("figures/hosts", "normal", "accuracy against parameters at the end", "a cloud up and to the left"),
    Tag(
        "figures/blueprints",
        "normal",
        "seeds, share fossilized and contribution, since the run began",
        "few clear winners",
    ),
)

TEXTS: tuple[Tag, ...] = (
    Tag("guide", "minimal", "this page"),
    Tag("blueprints", "normal", "the scoreboard as a table, since the run began"),
)


def table(tags: tuple[Tag, ...]) -> str:
    """Return the tags as a table in Markdown."""
    rows = [f"| `{tag.tag}` | {tag.level} | {tag.meaning} | {tag.healthy} |" for tag in tags]
    return "\n".join(["| tag | from level | what it shows | healthy |", "|---|---|---|---|", *rows])


def guide() -> str:
    """Return the page that explains all plots, in Markdown."""
    parts = [("Scalars", SCALARS), ("Histograms", HISTOGRAMS), ("Images", FIGURES), ("Text", TEXTS)]
    return "\n\n".join(f"## {title}\n\n{table(tags)}" for title, tags in parts)
