"""Script for tab completion of commands, options, values and files."""

from collections.abc import Sequence

from esper_lightning.cli.options import OptionTable

COMPLETION = "--completion"

SCRIPT_TEMPLATE = """\
# bash: eval "$({program} {flag})"; in zsh first: autoload -U +X bashcompinit && bashcompinit
_{function}() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$word")); return
  fi
  case "$previous" in
    --config|-c|init) COMPREPLY=($(compgen -f -- "$word"; compgen -W "{configs}" -- "$word")); return;;
{values}
  esac
  if [[ "$word" != -* ]]; then
    COMPREPLY=($(compgen -f -- "$word")); return
  fi
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
}}
complete -o filenames -F _{function} {program}
"""


def completion_script(program: str, commands: Sequence[str], table: OptionTable, configs: Sequence[str]) -> str:
    """Return the completion script for bash; zsh can use it through bashcompinit.

    Args:
        program: Name of the program.
        commands: Names of its commands.
        table: Options of the commands.
        configs: Names of configs, which stand beside files.
    """
    choices = {option.name: option.choices for option in table.options if option.choices}
    names = {command: [name for name in table.of(command) if not name.isupper()] for command in commands}
    return SCRIPT_TEMPLATE.format(
        program=program,
        flag=COMPLETION,
        function=program.replace("-", "_"),
        commands=" ".join([*commands, "--help", "--version", COMPLETION]),
        configs=" ".join(configs),
        values="\n".join(
            f'    --{name}) COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word")); return;;'
            for name, words in choices.items()
        ),
        cases="\n".join(
            f'    {command}) COMPREPLY=($(compgen -W "{" ".join(f"--{name}" for name in of)}" -- "$word"));;'
            for command, of in names.items()
            if of
        ),
    )
