"""Everything a tile program may use beyond TileLang: ``from tileweave import language as W``."""

from .builtins.language import *  # noqa: F403
