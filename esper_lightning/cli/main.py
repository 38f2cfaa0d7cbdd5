"""Command line: LightningCLI with the defaults of this project, and a one-line message for every user error."""

import importlib
import inspect
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from math import isnan
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace, set_parsing_settings
from jsonargparse.typing import PositiveInt
from lightning import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from torch.distributed import is_torchelastic_launched

from esper_lightning.checkpointing.atomic_io import AtomicCheckpointIO
from esper_lightning.checkpointing.policy_file import names_policy_alone, read_policy
from esper_lightning.checkpointing.validate import IDENTITY_KEY, check_identity, open_checkpoint, policy_parts
from esper_lightning.cli import PROGRAM
from esper_lightning.cli.export import COMMAND as EXPORT
from esper_lightning.cli.export import run_export
from esper_lightning.cli.front import prepare
from esper_lightning.cli.imports import IMPORTS_HELP, import_parts
from esper_lightning.cli.names import nearest_name
from esper_lightning.cli.parser import Parser, link_reward
from esper_lightning.cli.sweep import COMMAND as SWEEP
from esper_lightning.cli.sweep import run_sweep
from esper_lightning.cli.trust import CONFIG_OPTION, TRUST_OPTION, settings_beside_checkpoint, trusted_packages
from esper_lightning.cli.unique_keys import refuse_duplicate_keys
from esper_lightning.console import print_status, quiet_lightning
from esper_lightning.datamodules.hosts import HostPoolData
from esper_lightning.envs.seeding import check_rng_seed
from esper_lightning.errors import one_line_errors, user_code_told_apart
from esper_lightning.evaluation.checkpoints import check_distinct, path_list
from esper_lightning.module import MONITORED_METRICS, TamiyoModule, run_identity
from esper_lightning.plugins import IMPORTS
from esper_lightning.process import BEFORE_TRAINING, exits_on_signals, is_first_process
from esper_lightning.provenance import RUN_FILE, ConfigRecord, job_name
from esper_lightning.ranks import LOCAL_WORLD_VARIABLE, local_world
from esper_lightning.trainer import CHECKPOINTS_FOLDER, EsperTrainer, run_folder

CALLBACKS = {
    "rollout_state": "esper_lightning.callbacks.RolloutState",
    "telemetry": "esper_lightning.callbacks.Telemetry",
    "governor": "esper_lightning.callbacks.Governor",
    "progress": "esper_lightning.callbacks.ProgressReport",
    "evaluation": "esper_lightning.callbacks.Evaluation",
    # This order matters: the checkpoints of `latest` and `preemption` include the current state of `best`.
    "best": "lightning.pytorch.callbacks.ModelCheckpoint",
    "latest": "lightning.pytorch.callbacks.ModelCheckpoint",
    "preemption": "esper_lightning.callbacks.Preemption",
}
"""Import paths of the callbacks of every run; each is configured under its key. The package never imports them."""

LOGGER_QUEUE_SIZE = 1000
"""Maximum number of TensorBoard points waiting to be written; with torch's default of 10, ticks wait for the disk."""

CALLBACK_DEFAULTS = {
    # Two ModelCheckpoints, because one that tracks the best does not save the last epoch unless it is the best.
    "latest.filename": "latest",
    "latest.save_on_train_epoch_end": True,
    "latest.enable_version_counter": False,
    "best.filename": "best",
    "best.monitor": "rollout/objective",
    "best.mode": "max",
    "best.save_on_train_epoch_end": True,
    "best.enable_version_counter": False,
}
"""Defaults of callback settings, by dotted name."""

REFUSED_SETTINGS = {
    "max_steps": "it would cut a resumed rollout short; use trainer.max_epochs",
    "gradient_clip_val": "manual optimization ignores it; use model.ppo.max_grad_norm",
    "accumulate_grad_batches": "a batch is a tick of host training; use model.ppo.minibatches",
    "overfit_batches": "a batch is a tick of host training; use data.env.horizon",
    "val_check_interval": "there is no validation loop; hosts are validated every tick",
    "limit_train_batches": "a rollout must be whole; use data.env.horizon",
    "fast_dev_run": "a rollout must be whole; use configs/smoke.yaml",
    "max_time": "it would cut a rollout short; stop the run with SIGTERM, which saves it",
}
"""Trainer settings that would break a run, with the reason for each."""

THREADS_VARIABLE = "OMP_NUM_THREADS"

DDP = "ddp"
"""Strategy of Lightning with which several processes train."""

