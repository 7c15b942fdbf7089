"""The language beside TileLang's: ``from tileweave import language as W``."""

from __future__ import annotations

from .atomics import *
from .barriers import *
from .bulk import *
from .debug import *
from .memory import *
from .multimem import *
from .put_get import *
from .ranks import *
from .signals import *
from .symmetric import *
from .tile_order import *
