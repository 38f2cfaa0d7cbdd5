"""Tab completion by a shell script that contains every option, so that no program is started at a key press.

jsonargparse can generate such a script, too, but it does not terminate, because every torch module is a possible host.
"""

from collections.abc import Iterable, Mapping

SCRIPT = """\
# bash: eval "$({program} {flag})"; in zsh first: autoload -U +X bashcompinit && bashcompinit
_{function}() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$word")); return
  fi
  if [[ "$word" != -* ]]; then
    COMPREPLY=($(compgen -f -- "$word")); return
  fi
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
}}
complete -o filenames -F _{function} {program}
"""


def completion_script(program: str, flag: str, options: Mapping[str, Iterable[str]]) -> str:
    """Return the completion script for bash; zsh can use it through bashcompinit.

    Args:
        program: Name of the program.
        flag: Option that prints the script.
        options: Options of each command, without dashes.
    """
    cases = [
        f'    {command}) COMPREPLY=($(compgen -W "{" ".join(f"--{name}" for name in names)}" -- "$word"));;'
        for command, names in options.items()
    ]
    return SCRIPT.format(
        program=program,
        flag=flag,
        function=program.replace("-", "_"),
        commands=" ".join([*options, "--help", flag]),
        cases="\n".join(cases),
    )