MAX_THREADS = 1024
"""Largest accepted `threads_per_operator`; no machine has more cores."""

RESERVED_CHECKPOINT_NAMES = frozenset({"last", "best", "hpc", "registry"})
"""Values of `ckpt_path` that Lightning gives a meaning of its own, refused: with some it silently starts a new run."""

POLICY_OPTIONS = ("more", "rivals", "transfer", "stand_ins")
"""Options of `evaluate` that only a comparison with a trained policy has."""

THREADS_HELP = """Threads that torch may use for one operator on the CPU. Operators of a small policy and small hosts
are too short to split: on a busy machine waiting threads made such a run ten times slower. Raise it for large hosts."""


TRUST_HELP = """Packages of your own, with commas between them, that the config.yaml beside a checkpoint may name.
Without it that file may name tasks and hosts of this project and networks of torchvision.models. A config that you name
by --config may run any code."""


class EsperCLI(LightningCLI):
    """`fit`, `evaluate`, `information` and `grow`, with the callbacks, the run folder and checks of this project."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        with (
            exits_on_signals(self._what_a_signal_stops),
            user_code_told_apart(self._settings),
            restored_variables(THREADS_VARIABLE, LOCAL_WORLD_VARIABLE),
        ):
            super().__init__(*args, **settings)

    def _settings(self) -> Any:
        """Return the settings of the command, or None while they are not known."""
        config, command = getattr(self, "config", None), getattr(self, "subcommand", None)
        return config if config is None or command is None else config[command]

    def _what_a_signal_stops(self) -> str:
        """Return what the line about a signal says; while the policy trains, `Preemption` handles signals."""
        trainer = getattr(self, "trainer", None)
        if trainer is None:
            return BEFORE_TRAINING
        return trainer.moment if self.subcommand == "fit" else f"before `{self.subcommand}` was over"

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the trainer's methods that are subcommands, each with its arguments that are not settings."""
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
            "evaluate": {"model", "datamodule"},
            "information": {"model", "datamodule"},
            "grow": {"model", "datamodule"},
        }

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "evaluate":
            parser.add_argument(TRUST_OPTION, type=str | None, default=None, help=TRUST_HELP)
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--threads_per_operator", type=PositiveInt, default=1, help=THREADS_HELP)
        parser.add_argument(f"--{IMPORTS}", type=str | list[str] | None, default=None, help=IMPORTS_HELP)
        parser.link_arguments("seed_everything", "data.seed")
        link_reward(parser)
        for key, callback in callback_classes().items():
            parser.add_lightning_class_args(callback, key)
        parser.set_defaults(CALLBACK_DEFAULTS)

    def before_instantiate_classes(self) -> None:
        with one_line_errors():
            self._check_settings()
        assert self.subcommand is not None, "the program has no other way to run"
        config = self.config[self.subcommand]
        torch.set_num_threads(config.threads_per_operator)
        if self.processes > 1:
            # Else Lightning's launcher would choose another number of threads per operator than threads_per_operator.
            os.environ[THREADS_VARIABLE] = str(config.threads_per_operator)
            os.environ[LOCAL_WORLD_VARIABLE] = str(config.trainer.devices)

    def _check_settings(self) -> None:
        assert self.subcommand is not None, "the program has no other way to run"
        config = self.config[self.subcommand]
        defaults = self._parser(self.subcommand).get_defaults()
        for name, group in vars(defaults).items():
            if isinstance(group, Namespace) and not isinstance(config[name], Namespace):
                raise ValueError(f"{name} must be a group of settings, got {config[name]!r:.50}")
        for name, reason in REFUSED_SETTINGS.items():
            if config.trainer[name] != defaults.trainer[name]:
                raise ValueError(f"trainer.{name} cannot be set: {reason}")
        self._check_processes(config.trainer)
        if config.trainer.precision not in (None, 32, "32", "32-true"):
            raise ValueError(
                f"trainer.precision must be 32, got {config.trainer.precision}: Tamiyo is too small to gain"
            )
        check_accelerator(config.trainer.accelerator)
        if config.threads_per_operator > MAX_THREADS:
            raise ValueError(f"threads_per_operator must be at most {MAX_THREADS}, got {config.threads_per_operator}")
        if config.latest.monitor is not None:
            raise ValueError("latest.monitor cannot be set: `latest` is the last rollout; set best.monitor")
        check_monitor(config.best.monitor, own_callbacks=bool(config.trainer.callbacks))
        check_host_arguments(config.data.host)
        for name, value in vars(config.as_flat()).items():
            if isinstance(value, str) and "\0" in value:
                raise ValueError(f"{name} holds a NUL character; correct it")
            if isinstance(value, str | Path):
                check_is_text(name, value)
            if isinstance(value, float) and isnan(value):
                raise ValueError(f"{name} is not a number; give one, or leave it out for its default")
        if config.trainer.max_epochs is None or config.trainer.max_epochs < 1:
            raise ValueError(f"trainer.max_epochs must be at least 1 rollout, got {config.trainer.max_epochs}")

    def _check_processes(self, settings: Namespace) -> None:
        """Set the number of processes: that of torchrun if it started this one, and 1 for all commands but `fit`.

        Raises ValueError if the settings ask for another way to train in several processes than DDP.
        """
        if settings.strategy not in ("auto", DDP):
            raise ValueError(f"trainer.strategy must be auto or {DDP}, got {settings.strategy}")
        for name in ("devices", "num_nodes"):
            if not str(settings[name]).isdecimal() or int(settings[name]) < 1:
                raise ValueError(f"trainer.{name} must be a number of processes, got {settings[name]}")
            settings[name] = int(settings[name])
        if self.subcommand != "fit":
            if settings.devices * settings.num_nodes > 1:
                print_status(f"`{self.subcommand}` runs in one process; trainer.devices and num_nodes are for `fit`")
            settings.devices = settings.num_nodes = 1
        elif is_torchelastic_launched():
            check_torchrun()
            settings.devices = local_world()
            settings.num_nodes = int(os.environ["WORLD_SIZE"]) // settings.devices
        self.processes = settings.devices * settings.num_nodes
        settings.strategy = DDP if self.processes > 1 else "auto"

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments, find and check the checkpoints that they name; `evaluate` takes its run's settings."""
        with one_line_errors():  # checked before Lightning uses the values, which would end in a traceback
            self.opened: dict[str, dict[str, Any]] = {}
            full_args = args_with_run_settings(args, self._open)
            import_parts(args if full_args is None else full_args)
            self.config = parser.parse_args(args if full_args is None else full_args)
            config = self.config[self.config.subcommand]
            if full_args is None and config.get("trust") is not None:
                raise ValueError(
                    f"{TRUST_OPTION} is for the config.yaml beside a checkpoint; leave it out, since a config that is "
                    f"named by {CONFIG_OPTION} may name any package"
                )
            if isinstance(config.seed_everything, bool):
                raise ValueError(f"seed_everything must be a number, got {config.seed_everything}")
            check_rng_seed("seed_everything", config.seed_everything)
            if config.get("weights_only") is False:
                raise ValueError("weights_only cannot be switched off: a checkpoint must not be able to run code")
            if self.config.subcommand == "fit" and job_name() is not None:
                interrupted = find_interrupted(root_folder(config.trainer.default_root_dir))
                if interrupted is not None:
                    print_status(f"going on from {interrupted}, which this job of torchrun began")
                    config.ckpt_path = interrupted
            self.saved_identity: dict[str, Any] | None = None
            if config.get("ckpt_path") is not None:
                status_prefix = "evaluating" if self.config.subcommand == "evaluate" else "going on from"
                root = root_folder(config.trainer.default_root_dir)
                config.ckpt_path = find_checkpoint(str(config.ckpt_path), root, status_prefix)
                self.saved_identity = self._open(config.ckpt_path)[IDENTITY_KEY]
            if self.config.subcommand == "evaluate":
                config.more, config.rivals = path_list(config.more), path_list(config.rivals)
                if config.ckpt_path is None:
                    check_without_checkpoint(config, args)
                else:
                    paths = [config.ckpt_path, *config.more, *config.rivals]
                    for path in paths:
                        self.opened[path] = policy_parts(self._open(path))
                    check_distinct(paths)

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would read the checkpoint again and take settings from it."""

    def _open(self, path: str) -> dict[str, Any]:
        """Return the content of a checkpoint, which a command reads once. Raises ValueError if it is not valid."""
        if path not in self.opened:
            reads_policy = names_policy_alone(path) and self.config.subcommand == "evaluate"
            self.opened[path] = (read_policy if reads_policy else open_checkpoint)(path)
        return self.opened[path]

    def instantiate_classes(self) -> None:
        with one_line_errors():
            try:
                super().instantiate_classes()
            except TypeError as error:
                if "must be a mapping" not in str(error):
                    raise
                assert self.subcommand is not None, "the program has no other way to run"
                null_groups = self._null_groups(
                    self.config[self.subcommand], self._parser(self.subcommand).get_defaults()
                )
                raise ValueError(
                    f"null stands where settings belong; leave out what is null of {null_groups}"
                ) from error

    def _null_groups(self, config: Namespace, defaults: Namespace, prefix: str = "") -> list[str]:
        """Return the dotted names of groups of settings that are null."""
        names = []
        for name, group in vars(defaults).items():
            if isinstance(group, Namespace) and isinstance(config[name], Namespace):
                names += self._null_groups(config[name], group, f"{prefix}{name}.")
            elif isinstance(group, Namespace) and config[name] is None:
                names.append(f"{prefix}{name}")
        return names

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self._get(self.config_init, "trainer")
        if self.subcommand != "fit":
            config["logger"] = False  # other commands write their own result files
            config["default_root_dir"] = str(root_folder(config["default_root_dir"]))
        elif config["logger"] in (None, True):
            checkpoint = self._get(self.config_init, "ckpt_path")
            config["logger"] = make_logger(root_folder(config["default_root_dir"]), checkpoint)
        if config["enable_progress_bar"] is False:
            self._get(self.config_init, "progress").show = "nothing"
        config["enable_progress_bar"] = False  # Lightning's progress bar counts batches instead of rollouts
        plugins = config["plugins"] or []
        config["plugins"] = [*(plugins if isinstance(plugins, list) else [plugins]), AtomicCheckpointIO(self.opened)]
        trainer = super().instantiate_trainer(**kwargs)
        assert isinstance(trainer, EsperTrainer), "the command line names this class"
        trainer.opened = self.opened
        return trainer

    def before_fit(self) -> None:
        """Build the hosts before anything is written, so that settings that do not fit together are reported first."""
        with one_line_errors():
            self._build()
            if self.saved_identity is not None:
                check_identity(self.saved_identity, run_identity(self.model, self.datamodule))

    def _build(self) -> None:
        self.model.check(self.datamodule)
        if self.saved_identity is not None and not self._get(self.config_init, "transfer", False):
            self.datamodule.keep_blueprints(self.saved_identity)
        trainer = self.trainer
        self.datamodule.build(trainer.strategy.root_device, rank=trainer.global_rank, world=trainer.world_size)
        comparison = self._get(self.config_init, "evaluation")
        for pool in self.datamodule.pools.values():
            comparison.check(pool)
        comparison.check_controllers(self.datamodule)

    def before_evaluate(self) -> None:
        """Build the hosts before the weights of any checkpoint are loaded."""
        with one_line_errors():
            comparison = self._get(self.config_init, "evaluation")
            if comparison.hosts == 0:
                raise ValueError("evaluation.hosts is 0, so there is nothing to evaluate; give at least 2")
            if self._get(self.config_init, "ckpt_path") is None:
                comparison.check_without_policy()
                print_status("no checkpoint: rules and schedules alone")
            self._build()

    def before_information(self) -> None:
        """Build the hosts before any episode is played."""
        with one_line_errors():
            self._build()

    def before_grow(self) -> None:
        """Build the hosts before the host of the command is grown."""
        with one_line_errors():
            self._build()


@contextmanager
def restored_variables(*names: str) -> Iterator[None]:
    """Restore environment variables at the end of a `with` block."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}


