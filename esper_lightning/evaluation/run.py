"""A comparison, and the growth of one host, from controllers to tables on the terminal and files in a folder."""

import re
from collections.abc import Mapping
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from esper_lightning.console import print_status, wide_console
from esper_lightning.controllers.learned import Controller
from esper_lightning.datamodules.hosts import HostPoolData
from esper_lightning.envs import HostPool, StepResult
from esper_lightning.evaluation.checkpoints import (
    TrainedPolicy,
    check_training_seeds,
    load_policies,
    rival_names,
)
from esper_lightning.evaluation.comparison import Comparison, ComparisonResult, EvaluationConfig
from esper_lightning.evaluation.figures import save_figure, timeline_figure, write_figures
from esper_lightning.evaluation.networks import (
    NETWORK_FILE,
    NETWORK_FILES,
    fossilized_copy,
    grown_host,
    load_host,
    save_host,
    test_data_of,
)
from esper_lightning.evaluation.play import play_episode
from esper_lightning.evaluation.report import (
    METRICS_FILE,
    RESULTS_FILE,
    SUMMARY_FILE,
    make_tables,
    write_csv,
    write_report,
)
from esper_lightning.growth.export import export
from esper_lightning.growth.fold import fold
from esper_lightning.growth.lifecycle import count_parameters
from esper_lightning.growth.nested import iter_tensors
from esper_lightning.machine import provenance
from esper_lightning.parallel import Mapper

EVALUATION_FOLDER, NETWORKS_FOLDER = "evaluation", "networks"
"""Subfolder of a run folder for the results of a comparison; and its subfolder with grown hosts, the best in `1`."""

PROGRAM_FILE, FOLDED_FOLDER, STEPS_FILE, TIMELINE_FILE = "network.pt2", "folded", "accuracy.csv", "timeline.png"
"""Files of a host that `grow` has grown, beside those of every saved host."""

PREDICTED_SAMPLES = 256
"""Test samples in one forward pass."""

EARLIER = re.compile(r"schedule\d*\.json|timeline\d*\.png")
"""Pattern of the names of files that not every comparison writes."""


def compare(
    config: EvaluationConfig,
    data: HostPoolData,
    own: TrainedPolicy | None,
    *,
    folder: Path | None,
    settings: Mapping[str, Any],
    executor: Mapper | None = None,
) -> dict[str, ComparisonResult]:
    """Run the comparison on hosts of each task and publish the results, with several tasks in one folder per task.

    Args:
        config: Settings of the comparison.
        data: Hosts; the pool must be built and is not modified.
        own: Policy to compare, unless the settings name others. None: they do.
        folder: Output folder. None: the tables are only printed.
        settings: Settings of the run, saved in `evaluation.json`.
        executor: Has a method `map(function, items)`, which plays the controllers in other processes.

    Returns the results by task. Raises ValueError if the settings do not fit the hosts.
    """
    if config.hosts == 0:
        raise ValueError("model.evaluation.hosts is 0, so there is nothing to compare; give at least 2")
    comparison = Comparison(config)
    named = [*(config.policies or ()), *(config.rivals or ())]
    if len(set(named)) < len(named):
        raise ValueError(f"model.evaluation names a policy twice among {', '.join(named)}; name each once")
    if config.policies is None:
        assert own is not None, "there is one, or the settings name some"
        policies = [own]
    else:
        policies = load_policies(config.policies, data)
    check_training_seeds(policies)
    if not policies:
        comparison.check_without_policy()
    loaded = load_policies(config.rivals or (), data)
    sources = [policy.source for policy in policies]
    rivals = dict(zip(rival_names([rival.source for rival in loaded], sources), loaded, strict=True))
    record = {
        "settings": dict(settings),
        "run": provenance(data.seed, data.pool.device, data.pool.executor_choice, precision=data.precision),
    }
    results = {}
    for task, pool in data.pools.items():
        comparison.check(pool)
        several = len(data.pools) > 1
        if several:
            print_status(f"hosts of {task}")
        out = folder / task if folder is not None and several else folder
        if out is not None and (out / RESULTS_FILE).is_file():
            print_status(f"this comparison will replace the earlier one in {out}")
        results[task] = result = comparison.run(data, policies, rivals, task=task, executor=executor)
        for note in result.notes if out is not None else ():
            wide_console().print(note, soft_wrap=True)
        for table in make_tables(result):
            wide_console().print(table)
        if out is not None:
            publish(result, pool.space.slot, folder=out, record=record)
    return results


