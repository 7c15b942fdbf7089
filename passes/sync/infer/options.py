"""What the user may choose about inferred synchronisation: ``pass_configs`` of ``tw.compile``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from tvm import tirx
from tvm.ir.transform import PassContext

from ....builtins.errors import TileWeaveError

PREFIX = "tileweave."
OPTIONS = "tileweave.options"
"""Attribute of a program: the options it is compiled with, as JSON."""
REUSE = ("auto", "double_buffer", "barrier", "credit")
VERIFY = ("error", "warn", "off")


@dataclass(frozen=True)
class Options:
    """The choices; each is ``tileweave.`` and its name in ``pass_configs``.

    Attributes:
        reuse: how memory becomes free for the next launch: ``double_buffer`` (proven, for
            ``W.alloc_symmetric``), ``credit`` (a reader tells that it has finished), ``barrier``
            (that it has started the next launch), or ``auto``, the first of these that can be.
        granule: tensor name -> elements along each axis that one counter stands for.
        verify: ``error``, or ``warn``, where a program cannot be proven right; ``off`` leaves every
            program as it is, for those that something outside of the kernel orders.
        resident_blocks: blocks of a launch that surely run on a GPU at a time.
        round_bytes: the most memory that the rounds of one tensor take on a rank.
        delays: a seed for random sleeps before signals and after waits, for tests.
    """

    reuse: str = "auto"
    granule: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    verify: str = "error"
    resident_blocks: int = 132
    round_bytes: int = 1 << 28
    delays: int | None = None


def split_options(
    func: tirx.PrimFunc, configs: Mapping[str, Any]
) -> tuple[tirx.PrimFunc, dict[str, Any]]:
    """``func`` with those of ``pass_configs`` that are ours, and the others.

    Raises:
        TileWeaveError: an option that there is not, or a value that it cannot have.
    """
    ours = own_options(configs)
    others = {n: v for n, v in configs.items() if not n.startswith(PREFIX)}
    if not ours:
        return func, others
    return func.with_attr(OPTIONS, tirx.StringImm(json.dumps(ours, sort_keys=True))), others


def own_options(configs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``pass_configs`` that are ours, by their names without the prefix.

    Raises:
        TileWeaveError: an option that there is not, or a value that it cannot have.
    """
    if not isinstance(configs, Mapping) or not all(isinstance(n, str) for n in configs):
        raise TileWeaveError(f"pass_configs={configs!r}; expected a dict, option -> value")
    ours = {n[len(PREFIX) :]: v for n, v in configs.items() if n.startswith(PREFIX)}
    for name, value in configs.items():
        if not name.startswith(PREFIX):
            _require_stock(name, value)
    for name, value in ours.items():
        legal = _LEGAL.get(name)
        if legal is None:
            names = ", ".join(PREFIX + n for n in _LEGAL)
            raise TileWeaveError(f"pass_configs: {PREFIX}{name}; expected {names}")
        if not legal[0](value):
            raise TileWeaveError(f"pass_configs: {PREFIX}{name}={value!r}; expected {legal[1]}")
    return ours


def _require_stock(name: str, value: Any) -> None:
    """Refuse what TileLang knows no option for, before it does."""
    try:
        PassContext(config={name: value})
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        known = PassContext.list_configs()
        if name in known:
            why = str(error).splitlines()[-1]
            raise TileWeaveError(f"pass_configs: {name}={value!r}; {why}") from None
        near = get_close_matches(name, known, n=1, cutoff=0)
        raise TileWeaveError(
            f"pass_configs: {name}; expected an option of TileLang, such as {near[0]}"
        ) from None


def options_of(func: tirx.PrimFunc) -> Options:
    """The options ``func`` is compiled with."""
    if not func.attrs or OPTIONS not in func.attrs:
        return Options()
    fields = json.loads(func.attrs[OPTIONS].value)
    granule = {name: tuple(size) for name, size in fields.pop("granule", {}).items()}
    return Options(**fields, granule=granule)


def is_chosen(func: tirx.PrimFunc, name: str) -> bool:
    """Whether ``pass_configs`` say something about the option."""
    given = func.attrs[OPTIONS].value if func.attrs and OPTIONS in func.attrs else "{}"
    return name in json.loads(given)


def _is_granules(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str)
        and isinstance(size, (tuple, list))
        and all(isinstance(n, int) and n > 0 for n in size)
        for name, size in value.items()
    )


def _one_of(words: tuple[str, ...]) -> tuple:
    return (lambda value: value in words), " or ".join(map(repr, words))


_LEGAL: dict[str, tuple] = {
    "reuse": _one_of(REUSE),
    "granule": (_is_granules, "a dict, tensor name -> elements along each axis, such as (64, 64)"),
    "verify": _one_of(VERIFY),
    "resident_blocks": (lambda value: type(value) is int and value > 0, "a positive integer"),
    "round_bytes": (lambda value: type(value) is int and value >= 0, "bytes, 0 or more"),
    "delays": (lambda value: type(value) is int and value >= 0, "an integer, 0 or more"),
}
