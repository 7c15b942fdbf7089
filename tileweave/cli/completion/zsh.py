"""The completion script of zsh."""

from __future__ import annotations

import re

from .arguments import Argument, Command

SCRIPT = """\
#compdef tileweave
# Save as _tileweave in a folder of $fpath
_tileweave() {{
    local curcontext=$curcontext state line
    local -a commands=(
{commands}
    )
    _arguments -C '(- *)'{{-h,--help}}'[print help]' '(- *)--version[print the version]' \\
        ':command:->command' '*::argument:->argument'
    case $state in
    command) _describe command commands ;;
    argument)
        case $line[1] in
{arguments}
        esac
        ;;
    esac
}}
if [[ $funcstack[1] == _tileweave ]]; then _tileweave "$@"; else compdef _tileweave tileweave; fi
"""


def script(commands: list[Command]) -> str:
    """Return the script."""
    described = [_quoted(f"{command.name}:{command.help}") for command in commands]
    return SCRIPT.format(
        commands="\n".join(" " * 8 + line for line in described),
        arguments="\n".join(" " * 8 + _arguments(command) for command in commands),
    )


def _arguments(command: Command) -> str:
    specs = [_quoted(spec) for option in command.options for spec in _option(option)]
    if command.operand:
        star = "*" if command.operand.repeats else ""
        specs.append(_quoted(f"{star}:{_values(command.operand)}"))
    return f"{command.name}) _arguments {' '.join(specs)} ;;"


def _option(option: Argument) -> list[str]:
    star = "*" if option.repeats else ""
    value = f":{_values(option)}" if option.value else ""
    return [f"{star}{name}[{_escaped(option.help)}]{value}" for name in option.names]


def _values(argument: Argument) -> str:
    """Return the message and the action that complete a value; the action may be a space."""
    choices = f"({' '.join(argument.choices)})" if argument.choices else " "
    return f"{_escaped(argument.value)}:{'_files' if argument.is_path else choices}"


def _escaped(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
