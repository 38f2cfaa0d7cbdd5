"""Every tag that telemetry writes: what it shows, and what a healthy one looks like."""

import re
from typing import NamedTuple

from esper_lightning.telemetry.detail import Level


class Tag(NamedTuple):
    """One plot, or one for each name in angle brackets."""

    tag: str
    level: Level
    """From which on it is written."""
    meaning: str
    healthy: str = ""

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the tags of its plots."""
        return re.compile("".join(".+" if part[0] == "<" else re.escape(part) for part in self.parts))

    @property
    def parts(self) -> list[str]:
        """Names in angle brackets, and what is between them."""
        return [part for part in re.split(r"(<[^>]+>)", self.tag) if part]


SCALARS: tuple[Tag, ...] = (
    Tag("rollout/objective", "minimal", "J at the end of the episode, mean over hosts", "rises, then levels off"),
    Tag("rollout/return", "minimal", "sum of rewards of an episode, mean over hosts", "rises with the objective"),
    Tag("rollout/return.p<10, 50, 90>", "minimal", "quantiles of it over hosts", "the lowest rises, too"),
    Tag("rollout/accuracy", "minimal", "validation accuracy of what is kept, at the end", "rises"),
    Tag("rollout/parameters", "minimal", "of hosts with what is kept", "settles where growth is worth its price"),
    Tag("tasks/<task>/<objective, accuracy, parameters>", "minimal", "of one of several tasks", "each one rises"),
    Tag("rollout/fossils", "minimal", "seeds kept per episode", "settles; 0 for long is a collapse"),
    Tag("rollout/op.<op>", "minimal", "share among the decisions in which another op was possible", "WAIT below 0.95"),
    Tag("rollout/gradient_health", "minimal", "of hosts, 1: every tensor learns", "above 0.9"),
    Tag("rollout/rolled_back", "minimal", "share of hosts that the Governor rolled back or gave up", "below 0.1"),
    Tag("rollout/reliance", "minimal", "share of seeds on which their host hangs", "below 0.25"),
    Tag("rollout/dead_seeds.<blueprint>", "minimal", "share of its seeds that never had a gradient", "0"),
    Tag("rollout/state_rms", "minimal", "of the LSTM's state at the end of the episode", "0.1 to 3, and steady"),
    Tag("train/loss.policy", "minimal", "the clipped surrogate", "small, negative, noisy"),
    Tag("train/loss.value", "minimal", "half the critic's squared error, normalised", "falls below 0.5"),
    Tag("train/entropy", "minimal", "sum over the heads", "falls slowly"),
    Tag("train/entropy.<head>", "minimal", "relative to an even choice, where there was one", "from 1 down, not to 0"),
    Tag("train/freedom.<head>", "minimal", "share of decisions in which the head had a choice", "steady"),
    Tag("train/kl", "minimal", "by how much the update moved the policy, estimator k3", "near model.ppo.target_kl"),
    Tag("train/kl_k1", "minimal", "the same by estimator k1, which may be negative", "around k3"),
    Tag("train/clip_fraction", "minimal", "share of ratios beyond the clip", "0.02 to 0.3"),
    Tag("train/first_ratio_error", "minimal", "largest |ratio - 1| before the first step", "below 1e-5"),
    Tag("train/ratio_low", "minimal", "least ratio of the update", "above 0.1"),
    Tag("train/ratio_high", "minimal", "largest ratio of the update", "below 5"),
    Tag("train/weight_change", "minimal", "of the policy in an update, relative", "falls with the learning rate"),
    Tag("train/explained_variance", "minimal", "of returns, by the critic", "rises above 0.5"),
    Tag("train/value_error", "minimal", "root mean square of the critic's error, in units of return", "falls"),
    Tag("train/advantage_spread", "minimal", "deviation of advantages before they are normalised", "falls slowly"),
    Tag("train/grad_norm", "minimal", "of the policy, before clipping", "steady"),
    Tag("train/minibatches", "minimal", "steps that the KL stop allowed", "epochs × minibatches, or a few less"),
    Tag("train/lr", "minimal", "learning rate", "as configured"),
    Tag("train/entropy_coefficient", "minimal", "weight of the entropy bonus", "as configured"),
    Tag("time/ticks_per_second", "minimal", "host epochs of the pool", "steady"),
    Tag("time/env_steps_per_second", "minimal", "host epochs of all hosts", "steady"),
    Tag("time/share.<phase>", "minimal", "of the rollout's time", "`train` and `validate` are most of it"),
    Tag("time/samples_per_second.<phase>", "minimal", "of all hosts, in `train` and in `validate`", "steady"),
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
    Tag("hosts/loss", "normal", "the same of the loss", "falls within an episode"),
    Tag("hosts/objective", "normal", "the same of J", "rises within an episode"),
    Tag("hosts/parameters", "normal", "of the host and what is kept", "rises within an episode"),
    Tag("hosts/reward", "normal", "sum of the terms", "above 0 on average"),
    Tag("hosts/skipped_steps", "normal", "of all hosts, for gradients out of fp16's range", "a few at the beginning"),
    Tag("skipped_steps/host<number>", "normal", "the same of one host", "alike for all"),
    Tag("reward/<term>", "normal", "each term of the reward, mean over hosts", "the large ones are the wanted ones"),
    Tag("growth/<slot>/<stage>", "normal", "share of hosts whose seed there is in that stage", "fossils appear"),
    Tag("growth/ticks.<stage>", "normal", "ticks that a seed spent in the stage", "as the lifecycle is configured"),
    Tag("governor/suspicious", "normal", "hosts with an odd loss", "0, or a few"),
    Tag("governor/rollbacks", "normal", "since the episode began", "few"),
    Tag("governor/ended", "normal", "hosts that were given up", "0"),
    Tag("governor/vetoes", "normal", "actions that were refused in the tick", "0"),
    Tag("gradients/<host or seed>_norm", "normal", "mean over hosts, or over seeds that live", "steady, 0.01 to 10"),
    Tag("gradients/<host or seed>_health", "normal", "1: every tensor learns", "above 0.9"),
    Tag("blueprint/<blueprint>/germinated", "normal", "seeds per episode", "falls where it is not worth it"),
    Tag("blueprint/<blueprint>/kept", "normal", "seeds kept per episode", "rises where it is worth it"),
    Tag("blueprint/<blueprint>/churn", "normal", "share of its seeds that were culled", "falls"),
    Tag("blueprint/<blueprint>/contribution", "normal", "accuracy points when kept or culled", "above 0"),
    Tag("credit/<blueprint>", "normal", "Shapley value of its kept seeds in accuracy points", "above its rent"),
    Tag("credit/interaction", "normal", "of pairs of kept seeds", "below 0: they stand in for each other"),
    Tag("lstm/hidden_rms", "normal", "of the hidden state at the end of the episode", "0.05 to 0.8"),
    Tag("lstm/cell_rms", "normal", "of the cell", "0.1 to 5"),
    Tag("lstm/saturated", "normal", "share of hidden numbers beyond 0.95", "below 0.3"),
    Tag("heads/<head>.<choice>", "normal", "share among the decisions in which the head mattered", "leaves even"),
    Tag("masks/<op>", "normal", "share of decisions in which the op was possible", "not 0"),
    Tag("masks/forced", "normal", "share of decisions without a choice", "small"),
    Tag("time/<clock>.<phase>", "normal", "seconds of a tick, by the clock that is named", "steady"),
    Tag("layers/<parameter>", "debug", "norm of its gradient, mean over a few hosts", "no layer at 0, none far above"),
)

HISTOGRAMS: tuple[Tag, ...] = (
    Tag("histograms/ratio", "normal", "of the update's last pass, new over old probability", "around 1, thin tails"),
    Tag("histograms/advantage", "normal", "normalised, without forced steps", "around 0, no lonely bars far out"),
    Tag("histograms/contribution", "normal", "accuracy points of all seeds at the end", "moves to the right"),
)

FIGURES: tuple[Tag, ...] = (
    Tag(
        "figures/growth",
        "normal",
        "each slot's stage by tick, alpha as height, rollbacks",
        "rows end alike or for a reason",
    ),
    Tag("figures/ops", "normal", "what was done to each host before each tick", "stripes: she has a plan"),
    Tag("figures/hosts", "normal", "accuracy against parameters at the end", "a cloud up and to the left"),
    Tag("figures/blueprints", "normal", "seeds, share kept and contribution, since the run began", "few clear winners"),
)

TEXTS: tuple[Tag, ...] = (
    Tag("guide", "minimal", "this page"),
    Tag("blueprints", "normal", "the scoreboard as a table, since the run began"),
)


def table(tags: tuple[Tag, ...]) -> str:
    """As Markdown."""
    rows = [f"| `{tag.tag}` | {tag.level} | {tag.meaning} | {tag.healthy} |" for tag in tags]
    return "\n".join(["| tag | from level | what it shows | healthy |", "|---|---|---|---|", *rows])


def guide() -> str:
    """The page that explains all plots, as Markdown."""
    parts = [("Scalars", SCALARS), ("Histograms", HISTOGRAMS), ("Images", FIGURES), ("Text", TEXTS)]
    return "\n\n".join(f"## {title}\n\n{table(tags)}" for title, tags in parts)