def check_host_arguments(host: Any) -> None:
    """Raise ValueError if an argument of the host's class is null although its default is another value.

    The parser takes null for every argument of a class that is called later.
    """
    if not (isinstance(host, Namespace) and isinstance(host.get("init_args"), Namespace)):
        return
    module, _, name = host.class_path.rpartition(".")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    for argument, value in vars(host.init_args).items():
        default = parameters[argument].default if argument in parameters else None
        if value is None and default is not None and default is not inspect.Parameter.empty:
            raise ValueError(
                f"data.host.init_args.{argument} is null; give a value, or leave it out for its default, {default}"
            )


def check_accelerator(accelerator: Any) -> None:
    """Raise ValueError if the trainer is to run on a GPU, and torch finds none."""
    devices = {"cuda": torch.cuda, "mps": torch.mps}
    wanted = list(devices) if accelerator == "gpu" else [accelerator]
    if all(name in devices and devices[name].device_count() == 0 for name in wanted):
        raise ValueError(f"trainer.accelerator is {accelerator}, and torch finds no GPU here; set cpu, or leave it out")


def check_is_text(name: str, value: str | Path) -> None:
    """Raise ValueError if a text holds bytes that are no UTF-8: neither TensorBoard nor a config can name such a path.

    Python stands for each such byte of a command line or a path with half a character (a surrogate).
    """
    try:
        str(value).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{name} {str(value)!r:.300} holds bytes that are no UTF-8; rename the folder or file"
        ) from None


