"""Command line: LightningCLI with `fit`, `validate` and `test`, and commands that are functions and need torch."""

import csv
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from jsonargparse import ArgumentError, set_parsing_settings
from jsonargparse.typing import PositiveInt
from lightning import LightningModule, Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.distributed import is_torchelastic_launched

from esper_lightning.callbacks import DEFAULT_CALLBACKS, Governor
from esper_lightning.cli.launch import PROGRAM, SUBCOMMANDS, OneLineParser
from esper_lightning.controllers.learned import LearnedController
from esper_lightning.datamodules import HostPoolData
from esper_lightning.envs import HostPool, StepResult
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.vector_env import EVALUATION, episode_rng_seeds
from esper_lightning.evaluation.checkpoints import find_controller
from esper_lightning.evaluation.comparison import Comparison
from esper_lightning.evaluation.play import play_episode
from esper_lightning.growth.export import SUFFIXES, Format, check_format, export, fold, load, save
from esper_lightning.growth.lifecycle import count_parameters, slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.module import TamiyoModule
from esper_lightning.runtime.console import print_status
from esper_lightning.runtime.nested import iter_tensors
from esper_lightning.runtime.ranks import Ranks, local_world
from esper_lightning.runtime.registry import find_config, is_of_this_package
from esper_lightning.telemetry.events import EVENTS_FILE, STACK_FILE, EventLog
from esper_lightning.telemetry.observer import Observer, join, observe, started

CHECKPOINTS_FOLDER = "checkpoints"
"""Subfolder of a run folder in which Lightning saves checkpoints."""

NETWORK_FILE, PROGRAM_FILE = "network.safetensors", "network.pt2"
FOLDED_FOLDER, STEPS_FILE = "folded", "scores.csv"

NUM_SAMPLES = 8
"""Test samples on which an export is checked; the program keeps them."""

PREDICTED_SAMPLES = 256
"""Test samples in one forward pass."""

THREADS_HELP = """Threads that torch may use for one operator on the CPU. Operators of a small policy and small hosts
are too short to split: on a busy machine waiting threads made such a run ten times slower. Raise it for large hosts."""


class Parser(OneLineParser, LightningArgumentParser):
    """Parser of the settings of a run."""


