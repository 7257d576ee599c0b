"""From what an op passes to a launch to what the driver gets.

Whether types fit a kernel's parameters is looked at once for each combination of types: a launch with one that was seen
converts its values and no more.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kdlab.errors import ArgumentError

LAST_INT32 = 2**31 - 1

_Converter = Callable[[Any], Any] | None
"""What turns an argument of one type into what cuda.core gets; None leaves the argument as it is."""


def _null(_: None) -> int:
    return 0


_CONVERTERS: dict[type, tuple[_Converter, int]] = {
    torch.Tensor: (torch.Tensor.data_ptr, 8),
    type(None): (_null, 8),
    int: (functools.lru_cache(maxsize=4096)(np.int32), 4),
    float: (np.float32, 4),
}
"""By type, and the bytes of the result."""


@dataclass(frozen=True, slots=True)
class Packer:
    """What makes arguments of certain types what the driver gets; see `make_packer`."""

    converters: tuple[_Converter, ...]
    tensors: tuple[int, ...]
    """Places of the tensors."""

    def pack(self, args: tuple[Any, ...], index: int, name: str) -> list[Any]:
        """Return the values of a launch's arguments.

        Args:
            args: of the types that the packer was made for.
            index: of the kernel's GPU.
            name: of the kernel, for messages.

        Raises:
            ArgumentError: a tensor of another device, or an integer that needs more than 32 bits.
        """
        for i in self.tensors:
            if args[i].get_device() != index:
                raise ArgumentError(f"{name}, argument {i}", f"a tensor on cuda:{index}", f"one on {args[i].device}")
        try:
            return [arg if turn is None else turn(arg) for arg, turn in zip(args, self.converters, strict=True)]
        except OverflowError:
            wide = (isinstance(arg, int) and not -LAST_INT32 - 1 <= arg <= LAST_INT32 for arg in args)
            i = list(wide).index(True)  # `args.index` would compare with tensors
            wanted = "an int32 (np.int64(...) makes a wider one)"
            raise ArgumentError(f"{name}, argument {i}", wanted, args[i]) from None


def make_packer(args: tuple[object, ...], sizes: tuple[int, ...], name: str) -> Packer:
    """Return what packs arguments of these types, once it is known that they fit the kernel's parameters.

    Args:
        args: as in `Kernel.launch`.
        sizes: bytes of each parameter.
        name: of the kernel, for messages.

    Raises:
        ArgumentError: an argument does not fit its parameter.
    """
    if len(args) != len(sizes):
        raise ArgumentError(name, f"{len(sizes)} arguments", len(args))
    converters, tensors = [], []
    for i, (arg, size) in enumerate(zip(args, sizes, strict=True)):
        converter: _Converter = None
        have = size  # what cuda.core knows itself, such as a tensor map
        if isinstance(arg, np.generic):
            have = arg.itemsize
        else:
            known = (_CONVERTERS[kind] for kind in type(arg).__mro__ if kind in _CONVERTERS)
            converter, have = next(known, (converter, have))
        if have != size:
            raise ArgumentError(f"{name}, argument {i}", f"a value of {size} bytes", f"{arg!r:.60} of {have} bytes")
        converters.append(converter)
        if isinstance(arg, torch.Tensor):
            tensors.append(i)
    return Packer(tuple(converters), tuple(tensors))