def check_monitor(monitor: str | None, *, own_callbacks: bool) -> None:
    """Raise ValueError if no metric has the name `best.monitor`: best.ckpt would never be written.

    With callbacks of the user, which may log any metric, print a warning instead.
    """
    if monitor is None or monitor in MONITORED_METRICS:
        return
    near = nearest_name(monitor, MONITORED_METRICS)
    metrics = f"did you mean {near!r}?" if near else f"there are: {', '.join(MONITORED_METRICS)}"
    if not own_callbacks:
        raise ValueError(f"best.monitor {monitor!r} is not a metric; {metrics}")
    print_status(f"best.ckpt is written only if one of your callbacks logs best.monitor, {monitor!r}; {metrics}")


def callback_classes() -> dict[str, type[Callback]]:
    """Return the classes of `CALLBACKS`, by key."""
    paths = {key: path.rpartition(".") for key, path in CALLBACKS.items()}
    return {key: getattr(importlib.import_module(module), name) for key, (module, _, name) in paths.items()}


def root_folder(default_root_dir: str | Path | None) -> Path:
    """Return the folder that contains the run folders."""
    return Path(default_root_dir or "runs")


def args_with_run_settings(args: Sequence[str], check: Callable[[str], object]) -> list[str] | None:
    """Return the arguments of `evaluate` with the settings in the config.yaml of the checkpoint's run.

    They are checked first, since the run may be from elsewhere; see `settings_beside_checkpoint`. Returns None for
    other commands, and for arguments with a config or without a checkpoint. `check` is called with the path of the
    checkpoint and raises ValueError if it is not valid.

    Raises ValueError if the run folder of the checkpoint has no config.yaml that can be trusted.
    """
    if not args or args[0] != "evaluate":
        return None
    if any(arg.partition("=")[0] == CONFIG_OPTION for arg in args):
        return None
    trusted = trusted_packages(option_value(TRUST_OPTION, args))
    checkpoint_name = option_value("--ckpt_path", args)
    if checkpoint_name is None:
        return None
    if names_policy_alone(checkpoint_name):
        raise ValueError(
            f"ckpt_path {checkpoint_name!r} is a policy without its run; give the hosts by --config, and --transfer "
            f"true"
        )
    path = find_checkpoint(checkpoint_name, root_folder(option_value("--trainer.default_root_dir", args)), "evaluating")
    check(path)
    config = run_folder(path) / "config.yaml"
    if not config.is_file():
        raise ValueError(
            f"there are no settings beside checkpoint {path!r}: {config} is missing; give --config, or, if `train` of "
            f"Python made the run, call esper_lightning.evaluate({path!r}, data) with its hosts"
        )
    groups = {"model": TamiyoModule, "data": HostPoolData, **callback_classes()}
    settings = settings_beside_checkpoint(config, groups, trusted)
    print_status(f"settings of {config}")
    return [args[0], CONFIG_OPTION, settings, *args[1:], "--ckpt_path", path]