class SaveFitConfig(SaveConfigCallback):
    """Saves config.yaml in the folder of a run that trains; a refused start, `validate` and `test` leave it alone."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Do nothing: a checkpoint is not restored yet."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().setup(trainer, pl_module, "fit")


class EsperCLI(LightningCLI):
    """LightningCLI with the callbacks, the logger and the checkpoint writer that a run usually has.

    `fit` ends with `test`, unless `model.evaluation.hosts` is 0. Each default is a setting that a config may replace.
    """

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name in SUBCOMMANDS}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--threads_per_operator", type=PositiveInt, default=1, help=THREADS_HELP)
        parser.link_arguments("seed_everything", "data.seed")
        for name in ("gamma", "horizon_is_end"):
            parser.link_arguments(f"model.ppo.{name}", f"data.env.reward.{name}")
        parser.set_defaults({"trainer.callbacks": DEFAULT_CALLBACKS})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)
        config = self.config.get(str(self.config.get("subcommand")), self.config)
        if config.get("ckpt_path") in ("last", "best"):
            name, root = config.ckpt_path, Path(config.trainer.default_root_dir or "runs")
            found = [*root.rglob(f"{CHECKPOINTS_FOLDER}/{name}.ckpt")]
            if not found:
                text = f"there is no run with a {name}.ckpt below {str(root)!r}; name a checkpoint"
                raise ValueError(f"ckpt_path {name}: {text}")
            config.ckpt_path = str(max(found, key=lambda path: path.stat().st_mtime_ns))  # the newest

    def _parse_ckpt_path(self) -> None:
        """Do nothing: the settings of a checkpoint would replace those that the user has given."""

    def before_instantiate_classes(self) -> None:
        threads = self._get(self.config, "threads_per_operator")
        torch.set_num_threads(threads)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # for the other processes of a run

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self._get(self.config_init, "trainer")
        config.callbacks = last_of_each_class(config.callbacks or [])
        if is_torchelastic_launched():  # with another number each process would train alone
            config.devices = local_world()
            config.num_nodes = int(os.environ["WORLD_SIZE"]) // config.devices
        if config.logger in (None, True):
            config.logger = run_logger(config.default_root_dir or "runs", self._get(self.config_init, "ckpt_path"))
        if not sys.stdout.isatty() and not any(isinstance(known, ProgressBar) for known in config.callbacks):
            config.enable_progress_bar = False  # bars fill a file with lines
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ModuleNotFoundError, ValueError) as error:  # no code of the user ran
            raise ValueError(f"trainer: {error}") from error

    def before_fit(self) -> None:
        """Build the hosts and check the closing comparison before anything is written."""
        trainer, evaluation = self.trainer, self.model.evaluation
        self.model.check(self.datamodule)
        self.datamodule.build_for(trainer)
        if evaluation.hosts:
            Comparison(evaluation).check(self.datamodule)

    def after_fit(self) -> None:
        trainer: Any = self.trainer  # Lightning does not declare all attributes
        if self.model.evaluation.hosts and not trainer.fast_dev_run:
            trainer.test(self.model, datamodule=self.datamodule, verbose=False)
        folder = trainer.log_dir  # Lightning wants it to be read on every rank
        if folder is not None and trainer.is_global_zero and trainer.loggers:
            print_status(f"a page about this run: {PROGRAM} report {shlex.quote(os.path.relpath(folder))}")


def last_of_each_class(callbacks: Sequence[Any]) -> list[Any]:
    """Return the callbacks without those of this package that a later one of the same class replaces."""
    last = {type(callback): callback for callback in callbacks}
    return [known for known in callbacks if known is last[type(known)] or not is_of_this_package(type(known))]


def governor_of(trainer: Any) -> GovernorConfig | None:
    """Return the rules of the Governor among the callbacks of a trainer. None: there is no Governor."""
    return next((callback.rules for callback in trainer.callbacks if isinstance(callback, Governor)), None)


def run_logger(root: str | Path, checkpoint: str | Path | None = None) -> TensorBoardLogger:
    """Return the logger of a new run below a folder, or of the run in whose folder a checkpoint lies."""
    # Absolute, because a resumed ModelCheckpoint forgets its best score if its folder is named in another way.
    root, version = Path(root).absolute(), None
    if checkpoint is not None and Path(checkpoint).parent.name == CHECKPOINTS_FOLDER:
        run = Path(checkpoint).absolute().parents[1]
        root, version = run.parent, run.name
    return TensorBoardLogger(root, name="", version=version)


def make_cli(args: list[str], **settings: Any) -> EsperCLI:
    """Return the command line with parsed arguments, after the subcommand that they name has run."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    # Lightning sets this variable so that torch looks for GPUs through NVML, and Adam looks at every step: 130 µs
    # instead of 5, a tenth of a tiny host's step. It is meant for processes that fork later, which none does here.
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    return EsperCLI(
        TamiyoModule,
        HostPoolData,
        args=args,
        parser_class=Parser,
        seed_everything_default=0,
        trainer_defaults={
            "devices": 1,
            "enable_model_summary": False,
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "plugins": [{"class_path": "esper_lightning.runtime.checkpoint.AtomicCheckpointIO"}],
        },
        save_config_callback=SaveFitConfig,
        save_config_kwargs={"overwrite": True},
        auto_configure_optimizers=False,
        **settings,
    )


def load_config(config: str | Path, *overrides: str) -> EsperCLI:
    """Return `model`, `datamodule` and `trainer` of a config, given by path or name, as `fit` makes them.

    `overrides` are further settings, such as `--data.n_envs=8`. Raises ValueError if a setting is not valid.
    """
    try:
        args = ["--config", str(find_config(config)), *overrides]
        return make_cli(args, run=False, parser_kwargs={"exit_on_error": False})
    except (ArgumentError, ValueError) as error:
        raise ValueError(f"{config}: {' '.join(str(error).split())}") from error


