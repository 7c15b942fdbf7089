"""Epilogue of a GEMM before the result is rounded and stored: arguments and torch operations."""

from typing import NamedTuple

import torch

FP8 = torch.float8_e4m3fn
EPILOGUE_SCHEMA = "Tensor? bias, Tensor? scale_a, Tensor? scale_b, ScalarType? out_dtype"
"""Arguments as ``torch.ops.tileweave.*`` declare them, after all others. None has a default,
because torch does not pass arguments with defaults to gradients."""


class Epilogue(NamedTuple):
    """Epilogue of a call, in the order of the kernels' parameters. A kernel has no parameter for a
    field that is None.

    Attributes:
        bias: (N,), in the type of the result; added to every row.
        scale_a, scale_b: one float32 each; factors of fp8 operands.
        out_dtype: type of the result.
    """

    bias: torch.Tensor | None = None
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors that a kernel receives."""
        return tuple([t for t in self[:3] if t is not None])

    @property
    def scales(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Scales of both operands if they are fp8, else None."""
        if self.scale_a is None or self.scale_b is None:
            return None
        return self.scale_a, self.scale_b

    @property
    def without_bias(self) -> "Epilogue":
        """Epilogue for one rank's partial products, which are still to be summed over ranks."""
        return self._replace(bias=None)

    def multiply(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``a @ b`` with this epilogue, by torch, in ``out`` if given."""
        if self.scales is not None:
            return torch._scaled_mm(
                a, b, *self.scales, self.bias, out_dtype=self.out_dtype, out=out
            )
        if self.bias is None:
            return torch.mm(a, b, out=out)
        return torch.addmm(self.bias, a, b, out=out)

    def add_to(self, c: torch.Tensor) -> None:
        """Add the bias, by torch, to a result that was summed over ranks."""
        if self.bias is not None:
            c += self.bias


NO_EPILOGUE = Epilogue()
