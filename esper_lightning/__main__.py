"""Entry point of `esper-lightning` and `python -m esper_lightning`."""

import sys
import traceback
from pathlib import Path

from esper_lightning import __version__
from esper_lightning.cli.launch import COMMANDS, PROGRAM, SUBCOMMANDS, command_function, command_parser
from esper_lightning.runtime.console import DivergedError, quieter_lightning
from esper_lightning.runtime.registry import find_config


@quieter_lightning()
def main(args: list[str] | None = None) -> None:
    """Run the command line with `args`, by default those of the process.

    A wrong setting is one line on stderr and exit code 2, a policy that is not finite one line and exit code 3. Every
    other error, also one of the user's code, is a traceback.
    """
    if str(Path.cwd()) not in sys.path:
        # So that a config can name the user's own modules; last, so that it hides no package.
        sys.path.append(str(Path.cwd()))

    try:
        run(sys.argv[1:] if args is None else args)
    except (ValueError, RuntimeError, DivergedError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        # By the package: the folder of callbacks is a link, whose files lie elsewhere, and `-m` renames this module.
        is_ours = (frame.f_globals.get("__package__") or "").partition(".")[0] == "esper_lightning"
        # torch's own report of the weights that a checkpoint lacks, or has beside those of the policy
        is_about_weights = str(error).startswith("Error(s) in loading state_dict")
        is_users_mistake = is_about_weights or (is_ours and isinstance(error, ValueError))
        if not is_users_mistake and not isinstance(error, DivergedError):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(3 if isinstance(error, DivergedError) else 2) from None


def run(args: list[str]) -> None:
    """Run the command line with the arguments behind the program's name.

    Raises ValueError if there is no such command.
    """
    name = args[0] if args else ""
    if name in COMMANDS:
        arguments = command_parser(name).parse_args(args[1:]).as_dict()
        command_function(name)(**arguments)
        return
    if name == "--version":
        print(f"{PROGRAM} {__version__}")
        return
    if name not in SUBCOMMANDS and not name.startswith("-"):
        unknown = f"there is no command {name!r}" if name else "name a command"
        raise ValueError(f"{unknown}; commands are {', '.join([*SUBCOMMANDS, *COMMANDS])}")
    # One form for both: a config may be named by its name in the package.
    args = [part for arg in args for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    args = [
        str(find_config(arg)) if before in ("--config", "-c") else arg
        for before, arg in zip(["", *args], args, strict=False)
    ]
    from esper_lightning.cli.commands import make_cli  # imported late: importing torch and Lightning takes seconds

    epilog = f"Further commands, each with its own --help: {', '.join(COMMANDS)}."
    make_cli(args, parser_kwargs={"prog": PROGRAM, "epilog": epilog})


if __name__ == "__main__":
    main()
