"""Files of token ids: mapped, so that no more of them is read than is used."""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPES = ("uint16", "int32", "uint32", "int64")  # of the ids in a file without a header


def map_rows(path: str, row: int | None = None, dtype: str = "uint16") -> NDArray[Any]:
    """The ids of a file, (sequences, ids of each).

    A .npy file has one sequence a row, or all in one row, `row` ids each. Any other file has bare ids of `dtype` in
    little-endian order, `row` of them a sequence: Pythia's training data has 2049. Raises ValueError for a file that
    holds anything else, with what was expected, and OSError for one that cannot be read.
    """
    ids = _map_npy(path) if path.endswith(".npy") else _map_bare(path, dtype)
    if ids.ndim == 2 and row in (None, ids.shape[1]):
        return ids
    if ids.ndim == 2:
        raise ValueError(f"{path}: expected {row} ids a sequence, got the shape {ids.shape}")
    if row is None:
        raise ValueError(f"{path}: expected the number of ids of a sequence, such as row=2049 of Pythia's data")
    if ids.size % row:
        raise ValueError(f"{path}: expected a multiple of {row} ids, got {ids.size}")
    return ids.reshape(-1, row)


def map_ids(path: str) -> NDArray[Any]:
    """The ids of a .npy file in one row, mapped. Raises what map_rows() raises."""
    ids = _map_npy(path)
    if ids.ndim == 2 and ids.shape[0] != 1:
        raise ValueError(f"{path}: expected ids in one row, got {ids.shape}")
    return ids.reshape(-1)


def check_rows(name: str, ids: NDArray[Any]) -> NDArray[Any]:
    """Refuses what is no array (sequences, ids of each) of integers."""
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"{name}: expected integers (sequences, ids of each), got {ids.dtype} of the shape {ids.shape}"
        )
    return ids


def _map_npy(path: str) -> NDArray[Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns of headers that are refused below
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # numpy lets through what zipfile, tokenize and others raise
        raise ValueError(f"{path}: expected a .npy file of ids: {error}") from None
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
        got = f"{ids.dtype} of the shape {ids.shape}" if isinstance(ids, np.ndarray) else "several arrays"
        raise ValueError(f"{path}: expected integers in one or two dimensions, got {got}")
    return ids


def _map_bare(path: str, dtype: str) -> NDArray[Any]:
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected {', '.join(DTYPES)}, got {dtype!r}")
    kind = np.dtype(dtype).newbyteorder("<")
    size = os.stat(path).st_size
    if size == 0 or size % kind.itemsize:
        raise ValueError(f"{path}: expected ids of {kind.itemsize} bytes each, got {size} bytes")
    return np.memmap(path, kind, mode="r")
