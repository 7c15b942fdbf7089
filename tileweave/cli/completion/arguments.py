"""Commands and their arguments, as completion needs them."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

PATHS = ("DIR", "IN", "JSON", "OUT")
"""Names of values that are files or folders, beside all that contain ``FILE``."""


@dataclass(frozen=True)
class Argument:
    """An option or an operand.

    Attributes:
        names: of an option, such as ``--ranks``; empty for an operand.
        help: its effect in a few words.
        value: name of its value; empty if it has none.
        choices: legal values; empty if these are not listed.
        repeats: whether it may have several values.
    """

    names: tuple[str, ...]
    help: str
    value: str
    choices: tuple[str, ...] = ()
    repeats: bool = False

    @property
    def is_path(self) -> bool:
        """True if the value is a file or folder."""
        return self.value in PATHS or "FILE" in self.value


@dataclass(frozen=True)
class Command:
    """A command with its options and its operand, if it has one."""

    name: str
    help: str
    options: tuple[Argument, ...]
    operand: Argument | None


def described(commands: argparse._SubParsersAction) -> list[Command]:
    """Return all commands, in the order of ``--help``."""
    effects = {entry.dest: _short(entry.help) for entry in commands._choices_actions}
    return [_command(name, effects[name], parser) for name, parser in commands.choices.items()]


def _command(name: str, effect: str, parser: argparse.ArgumentParser) -> Command:
    arguments = [_argument(action) for action in parser._actions]
    operands = [argument for argument in arguments if not argument.names]
    options = tuple(argument for argument in arguments if argument.names)
    return Command(name, effect, options, operands[0] if operands else None)


def _argument(action: argparse.Action) -> Argument:
    value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
    choices = tuple(map(str, action.choices or ()))
    text = _short(str(action.help) % vars(action))
    repeats = action.nargs in ("*", "+") or isinstance(action, argparse._AppendAction)
    return Argument(tuple(action.option_strings), text, value, choices, repeats)


def _short(text: str | None) -> str:
    """Return a help text without its details and the example of a command."""
    return re.split("; |: torchrun", text or "")[0]
