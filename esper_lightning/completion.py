"""Tab completion: a script for the shell that knows every option by heart, so that a key press starts no program.

(The parser's library can write one, too; with every network that torch has as a possible host it does not end.)
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
    """For bash, and for zsh by its bashcompinit.

    Args:
        program: Its name.
        flag: That prints the script.
        options: Of each command, without dashes.
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
