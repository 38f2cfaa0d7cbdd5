"""Output of a comparison: tables on the terminal, files and figures in a folder."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper_lightning.checkpointing.policy_file import read_policy
from esper_lightning.console import print_status, wide_console
from esper_lightning.datamodules.hosts import HostPoolData
from esper_lightning.evaluation.checkpoints import TrainedPolicy, check_training_seeds, load_policies, rival_names
from esper_lightning.evaluation.comparison import Comparison, ComparisonResult, EvaluationConfig
from esper_lightning.evaluation.figures import write_figures
from esper_lightning.evaluation.networks import remove_saved, save_best
from esper_lightning.evaluation.report import RESULTS_FILE, make_tables, write_report
from esper_lightning.parallel import Mapper
from esper_lightning.provenance import provenance

EVALUATION_FOLDER = "evaluation"
"""Subfolder of a run folder for the results of a comparison."""

EARLIER = re.compile(r"schedule\d*\.json|timeline\d*\.png")
"""Pattern of the names of files that not every comparison writes."""

NETWORKS_FOLDER = "networks"
"""Subfolder with the grown hosts of a comparison, numbered from the best."""


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
        policies = load_policies({path: read_policy(path) for path in config.policies}, data)
    check_training_seeds(policies)
    if not policies:
        comparison.check_without_policy()
    loaded = load_policies({path: read_policy(path) for path in config.rivals or ()}, data)
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
        own_folder = folder / task if folder is not None and several else folder
        if own_folder is not None:
            announce_replacement(own_folder)
        results[task] = result = comparison.run(
            data, policies, rivals, task=task, save_networks=config.save_networks, executor=executor
        )
        if own_folder is not None:
            publish(result, pool.space.slot, folder=own_folder, record=record)
        else:
            for table in make_tables(result):
                wide_console().print(table)
    return results


def announce_replacement(folder: Path) -> None:
    """Print a line if the folder holds the results of an earlier comparison."""
    if (folder / RESULTS_FILE).is_file():
        print_status(f"this comparison will replace the earlier one in {folder}")


def remove_earlier(folder: Path) -> None:
    """Remove the files of an earlier comparison that a new one need not replace.

    Their names depend on the numbers of policies and of saved networks. Schedules of a search stay, since a search
    takes long.
    """
    remove_saved(folder / NETWORKS_FOLDER)
    for path in folder.glob("*"):
        if EARLIER.fullmatch(path.name) and path.is_file():
            path.unlink()


def publish(result: ComparisonResult, slots: list[str], *, folder: Path, record: Mapping[str, Any]) -> None:
    """Write all files and print all tables.

    Args:
        result: Result of the comparison.
        slots: Names of the hosts' slots.
        folder: Output folder; results of an earlier comparison are replaced.
        record: Description of this process, saved in `evaluation.json`.
    """
    remove_earlier(folder)
    write_report(result, folder, record)
    figures = write_figures(result, slots, folder)
    console = wide_console()
    for note in result.notes:
        console.print(note, soft_wrap=True)
    for table in make_tables(result):
        console.print(table)
    networks = save_best(result.networks, folder / NETWORKS_FOLDER)
    names = ", ".join([RESULTS_FILE, "test_metrics.csv", "evaluation.json", *(path.name for path in figures)])
    if networks:
        names += f"; the best grown hosts: {NETWORKS_FOLDER}/1" + (f" to {len(networks)}" if networks[1:] else "")
    console.print(f"written to {folder}: {names}", soft_wrap=True)
