"""Shapes of mixtures of experts in ``tileweave bench``: models, routings, and what they move."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..builtins.errors import TileWeaveError
from ..passes.ir.sizes import LARGEST
from .results import MoeShape

if TYPE_CHECKING:
    from .selection import BenchOptions

ITEMSIZE = 2
"""Bytes of a value."""
SETS = 3
"""Number of routings that are drawn for a shape, and used in turn."""
TOKENS = 1, 16, 128, 1024, 4096, 8192
"""Default tokens of each rank."""
ROUTINGS = "uniform", "zipf", "hot"
"""Distributions of choices: all experts equally; the i-th most popular one in proportion to 1 / i;
or one expert by all tokens, and the others equally."""


class Model(NamedTuple):
    """Layer of a model: its experts, the choices of a token, and the extents of an expert's MLP."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int


class Work(NamedTuple):
    """Work of an operator on the rows of the experts.

    Attributes:
        exchanges: how often ranks exchange them.
        products: products of each row with (hidden, intermediate) weights.
        part: which product of the MLP; empty for all.
    """

    exchanges: int
    products: int
    part: str = ""


MODELS = {
    "deepseek-v3": Model(256, 8, 7168, 2048),
    "qwen3-235b": Model(128, 8, 4096, 1536),
    "mixtral-8x7b": Model(8, 2, 4096, 14336),
    "mixtral-8x22b": Model(8, 2, 6144, 16384),
    "gpt-oss-120b": Model(128, 4, 2880, 2880),
}
DEFAULT_MODELS = "deepseek-v3", "qwen3-235b", "mixtral-8x7b", "gpt-oss-120b"


def shapes_of(options: BenchOptions, ranks: int, work: Work) -> list[MoeShape]:
    """Return the shapes of an operator, or of one product of the MLP.

    Raises:
        TileWeaveError: a model or a routing does not exist.
    """
    for routing in options.routings:
        if routing not in ROUTINGS:
            raise TileWeaveError(f"bench: --routing {routing}; expected {', '.join(ROUTINGS)}")
    return [
        shape_of(name, tokens, routing, ranks, work)
        for name in options.shapes or DEFAULT_MODELS
        for routing in options.routings
        for tokens in options.sizes or TOKENS
    ]


def model_of(name: str) -> Model:
    """Return the model of a name or of its extents."""
    model = MODELS.get(name)
    if model is None:
        extents = name.split("x")
        legal = len(extents) == len(Model._fields) and all(
            e.isdecimal() and 1 <= int(e) <= LARGEST for e in extents
        )
        if not legal:
            raise TileWeaveError(
                f"bench: --shapes {name}; expected {', '.join(MODELS)}, or "
                "EXPERTSxTOP_KxHIDDENxINTERMEDIATE"
            )
        model = Model(*map(int, extents))
    if model.top_k > model.experts:
        raise TileWeaveError(
            f"bench: --shapes {name}: a token chooses {model.top_k} experts; expected at most "
            f"{model.experts}"
        )
    return model


def shape_of(name: str, tokens: int, routing: str, ranks: int, work: Work) -> MoeShape:
    """Return a shape with the largest numbers of rows of its routings; no rows if the ranks cannot
    share the experts."""
    model = model_of(name)
    rows = remote_rows = 0
    if model.experts % ranks == 0:
        loads = [load_of(model, tokens, routing, ranks, number) for number in range(SETS)]
        rows, remote_rows = (max(column) for column in zip(*loads, strict=True))
    sent_bytes = ITEMSIZE * work.exchanges * remote_rows * model.hidden
    flops = 2 * work.products * rows * model.hidden * model.intermediate
    return MoeShape(name, *model, tokens, routing, work.part, ranks, rows, sent_bytes, flops)


@lru_cache(16)
def choices_of(model: Model, tokens: int, routing: str, ranks: int, number: int) -> Tensor:
    """Return the experts that the tokens of all ranks choose, (ranks, tokens, top_k), on the CPU.

    They are equal on all ranks and in all runs. No token chooses an expert twice.

    Args:
        number: which of the ``SETS`` routings.
    """
    generator = torch.Generator().manual_seed(number)
    popularity = torch.zeros(model.experts)
    if routing == "zipf":
        popularity = -torch.randperm(model.experts, generator=generator).add(1).float().log()
    elif routing == "hot":
        popularity[int(torch.randint(model.experts, (), generator=generator))] = torch.inf
    # The largest of scores with Gumbel noise are a sample without replacement.
    noise = torch.rand(ranks, tokens, model.experts, generator=generator)
    scores = popularity - noise.clamp_(1e-20, 1 - 1e-7).log().neg().log()
    return scores.topk(model.top_k).indices


class Load(NamedTuple):
    """Load of the busiest rank.

    Attributes:
        rows: rows of the experts of a rank.
        remote_rows: rows that a rank sends to others, or receives from them.
    """

    rows: int
    remote_rows: int


@lru_cache(256)
def load_of(model: Model, tokens: int, routing: str, ranks: int, number: int) -> Load:
    """Return the load of one of the routings."""
    owners = choices_of(model, tokens, routing, ranks, number) // (model.experts // ranks)
    numbers = torch.stack([row.flatten().bincount(minlength=ranks) for row in owners])
    remote = numbers - numbers.diag().diag()
    busiest = max(int(remote.sum(0).max()), int(remote.sum(1).max()))
    return Load(int(numbers.sum(0).max()), busiest)


class Tables(NamedTuple):
    """Order of the rows of one rank for a routing, with experts of all ranks in ``choices``.

    A token is ``rank * tokens + number``.

    Attributes:
        tokens: token of each row, by expert, then by token.
        choices: which of the token's choices each row is.
        experts: expert of each row.
        offsets: end of the rows of each of the rank's experts.
        sent: this rank's choices, as ``token * top_k + choice``, by expert: what an all-to-all
            sends.
        sent_rows, received_rows: rows for and from each rank.
        order: place in what an all-to-all receives, for each row.
    """

    tokens: Tensor
    choices: Tensor
    experts: Tensor
    offsets: Tensor
    sent: Tensor
    sent_rows: list[int]
    received_rows: list[int]
    order: Tensor


def tables_of(choices: Tensor, experts: int, rank: int) -> Tables:
    """Return the tables of a rank, by definition.

    Args:
        choices: (ranks, tokens, top_k), on the CPU.
        experts: of all ranks.
    """
    ranks, tokens, top_k = choices.shape
    per_rank = experts // ranks
    own = (choices.flatten() // per_rank == rank).nonzero().flatten()
    by_expert = choices.flatten()[own].argsort(stable=True)
    rows = own[by_expert]
    of_rows = choices.flatten()[rows]
    sources = rows // (tokens * top_k)
    # An all-to-all receives by rank, then by expert.
    arrival = (sources * experts + of_rows).argsort(stable=True)
    sent = choices[rank].flatten().argsort(stable=True)
    return Tables(
        tokens=rows // top_k,
        choices=rows % top_k,
        experts=of_rows,
        offsets=(of_rows - rank * per_rank).bincount(minlength=per_rank).cumsum(0).int(),
        sent=sent,
        sent_rows=(choices[rank].flatten() // per_rank).bincount(minlength=ranks).tolist(),
        received_rows=sources.bincount(minlength=ranks).tolist(),
        order=arrival.argsort(),
    )
