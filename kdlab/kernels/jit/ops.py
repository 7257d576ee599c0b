"""Registration of CUDA ops with torch, as `torch.library.custom_op` does it but at a tenth of its cost a call.

`custom_op` wraps every call in Python that tracks gradients and mutations; kdlab's ops run under inference and say in
their schema what they change, which is what torch.compile, graphs and opcheck read.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kdlab.errors import NotSupported

_LIBRARY = torch.library.Library("kdlab", "FRAGMENT")
_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str}
"""Types of arguments that want nothing of torch's dispatcher, as subclasses of tensors do."""


class CudaOp:
    """One op of namespace `kdlab`: called as the function it was made from, and known to torch as `kdlab::<name>`."""

    def __init__(self, name: str, function: Callable[..., Any], mutates_args: Sequence[str]) -> None:
        """Register `function` for CUDA tensors; its annotations give the schema."""
        self.name, self._function = name, function
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=tuple(mutates_args)))
        _LIBRARY.impl(name, function, "CUDA")
        self._overload = getattr(torch.ops.kdlab, name).default

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register what gives the outputs' shapes and dtypes without running."""
        return torch.library.register_fake(f"kdlab::{self.name}", function, lib=_LIBRARY)

    def __call__(self, *args: Any) -> Any:
        """Run the op; NotSupported where an argument wants a gradient, which no op has."""
        # The compiler comes first: it cannot ask for inference mode, and a graph would break at every op.
        direct = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
        if direct and _are_plain(args) and not _is_watched():
            return self._function(*args)  # the dispatcher takes 5 us and would do nothing but call it
        if torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
            wanted = "no argument that requires a gradient (under torch.no_grad() or with impl='reference' one may)"
            raise NotSupported(self.name, wanted, "one")
        return self._overload(*args)


def _are_plain(args: tuple[Any, ...]) -> bool:
    return getattr(args[0], "is_cuda", False) and _PLAIN.issuperset(map(type, args))


def _is_watched() -> bool:
    """Say whether a mode, a tracer, a function transform or a profiler wants to see calls of ops."""
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    # Tensors of a transform (vmap, functionalize) have torch's own type and no address of their own.
    traced = torch._C._is_tracing() or torch._C._functorch.maybe_current_level() is not None
    return bool(modes or traced or torch.autograd._profiler_enabled())


def cuda_op(name: str, *, mutates_args: Sequence[str] = ()) -> Callable[[Callable[..., Any]], CudaOp]:
    """Return a decorator that makes a function the CUDA implementation of `torch.ops.kdlab.<name>`.

    Args:
        name: of the op.
        mutates_args: names of the tensors that it writes to.
    """
    return lambda function: CudaOp(name, function, mutates_args)