def check_without_checkpoint(config: Namespace, args: Sequence[str]) -> None:
    """Raise ValueError if the options of `evaluate` need a checkpoint, or if a config has replaced the one given."""
    if option_value("--ckpt_path", args) is not None:
        raise ValueError("the config names no checkpoint and replaces --ckpt_path; give --ckpt_path behind --config")
    for name in POLICY_OPTIONS:
        if config[name]:
            raise ValueError(f"--{name} needs a trained policy; give --ckpt_path")


def option_value(flag: str, args: Sequence[str]) -> str | None:
    """Return the value of the last occurrence of a flag on the command line, or None."""
    value = None
    for arg, following in zip(args, [*args[1:], None], strict=True):
        if arg == flag:
            value = following
        elif arg.startswith(f"{flag}="):
            value = arg.removeprefix(f"{flag}=")
    return value


def find_checkpoint(checkpoint_name: str, root: Path, status_prefix: str) -> str:
    """Return the path of a checkpoint; the name `latest` stands for the newest latest.ckpt below `root`.

    Raises ValueError if there is none, or if the name has a special meaning in Lightning.
    """
    if checkpoint_name != "latest":
        if checkpoint_name in RESERVED_CHECKPOINT_NAMES or checkpoint_name.startswith("registry:"):
            raise ValueError(
                f"ckpt_path {checkpoint_name!r} is not known here; give latest, or the path of a .ckpt file"
            )
        return checkpoint_name
    found = [path for path in root.rglob("checkpoints/latest.ckpt") if path.is_file()]
    if not found:
        raise ValueError(f"ckpt_path latest: there is no run with a latest.ckpt below {str(root)!r}; name a checkpoint")
    newest = max(found, key=lambda path: (path.stat().st_mtime_ns, path))
    print_status(f"{status_prefix} {newest}")
    return str(newest)


