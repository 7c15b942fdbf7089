"""``tileweave completion``: print the script that completes commands and options in a shell."""

from __future__ import annotations

import argparse

from . import bash, fish, zsh
from .arguments import described

SCRIPTS = {"bash": bash.script, "zsh": zsh.script, "fish": fish.script}


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = commands.add_parser(
        "completion", help="print a script that completes commands and options in a shell"
    )
    parser.add_argument(
        "shell", metavar="SHELL", choices=tuple(SCRIPTS), help="the shell that reads the script"
    )
    parser.set_defaults(commands=commands)
    return parser


def run(options: argparse.Namespace) -> None:
    """Print the script of a shell. Its first comment says where the shell looks for it."""
    print(SCRIPTS[options.shell](described(options.commands)), end="")
