"""The completion script of fish."""

from __future__ import annotations

from collections.abc import Iterator

from .arguments import Argument, Command

HEAD = "# Save as ~/.config/fish/completions/tileweave.fish"
PROGRAM = "complete -c tileweave"


def script(commands: list[Command]) -> str:
    """Return the script."""
    return "".join(f"{line}\n" for line in _lines(commands))


def _lines(commands: list[Command]) -> Iterator[str]:
    yield HEAD
    yield f"{PROGRAM} -f"
    yield f"{PROGRAM} -n __fish_use_subcommand -s h -l help -d 'print help'"
    yield f"{PROGRAM} -n __fish_use_subcommand -l version -d 'print the version'"
    for command in commands:
        effect = _quoted(command.help)
        yield f"{PROGRAM} -n __fish_use_subcommand -a {command.name} -d {effect}"
    for command in commands:
        after = f"{PROGRAM} -n '__fish_seen_subcommand_from {command.name}'"
        for option in command.options:
            value = f"-r {_values(option)} " if option.value else ""
            yield f"{after} {_names(option)} {value}-d {_quoted(option.help)}"
        if command.operand:
            yield f"{after} {_values(command.operand)}"


def _names(option: Argument) -> str:
    return " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.names)


def _values(argument: Argument) -> str:
    """Return the options that complete a value: files, or a list that may be empty."""
    return "-F" if argument.is_path else f"-f -a {_quoted(' '.join(argument.choices))}"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