def publish(result: ComparisonResult, slots: list[str], *, folder: Path, record: Mapping[str, Any]) -> None:
    """Write all files of a comparison, and print their names.

    Args:
        result: Result of the comparison.
        slots: Names of the hosts' slots.
        folder: Output folder; results of an earlier comparison are replaced.
        record: Description of this process, saved in `evaluation.json`.
    """
    remove_earlier(folder)
    write_report(result, folder, record)
    written = [RESULTS_FILE, METRICS_FILE, SUMMARY_FILE, *write_figures(result, slots, folder)]
    for rank, grown in enumerate(result.networks, 1):
        save_host(grown, folder / NETWORKS_FOLDER / str(rank))
        written.append(f"{NETWORKS_FOLDER}/{rank}")
    wide_console().print(f"written to {folder}: {', '.join(written)}", soft_wrap=True)


def remove_earlier(folder: Path) -> None:
    """Remove the files of an earlier comparison that a new one need not replace.

    Their names depend on the numbers of policies and of saved networks. Schedules of a search stay, since a search
    takes long, and so does what the user has put beside a saved network.
    """
    for path in folder.glob("*"):
        if EARLIER.fullmatch(path.name) and path.is_file():
            path.unlink()
    for saved in (folder / NETWORKS_FOLDER).glob("[0-9]*/"):
        for name in NETWORK_FILES:
            (saved / name).unlink(missing_ok=True)
        if not any(saved.iterdir()):
            saved.rmdir()


def grow_host(pool: HostPool, name: str, controller: Controller, *, rng_seed: int, folder: Path) -> None:
    """Train one host while a controller grows it, and write what it has become.

    Args:
        pool: Pool of one host.
        name: Name of the controller in the files.
        controller: Controller that grows the host.
        rng_seed: RNG seed of the host's weights, its data order and its context.
        folder: Folder for the grown network, its `torch.export` program, the network with its seeds folded into its
            layers, test accuracies after each step, and a figure of the seeds' lives.
    """
    pool.reset([rng_seed])
    before, epochs = fossilized_copy(pool.envs[0]), count(1)

    def report(step: StepResult) -> None:
        events = "".join(f"; {event.seed_event}" for event in step.events)
        print_status(
            f"epoch {next(epochs)} of {pool.config.horizon}: validation accuracy {step.metrics.accuracy[0]:.4f}, "
            f"{step.metrics.parameters[0]} parameters{events}"
        )

    outcome = play_episode(pool, name, controller, rng_seeds=[rng_seed], on_step=report)
    grown = grown_host(pool, 0, outcome)
    inputs, targets = test_data_of(pool, pool.envs[0])

    @torch.no_grad()
    def predict(network: nn.Module) -> torch.Tensor:
        return torch.cat([next(iter_tensors(network(part))) for part in inputs.split(PREDICTED_SAMPLES)])

    expected, rows = predict(grown.network), []

    def measure(step: str, network: nn.Module) -> None:
        outputs, parameters = predict(network), count_parameters(network)
        measures = pool.task.measure(outputs, targets)
        accuracy, loss = (part.double().mean().item() for part in (measures.correct, measures.loss))
        rows.append([step, accuracy, loss, parameters, (outputs.double() - expected.double()).abs().max().item()])
        print_status(f"{step}: test accuracy {accuracy:.4f}, {parameters} parameters")

    measure("before training", before)
    measure("grown", grown.network)
    save_host(grown, folder)
    measure(f"loaded from {NETWORK_FILE}", load_host(folder, grown.description))
    export(grown.network, grown.samples, folder / PROGRAM_FILE, "pt2")
    measure(f"program {PROGRAM_FILE}", torch.export.load(folder / PROGRAM_FILE).module())
    folded = deepcopy(grown.network)
    for fate in fold(folded, grown.samples):
        told = f"folded into {fate.target_layer}" if fate.target_layer else f"not folded: {fate.reason}"
        print_status(f"{fate.slot}: {told}")
    save_host(grown._replace(network=folded), folder / FOLDED_FOLDER)
    measure("folded", folded)
    # The last column is the largest difference of an output from those of the grown network.
    write_csv(folder / STEPS_FILE, ["step", "test_accuracy", "test_loss", "parameters", "max_difference"], rows)
    save_figure(timeline_figure(outcome.trace, pool.space.slot, name), folder / TIMELINE_FILE)
