"""Launches of a Triton kernel that share most arguments, like those for the layers of one forward."""

from __future__ import annotations

import torch
from triton.compiler import CompiledKernel


class BoundLaunch:
    """Launches of a Triton kernel that differ in an index and in some tensors, like a layer's rows of new tokens.

    Triton's launch binds all arguments and looks up the kernel compiled for what it specializes on: about 10 us of
    Python. It returns the compiled kernel, which can be launched in 1 us but does not compare the arguments with those
    it was compiled for. `BoundLaunch` does: Triton specializes on dtypes, on whether 16 divides an address, and on
    whether an integer is 1, a multiple of 16, or larger than 32 bits. So a compiled kernel serves rows of one dtype,
    address modulo 16 and stride, and an index of 31 bits, which the kernel must list in `do_not_specialize`. The other
    arguments are the same objects in every launch. Tensors are passed as addresses, because Triton asks the driver
    about each tensor.

    Launch hooks are called. Triton's interpreter compiles nothing, so there every launch is an ordinary one.
    """

    def __init__(self, kernel, *shared, **options):
        """`kernel(index, *rows, *strides, *shared)`: strides are those of the rows, without the last of each. `shared`
        includes all constants; tensors in it keep their memory. `options`: launch options like num_warps."""
        self._kernel, self._shared, self._options = kernel, shared, options
        self._launches: dict[tuple, tuple] = {}

    def __call__(self, grid: tuple[int, int, int], index: int, *rows: torch.Tensor) -> None:
        """Launch on the current stream. `rows`: tensors like `[N, H, D]`."""
        addresses = [x.data_ptr() for x in rows]
        key = (grid, index >> 31, *[(x.dtype, a % 16, x.stride()) for x, a in zip(rows, addresses)])
        if (found := self._launches.get(key)) is not None:
            launch, tail = found
            launch(index, *addresses, *tail)
            return
        tail = (*[n for x in rows for n in x.stride()[:-1]], *self._shared)
        compiled = self._kernel[grid](index, *rows, *tail, **self._options)
        if isinstance(compiled, CompiledKernel):
            self._launches[key] = compiled[grid], [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in tail]
