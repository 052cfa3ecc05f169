"""Files of safetensors, mapped: their tensors' bytes, and new ones that are filled in place."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}
# The elements as numpy has them; it has no bfloat16, whose bits are taken.
STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4"}
_MOST_HEADER = 100_000_000  # bytes, as the format says


class Tensor(NamedTuple):
    """A tensor of a file: its elements' dtype by the format's name, its shape, and its mapped bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def elements(self) -> NDArray[Any]:
        """The elements, mapped; those of bfloat16 are their bits in uint16."""
        return self.data.view(STORED[self.dtype]).reshape(self.shape)


def read(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file by name, and its metadata. Raises ValueError for a file that is damaged."""
    size = os.stat(path).st_size
    if size < 8:
        raise ValueError(f"{path}: expected a file of safetensors, got {size} bytes")
    data = np.memmap(path, np.uint8, mode="r")
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    try:
        if begin > min(size, _MOST_HEADER):
            raise ValueError(f"a header of {begin - 8} bytes")
        header = json.loads(data[8:begin].tobytes())
        metadata = header.pop("__metadata__", {})
        tensors = {name: _tensor(name, entry, data[begin:]) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: expected a file of safetensors, got {error}") from None
    return tensors, metadata


def _tensor(name: str, entry: dict[str, Any], data: NDArray[np.uint8]) -> Tensor:
    first, last = entry["data_offsets"]
    shape = tuple(map(int, entry["shape"]))
    if not 0 <= first <= last <= data.size or last - first != math.prod(shape) * _BYTES[entry["dtype"]]:
        raise ValueError(f"tensor {name!r} of other bytes than its shape needs")
    return Tensor(entry["dtype"], shape, data[first:last])


def create(
    path: str, tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> dict[str, NDArray[Any]]:
    """Makes a file of tensors of these dtypes and shapes, and returns them mapped, to be filled. Those of bfloat16 are
    bits in uint16."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        try:
            # Threads fill mapped pages whose place on the disk is known twice as fast.
            os.posix_fallocate(file.fileno(), 0, 8 + len(text) + end)
        except (AttributeError, OSError):
            pass  # not every file system has it
    made: dict[str, NDArray[Any]] = {}
    for name, (dtype, shape) in tensors.items():
        offset = 8 + len(text) + header[name]["data_offsets"][0]
        kind = np.dtype(STORED[dtype])
        made[name] = np.memmap(path, kind, "r+", offset, shape) if math.prod(shape) else np.empty(shape, kind)
    return made


def to_bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16, ties to even; a NaN stays one."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The values of bfloat16s."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
