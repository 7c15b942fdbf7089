"""The language: everything a tile program may say beyond TileLang. ``from tileweave import language
as W``.

``__all__`` of each family lists what it adds."""

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
