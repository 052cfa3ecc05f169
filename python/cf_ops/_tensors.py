"""numpy arrays and torch tensors as the compiled ops take them: an address, a dtype's name, a shape; never a copy."""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol, SupportsIndex, TypeVar

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


def library_of(call: str, name: str, tensor: object) -> str:
    """``numpy`` or ``torch``, the library that made a tensor. Raises TypeError for anything else.

    ``call`` and ``name`` say in the error whose argument it is. torch is not imported: whoever holds a torch tensor has
    done that.
    """
    if type(tensor) in (np.ndarray, np.memmap):
        return "numpy"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return "torch"
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    raise TypeError(f"{call}: '{name}' must be a numpy array or a torch tensor, got {kind}")


def describe(
    call: str, name: str, tensor: Any, library: str, first: str, is_written: bool, device: object = None
) -> Described:
    """The address, dtype and shape of a tensor that an op may use where it lies.

    Parameters
    ----------
    call, name: whose argument the tensor is, for errors.
    library, first: the library that made the call's other tensors, and the name of the first of them.
    is_written: whether the op writes the tensor.
    device: the torch.device of the call's other tensors; any that has ops where there is none.

    Raises
    ------
    TypeError: the tensor is neither a numpy array nor a torch tensor.
    ValueError: the tensor comes from the other library, is on another device than the others, is not contiguous, has
        another byte order, or is written and is read-only or requires a gradient.
    NotImplementedError: the tensor is neither on the CPU nor on a GPU of CUDA's.
    """
    check_tensor(call, name, tensor, library, first, is_written, device)
    if library == "numpy":
        return tensor.__array_interface__["data"][0], _numpy_name(tensor.dtype), tensor.shape
    return tensor.data_ptr(), torch_name(tensor.dtype), tuple(tensor.shape)


def check_tensor(
    call: str, name: str, tensor: Any, library: str, first: str, is_written: bool, device: object = None
) -> None:
    """Refuses what describe() refuses."""
    got = library_of(call, name, tensor)
    if got != library:
        raise ValueError(f"{call}: '{name}' is a {got} tensor, expected {library} as '{first}' is")
    fault = _numpy_fault(tensor, is_written) if got == "numpy" else _torch_fault(tensor, is_written, first, device)
    if fault:
        error, text = fault
        raise error(f"{call}: '{name}' {text}")


def empty(shape: Sequence[int], like: T, dtype: str | None = None) -> T:
    """A tensor of the same library, on the same device and, unless another is named, of the same dtype as ``like``. Its
    values are undefined."""
    made: Any
    if isinstance(like, np.ndarray):
        made = np.empty(shape, like.dtype if dtype is None else dtype)
    else:
        new_empty = getattr(like, "new_empty")
        made = new_empty(shape) if dtype is None else new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))
    return made  # type: ignore[no-any-return]


_Fault = tuple[type[Exception], str] | None
"""What is wrong with a tensor: the error and its text behind the tensor's name."""


@cache
def _numpy_name(dtype: np.dtype[Any]) -> str:
    """A dtype's name, which numpy makes anew each time."""
    return dtype.name


def _numpy_fault(array: Any, is_written: bool) -> _Fault:
    flags = array.flags
    if not flags.c_contiguous:
        return ValueError, f"has strides {array.strides} in bytes, expected a contiguous array"
    if not array.dtype.isnative:
        return ValueError, f"has dtype {array.dtype.str}, expected this machine's byte order"
    if is_written and not flags.writeable:
        return ValueError, "is read-only, expected an array that can be written"
    return None


@cache
def torch_name(dtype: Any) -> str:
    """The name of a torch.dtype without the module's."""
    return str(dtype).removeprefix("torch.")


def _torch_fault(tensor: Any, is_written: bool, first: str, device: object) -> _Fault:
    torch: Any = sys.modules["torch"]
    if tensor.layout != torch.strided:
        return ValueError, f"has layout {tensor.layout}, expected torch.strided"
    if tensor.device.type not in ("cpu", "cuda"):
        return NotImplementedError, f"is on {tensor.device}, expected cpu or cuda, which alone have ops"
    if device not in (None, tensor.device):
        return ValueError, f"is on {tensor.device}, expected {device} as '{first}' is"
    if not tensor.is_contiguous():
        return ValueError, f"has strides {tuple(tensor.stride())}, expected a contiguous tensor"
    if is_written and tensor.requires_grad and torch.is_grad_enabled():
        return ValueError, "requires a gradient, expected a tensor that can be written without one"
    return None


def are_plain(tensors: Sequence[Any], index: int) -> bool:
    """Whether check_tensor() refuses none of a call's tensors on GPU `index`, were they only read. This is faster."""
    torch: Any = sys.modules["torch"]
    kind, strided = torch.Tensor, torch.strided
    for t in tensors:
        if not (isinstance(t, kind) and t.is_cuda and t.get_device() == index and t.layout is strided):
            return False
        if not t.is_contiguous():
            return False
    return True


def integer(call: str, name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """An integer argument. Raises TypeError for another type, ValueError for a value outside least .. most."""
    if type(value) is int:  # a protocol takes microseconds to look up
        number = value
    elif isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{call}: {name} must be an integer, got {value!r}")
    else:
        number = operator.index(value)
    if (least is not None and number < least) or (most is not None and number > most):
        expected = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{call}: {name} must be {expected}, got {number}")
    return number


def require_torch(who: str) -> Any:
    """The module torch. ``who`` says in the ImportError what needs it."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise ImportError(f"{who} needs torch, which is not installed: pip install torch") from None
