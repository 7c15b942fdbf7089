"""What is done to the sums of products, in fp32, before they are rounded and stored.

As arguments of an operator, as steps of a tile program, and by torch.
"""

from typing import NamedTuple

import tilelang.language as T
import torch

SCHEMA = "Tensor? bias"
"""The arguments as ``torch.ops.tileweave.*`` declare them, behind all others. None has a
default: torch does not show arguments with defaults to gradients."""


class Epilogue(NamedTuple):
    """What a call asks for, in the order of the kernels' parameters; None is left out of them.

    Attributes:
        bias: (N,), in the type of the result; is added to every row.
    """

    bias: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What a kernel gets."""
        return tuple(t for t in self if t is not None)

    @property
    def without_bias(self) -> "Epilogue":
        """What becomes of the products of one rank that are still to be summed over ranks."""
        return self._replace(bias=None)

    def multiply(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``a @ b`` and what is asked for, by torch; in ``out`` if given."""
        if self.bias is None:
            return torch.mm(a, b, out=out)
        return torch.addmm(self.bias, a, b, out=out)

    def add_to(self, c: torch.Tensor) -> None:
        """The bias, to what was summed over ranks, by torch."""
        if self.bias is not None:
            c += self.bias


NOTHING = Epilogue()


@T.macro
def add_bias(total, bias, n):
    """``total[i, j] += bias[n + j]``; columns behind the end of ``bias`` stay as they are."""
    row = T.alloc_fragment((total.shape[1],), bias.dtype)
    T.copy(bias[n], row)
    for i, j in T.Parallel(*total.shape):
        total[i, j] += row[j]