def check_torchrun() -> None:
    """Raise ValueError if torchrun may start the processes again, and they could not go on together.

    They meet in a store that outlives them, where a process that was started again may read the address of one that has
    died (https://github.com/pytorch/pytorch/issues/135712). With the variable, each start has a store of its own.
    Processes on several machines find the run that they began by the name of the job.
    """
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0:
        return
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ValueError(
            "torchrun --max-restarts: processes that are started again may wait for addresses of those before; set the "
            "environment variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all machines, before torchrun"
        )
    if job_name() is None:
        raise ValueError(
            "torchrun --max-restarts on several machines: processes that are started again find their run by the name "
            "of the job; give torchrun --rdzv-id NAME, another one for each run"
        )


def find_interrupted(root: Path) -> str | None:
    """Return the newest latest.ckpt below `root` of a run that this job of torchrun began; None if there is none.

    Runs that have ended normally do not count. The processes of a job must all find the same run. So nothing that
    differs between machines decides, such as torchrun's number of restarts, which every machine counts for itself.
    """
    found = []
    for checkpoint in root.rglob(f"{CHECKPOINTS_FOLDER}/latest.ckpt"):
        record = run_folder(checkpoint) / RUN_FILE
        content = json.loads(record.read_text()) if record.is_file() else {}
        if content.get("job") == job_name() and not content.get("finished"):
            found.append(checkpoint)
    return str(max(found, key=lambda path: path.stat().st_mtime_ns)) if found else None


def make_logger(root: Path, checkpoint: str | None) -> TensorBoardLogger:
    """Return a logger with a new run folder below `root`, or with the run folder of `checkpoint` when resuming.

    A checkpoint outside a `checkpoints/` folder gets a new run folder.
    """
    check_is_text("the folder of the run,", (root if checkpoint is None else run_folder(checkpoint)).absolute())
    if checkpoint is not None and Path(checkpoint).parent.absolute().name == CHECKPOINTS_FOLDER:
        run = run_folder(checkpoint)
        return TensorBoardLogger(run.parent, name="", version=run.name, max_queue=LOGGER_QUEUE_SIZE)
    return NewRunLogger(root, name="", max_queue=LOGGER_QUEUE_SIZE)


class NewRunLogger(TensorBoardLogger):
    """Logger that creates the folder `version_N` of a new run when its number is first asked for.

    Creating it is what makes the number this run's: no other process can create the same folder.
    """

    def _get_next_version(self) -> int:
        if not is_first_process():
            return super()._get_next_version()  # not used: the folder is that of rank 0
        for number in count(super()._get_next_version()):
            try:
                Path(self.root_dir, f"version_{number}").mkdir(parents=True)
            except FileExistsError:  # another process was faster
                continue
            return number
        raise AssertionError("unreachable: there is no last number")


def run_unprepared(args: list[str]) -> None:
    """Run the command line in a process of a sweep, with arguments that `front.prepare` has not seen."""
    quiet_lightning()
    run(prepare(args))


def run(args: list[str]) -> None:
    """Parse and check the arguments that `front.prepare` has let pass, then run the command."""
    # Lightning sets this variable so that torch looks for GPUs through NVML, and Adam looks at every step: 130 µs
    # instead of 5, a tenth of a tiny host's step. It is meant for processes that fork later, which none does here.
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    if args[:1] == [EXPORT]:  # it has no settings in common with the other commands
        run_export(args[1:])
        return
    if args[:1] == [SWEEP]:
        run_sweep(args[1:], run_unprepared)
        return
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    refuse_duplicate_keys()
    EsperCLI(
        TamiyoModule,
        HostPoolData,
        args=args,
        parser_class=Parser,
        parser_kwargs={"prog": PROGRAM},
        seed_everything_default=0,
        trainer_defaults={"devices": 1, "enable_model_summary": False, "log_every_n_steps": 1},
        save_config_callback=ConfigRecord,
        trainer_class=EsperTrainer,
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,  # settings come only from the command line, never from a checkpoint
    )