def from_config(config: str | Path, *overrides: str) -> tuple[TamiyoModule, HostPoolData]:
    """Return the module and the data module of a config; see `load_config`."""
    cli = load_config(config, *overrides)
    return cli.model, cli.datamodule


def fossilized_copy(env: HostEnv) -> nn.Module:
    """Return a copy of a host's network with its fossilized seeds only, in evaluation mode, on the CPU."""
    network = deepcopy(env.network).cpu().eval()
    for slot in slots_of(network).values():
        if slot.stage is not Stage.FOSSILIZED:
            slot.empty()
    return network


def grow(config: str, controller: str, *, out: str = "runs/grown") -> None:
    """Train one host of a config while a controller grows it, and save the network for use in other programs.

    The folder gets the grown network and its `torch.export` program, both also with seeds folded into the host's
    layers, test scores after each step, and the events of the seeds' lives, from which `report` makes a page.

    Args:
        config: Path of a config, or the name of one of the package, as `digits`.
        controller: A rule (`periodic`, `climbing`, `heuristic`, `wait` …), the import path of your own, the file of a
            schedule (.json), a trained policy (.ckpt or .safetensors), or `tamiyo`, the one of the package.
        out: Folder to write to.
    """
    cli = load_config(config)
    data, rules = cli.datamodule, Comparison(cli.model.evaluation).make_controllers()
    data.build(cli.trainer.strategy.root_device)
    data.set_governor(governor_of(cli.trainer))
    grower = rules.get(controller)
    if grower is None:
        grower = find_controller(controller, "controller", others=list(rules), device=data.pool.device)
    pool = data.make_pool(1, observation=grower.observation if isinstance(grower, LearnedController) else None)
    (rng_seed,) = episode_rng_seeds(data.seed, EVALUATION, 0, n_envs=1)
    folder = Path(out)
    pool.reset([rng_seed])
    bare_host, epochs, ranks = fossilized_copy(pool.envs[0]), count(1), Ranks((1,))
    observer = Observer(pool.space.slot, pool.space.blueprint, horizon=pool.horizon, n_envs=1)
    (folder / FOLDED_FOLDER).mkdir(parents=True, exist_ok=True)
    (folder / EVENTS_FILE).unlink(missing_ok=True)
    log = EventLog(folder / EVENTS_FILE)
    log.write([started(pool, tick=0, hosts=1)])

    def record_epoch(step: StepResult) -> None:
        events, epoch = "".join(f"; {event}" for event in step.events), next(epochs)
        log.write(observer.update(join([observe(pool, step, epoch)], ranks)))
        print_status(
            f"epoch {epoch} of {pool.config.horizon}: validation score {step.metrics.score[0]:.4f}, "
            f"{step.metrics.parameters[0]} parameters{events}"
        )

    play_episode(pool, controller, grower, rng_seeds=[rng_seed], on_step=record_epoch)
    log.close()
    write_grown(pool, bare_host, folder)
    print_status(f"written to {out}")


