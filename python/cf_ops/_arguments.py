"""Arguments of models: what is taken, and one line for what is not."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def kind_of(value: object) -> str:
    """A value's type, as messages name it."""
    module, name = type(value).__module__, type(value).__qualname__
    return name if module == "builtins" else f"{module}.{name}"


def integer(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """An integer. Raises TypeError for another type, ValueError for one outside least .. most."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {_short(value)}") from None
    if (least is not None and number < least) or (most is not None and number > most):
        expected = f"at most {most}" if least is None else f"{least} to {most}"
        raise ValueError(f"{name}: expected {expected}, got {number}")
    return number


def real(name: str, value: Any) -> float:
    """A number. Raises TypeError for another type."""
    try:
        if isinstance(value, (bool, str, bytes, bytearray)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise TypeError(f"{name}: expected a number, got {_short(value)}") from None


def flag(name: str, value: object) -> bool:
    """True or False. Raises TypeError for another type."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {_short(value)}")
    return bool(value)


def text(name: str, value: object) -> str:
    """A text. Raises TypeError for another type."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a text, got {kind_of(value)}")
    return value


def path_of(name: str, value: object) -> str:
    """A path. Raises TypeError for another type, ValueError for one that is empty or that UTF-8 cannot hold."""
    try:
        path = os.fsdecode(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: expected a path or a name, got {kind_of(value)}") from None
    if not path or "\0" in path:
        raise ValueError(f"{name}: expected a path or a name, got {path!r}")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}: expected a path that UTF-8 can hold, got {path!r}") from None
    return path


def dtype_name(dtype: Any) -> str:
    """The name of a dtype that is given as a name, numpy's or torch's."""
    name = str(dtype).removeprefix("torch.")
    if isinstance(dtype, type):
        try:
            return np.dtype(dtype).name
        except TypeError:
            pass
    return name


def is_one(value: object) -> bool:
    """Whether a value is a text, or bytes, or whatever else has no items that may be ids."""
    return isinstance(value, (str, bytes, bytearray, memoryview, Mapping)) or not isinstance(value, Iterable)


def ids_of(name: str, value: Any) -> list[int]:
    """Ids from a list, an array or a tensor of the shape (n) or (1, n). Raises TypeError for another type, ValueError
    for another shape."""
    if is_one(value) or isinstance(value, (set, frozenset)):
        hint = ", whose 'input_ids' are ids" if isinstance(value, Mapping) and "input_ids" in value else ""
        raise TypeError(f"{name}: expected a text or ids, got {kind_of(value)}{hint}")
    items = value.tolist() if hasattr(value, "tolist") else list(value)
    if not isinstance(items, list):
        raise TypeError(f"{name}: expected a text or ids, got one {kind_of(items)}")
    if len(items) == 1 and isinstance(items[0], (list, tuple)):
        items = list(items[0])
    for place, item in enumerate(items):
        if type(item) is int:
            continue
        several = "; generate_batch() takes several prompts" if name == "prompt" else ""
        if isinstance(item, str):
            raise TypeError(f"{name}: expected a text or ids, got a list of texts{several}")
        if not is_one(item) and getattr(item, "ndim", 1) > 0:
            raise ValueError(f"{name}: expected ids in one row, got {len(items)} rows{several}")
        items[place] = integer(f"{name}[{place}]", item)
    return items


def row_of_ids(name: str, value: Any) -> np.ndarray[Any, Any]:
    """The same as an array; numpy's own are not copied."""
    array = value if isinstance(value, np.ndarray) else np.array(ids_of(name, value), np.int64)
    return array[0] if array.ndim == 2 and array.shape[0] == 1 else array


def _short(value: object) -> str:
    shown = " ".join(repr(value).split())
    return shown if len(shown) <= 60 else kind_of(value)
