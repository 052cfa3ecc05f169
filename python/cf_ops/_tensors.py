"""numpy arrays and torch tensors as the compiled ops take them: an address, a dtype's name, a shape; never a copy."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np


class Tensor(Protocol):
    """A numpy array or a torch tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


T = TypeVar("T", bound=Tensor)

Described = tuple[int, str, tuple[int, ...]]
"""A tensor's address, the name of its dtype, its shape."""


def library_of(name: str, tensor: object) -> str:
    """``numpy`` or ``torch``, the library that made a tensor. ``name`` says in a TypeError whose argument it is.

    torch is not imported: whoever holds a torch tensor has done that.
    """
    if type(tensor) in (np.ndarray, np.memmap):
        return "numpy"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return "torch"
    raise TypeError(f"{name} must be a numpy array or a torch tensor, got {_kind(tensor)}")


def describe(name: str, tensor: object, *, like: tuple[str, str], is_written: bool) -> Described:
    """The address, dtype and shape of a tensor that an op may use where it lies.

    Parameters
    ----------
    name: whose argument the tensor is, for errors: ``attention: 'q'``.
    like: the library that made the call's other tensors, and the name of the first of them.
    is_written: whether the op writes the tensor.

    Raises
    ------
    TypeError: the tensor is neither a numpy array nor a torch tensor.
    ValueError: the tensor comes from the other library, is not contiguous, has another byte order, or is written and
        is read-only or requires a gradient.
    NotImplementedError: the tensor is on a device for which this installation has no backend.
    """
    library, first = like
    got = library_of(name, tensor)
    if got != library:
        raise ValueError(f"{name} is a {got} tensor, expected {library} as {first} is")
    return (_describe_numpy if library == "numpy" else _describe_torch)(name, tensor, is_written)


def empty(shape: Sequence[int], like: T, dtype: str | None = None) -> T:
    """A tensor of the same library, on the same device and, unless another is named, of the same dtype as ``like``. Its
    values are undefined."""
    made: Any
    if isinstance(like, np.ndarray):
        made = np.empty(shape, like.dtype if dtype is None else dtype)
    else:
        torch: Any = sys.modules["torch"]
        wanted = like.dtype if dtype is None else getattr(torch, dtype)
        made = torch.empty(tuple(shape), dtype=wanted, device=getattr(like, "device"))
    return made  # type: ignore[no-any-return]


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _describe_numpy(name: str, array: Any, is_written: bool) -> Described:
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} has strides {array.strides} in bytes, expected a contiguous array")
    if not array.dtype.isnative:
        raise ValueError(f"{name} has dtype {array.dtype.str}, expected this machine's byte order")
    if is_written and not array.flags.writeable:
        raise ValueError(f"{name} is read-only, expected an array that can be written")
    return array.__array_interface__["data"][0], array.dtype.name, array.shape


def _describe_torch(name: str, tensor: Any, is_written: bool) -> Described:
    torch: Any = sys.modules["torch"]
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} has layout {tensor.layout}, expected torch.strided")
    if tensor.device.type != "cpu":
        raise NotImplementedError(f"{name} is on {tensor.device}, expected cpu: this installation has the CPU backend")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tuple(tensor.stride())}, expected a contiguous tensor")
    if is_written and tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, expected a tensor that can be written without one")
    return tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def require_torch(who: str) -> Any:
    """The module torch. ``who`` says in the ImportError what needs it."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise ImportError(f"{who} needs torch, which is not installed: pip install torch") from None