def write_grown(pool: HostPool, bare_host: nn.Module, folder: Path) -> None:
    """Write the grown network of a pool of one host in all forms, with test scores; `bare_host` takes its weights."""
    env = pool.envs[0]
    network = fossilized_copy(env)
    test = pool.data.test.to(env.device).variant(env.context.variant_index).to(torch.device("cpu")).batch()
    samples = test.inputs[:NUM_SAMPLES]

    @torch.no_grad()
    def predict(network: nn.Module) -> torch.Tensor:
        return torch.cat([next(iter_tensors(network(part))) for part in test.inputs.split(PREDICTED_SAMPLES)])

    expected, rows = predict(network), []

    def measure(step: str, network: nn.Module) -> None:
        outputs, parameters = predict(network), count_parameters(network)
        measures = pool.task.measure(outputs, test.targets)
        score, loss = (values.double().mean().item() for values in (measures.score, measures.loss))
        rows.append([step, score, loss, parameters, (outputs.double() - expected.double()).abs().max().item()])
        print_status(f"{step}: test score {score:.4f}, {parameters} parameters")

    measure("before training", bare_host)
    measure("grown", network)
    save(network, folder / NETWORK_FILE)
    load(bare_host, folder / NETWORK_FILE)
    measure(f"loaded from {NETWORK_FILE}", bare_host)
    export(network, samples, folder / PROGRAM_FILE, "pt2")
    measure(f"program {PROGRAM_FILE}", torch.export.load(folder / PROGRAM_FILE).module())
    for fate in fold(network, samples):
        result = f"folded into {fate.target_layer}" if fate.target_layer else f"not folded: {fate.reason}"
        print_status(f"{fate.slot}: {result}")
    save(network, folder / FOLDED_FOLDER / NETWORK_FILE)
    export(network, samples, folder / FOLDED_FOLDER / PROGRAM_FILE, "pt2")
    measure("folded", network)
    with (folder / STEPS_FILE).open("w", newline="") as file:
        # The last column is the largest difference of an output from those of the grown network.
        header = ["step", "test_score", "test_loss", "parameters", "max_difference"]
        csv.writer(file).writerows([header, *rows])


def export_network(source: str, to: Format, *, out: str | None = None) -> None:
    """Write a grown network as a file that other programs run, and check it on real inputs.

    Args:
        source: Folder that `grow` has written. Torch reads its program: name only folders that you trust.
        to: onnx: a model of ONNX; needs the extra [onnx]. pt2: the program of torch.export that is in the folder.
        out: File to write. None: `network` in the folder, with a suffix.
    """
    check_format(to)
    path = Path(source) / PROGRAM_FILE
    if not is_zipfile(path):
        raise ValueError(f"{path} is missing or damaged; name a folder that `grow` has written")
    program = torch.export.load(path)
    assert program.example_inputs is not None, "`grow` has saved samples with it"
    (samples,), _ = program.example_inputs
    target = Path(source) / f"network{SUFFIXES[to]}" if out is None else Path(out)
    difference = export(program, samples, target, to)
    print_status(f"written to {target}: on {len(samples)} inputs its outputs differ by at most {difference:.2g}")


def report(runs: Sequence[str | Path] = (), *, out: str | Path = "report.html") -> None:
    """Write one page about a run, or about several side by side: what grew, and what it was worth.

    Args:
        runs: Folders of loggers, as `runs/digits/version_0`: of `fit`, `test`, `Grow` or `Stack`, or of a training
            that is compared with one of them. None: the newest run below `runs`.
        out: HTML file to write; it needs no network.

    Raises ValueError if a folder holds no run, or if the extra [report] is missing.
    """
    try:
        from esper_lightning.cli.run_report import write_page
    except ImportError as error:
        raise ValueError(f"report: {error.name} is missing; pip install 'esper-lightning[report]'") from None
    files = [*Path("runs").rglob(EVENTS_FILE), *Path("runs").rglob(STACK_FILE)]
    if not runs and not files:
        raise ValueError("report: there is no run below 'runs'; name the folder of one")
    folders = [Path(run) for run in runs] or [max(files, key=lambda path: path.stat().st_mtime_ns).parent]
    write_page(folders, Path(out), changed_settings)
    print_status(f"written to {out}: {', '.join(map(str, folders))}")


def changed_settings(config: Mapping[str, Any]) -> str:
    """Return the settings of a run's config that differ from their defaults, as YAML; empty if there are none."""
    if not config:
        return ""
    try:
        args = [f"--{name}={json.dumps(config[name])}" for name in ("seed_everything", "trainer", "model", "data")]
        cli = make_cli(args, run=False, parser_kwargs={"exit_on_error": False})
    except (ArgumentError, ValueError, LookupError) as error:  # of another version, or of classes that are not here
        return f"config.yaml cannot be read here: {' '.join(str(error).split())}"
    return cli.parser.dump(cli.config, skip_default=True)
