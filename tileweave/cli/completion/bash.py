"""The completion script of bash."""

from __future__ import annotations

from .arguments import Argument, Command

SCRIPT = """\
# Save as ~/.local/share/bash-completion/completions/tileweave
_tileweave() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD - 1]}} words=
    if ((COMP_CWORD == 1)); then
        words='{commands} --help --version'
    else
        case "${{COMP_WORDS[1]}} $previous" in
{values}
        *)
            case "${{COMP_WORDS[1]}} $word" in
{arguments}
            esac
            ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -F _tileweave tileweave
"""


def script(commands: list[Command]) -> str:
    """Return the script."""
    values, arguments = [], []
    for command in commands:
        names = [name for option in command.options for name in option.names]
        arguments.append(f"'{command.name} -'*) words='{' '.join(names)}' ;;")
        if command.operand:
            arguments.append(f"'{command.name} '*) {_values(command.operand)} ;;")
        for option in command.options:
            if option.value:
                pattern = " | ".join(f"'{command.name} {name}'" for name in option.names)
                values.append(f"{pattern}) {_values(option)} ;;")
    return SCRIPT.format(
        commands=" ".join(command.name for command in commands),
        values="\n".join(" " * 8 + line for line in values),
        arguments="\n".join(" " * 12 + line for line in arguments),
    )


def _values(argument: Argument) -> str:
    """Return the statement that completes a value."""
    return "compopt -o default" if argument.is_path else f"words='{' '.join(argument.choices)}'"
