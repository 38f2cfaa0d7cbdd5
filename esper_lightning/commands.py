"""Commands of the program: those of LightningCLI, and small ones, which are functions."""

from collections.abc import Callable
from pathlib import Path

from esper_lightning.cli import PROGRAM, Parser, governor_of, load_config, make_cli
from esper_lightning.config_files import configs, find_config, init
from esper_lightning.console import print_status
from esper_lightning.envs.seeding import EVALUATION, episode_rng_seeds
from esper_lightning.evaluation.comparison import Comparison
from esper_lightning.evaluation.growing import find_controller, grow_host
from esper_lightning.evaluation.networks import export_grown
from esper_lightning.sweep import sweep


def grow(config: str, controller: str, *, out: str = "runs/grown") -> None:
    """Train one host of a config while a controller grows it, and save the network for use in other programs.

    Args:
        config: Path of a config, or the name of one of the package, as `digits`.
        controller: A rule (`periodic`, `climbing`, `heuristic`, `wait` …), the import path of your own, the file of a
            schedule (.json), a trained policy (.ckpt or .safetensors), or `tamiyo`, the one of the package.
        out: Folder for the network, its exported program, the network with folded seeds, accuracies and a figure.
    """
    made = load_config(config)
    data, rules = made.datamodule, Comparison(made.model.evaluation).make_controllers()
    data.build(made.trainer.strategy.root_device)
    data.oversee(governor_of(made.trainer))
    chosen = find_controller(controller, rules, data.pool.device)
    pool = data.make_pool(1, sight=getattr(chosen, "sight", None))  # that of a policy's training
    (rng_seed,) = episode_rng_seeds(data.seed, EVALUATION, 0, n_envs=1)
    grow_host(pool, controller, chosen, rng_seed=rng_seed, folder=Path(out))
    print_status(f"written to {out}")


COMMANDS: dict[str, Callable[..., object]] = {
    "grow": grow,
    "export": export_grown,
    "sweep": sweep,
    "configs": configs,
    "init": init,
}
"""Commands that are functions, by name."""


def run(args: list[str]) -> None:
    """Run the command line with the arguments behind the program's name."""
    if args and args[0] in COMMANDS:
        command = COMMANDS[args[0]]
        parser = Parser(prog=f"{PROGRAM} {args[0]}", description=(command.__doc__ or "").partition("\n")[0])
        # Not by `auto_cli`, which drops an argument that is called config.
        parser.add_function_arguments(command, as_group=False, as_positional=True)
        command(**parser.parse_args(args[1:]).as_dict())
        return
    # One form for both: a config may be named by its name in the package.
    args = [part for arg in args for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    args = [
        str(find_config(arg)) if before in ("--config", "-c") else arg
        for before, arg in zip(["", *args], args, strict=False)
    ]
    epilog = f"Further commands, each with its own --help: {', '.join(COMMANDS)}."
    make_cli(args, parser_kwargs={"prog": PROGRAM, "epilog": epilog})
