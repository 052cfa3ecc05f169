"""GPTQ weights on a GPU: packed once, and kept with the object that stands for the weight."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from cf_ops import _core

GPTQ_PARTS = ("qweight", "qzeros", "scales", "g_idx")
W = TypeVar("W")


class PackedForms:
    """What the tensors of a weight were packed into, on each GPU and in each order of rows. Copies of the object are
    packed anew."""

    __slots__ = ("_forms",)  # no part of __dict__, by which copies are made and compared
    _forms: dict[tuple[int, tuple[int, int]], tuple[object, int, _core.DeviceWeight]]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__

    def packed(
        self,
        bound: _core.BoundOp,
        number: int,
        device: int,
        stream: int,
        addresses: Sequence[int],
        allocate: Callable[[int], Any],
    ) -> _core.DeviceWeight:
        """The weight as ``bound``'s GPTQ weight of that number, for launches on a stream."""
        parts = [getattr(self, part) for part in GPTQ_PARTS]
        state = [(part.data_ptr(), -1 if part.is_inference() else part._version) for part in parts]
        key = device, bound.row_order
        try:
            forms = self._forms
        except AttributeError:
            forms = {}
            object.__setattr__(self, "_forms", forms)
        known, home, form = forms.get(key, (None, 0, None))
        if form is None or known != state:
            form = bound.pack(number, device, stream, addresses, allocate)
            forms[key] = state, stream, form
        elif home != stream:
            # After the memory is freed, the allocator may use it again in the order of its own stream.
            torch: Any = sys.modules["torch"]
            form.memory.record_stream(torch.cuda.current_stream(device))
        return form


_Key = tuple[object, ...]
_kept: dict[int, tuple[weakref.ref[Any], dict[_Key, Any]]] = {}


def kept(make: Callable[..., W], qweight: Any, qzeros: Any, scales: Any, g_idx: Any, **scalars: object) -> W:
    """make(qweight=..., ..., **scalars) for parts that come one by one with every call: the same object for the same
    tensors of a GPU, as long as qweight lives. ``g_idx`` may be a function that makes the tensor."""
    is_made = callable(g_idx)
    if not getattr(qweight, "is_cuda", False):
        part = g_idx() if is_made else g_idx
        return make(qweight=qweight, qzeros=qzeros, scales=scales, g_idx=part, **scalars)
    key = (
        *(qweight.data_ptr(), qweight.shape, qzeros.data_ptr(), qzeros.shape, scales.data_ptr(), scales.shape),
        *((0, None) if is_made else (g_idx.data_ptr(), g_idx.shape)),
        *scalars.items(),
    )
    number = id(qweight)
    owner, made = _kept.get(number, (None, {}))
    if owner is None or owner() is not qweight:
        made = {}
        _kept[number] = weakref.ref(qweight, lambda _: _kept.pop(number, None)), made
    weight: W | None = made.get(key)
    if weight is None:
        # The kept object shares the tensors' memory and not the tensors: holding qweight would keep it alive for ever.
        own = {"qweight": qweight.detach(), "qzeros": qzeros.detach(), "scales": scales.detach()}
        weight = made[key] = make(**own, g_idx=g_idx() if is_made else g_idx.detach(), **scalars)
    return weight
