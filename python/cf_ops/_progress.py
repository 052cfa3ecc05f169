"""How far long work has come: a bar of tqdm where that is installed, else a line of our own."""

from __future__ import annotations

import importlib
import os
import sys
import time
from types import TracebackType
from typing import Any

_AFTER_S = 0.5  # shorter work shows nothing
_BAR = 30
_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"  # of tqdm


class Progress:
    """A bar on stderr, such as "scoring [#####.....]  37%", which the block's end clears.

    shown: whether it is shown; None where stderr is a terminal.
    """

    def __init__(self, label: str, shown: bool | None = None) -> None:
        self._label = label
        self._shown = -1  # the percentage on the terminal
        self._begin = time.monotonic()
        self._is_on = _is_terminal() if shown is None else shown
        self._tqdm: Any = None

    def __enter__(self) -> Progress:
        return self

    def set(self, done: int, total: int) -> None:
        """Says how much of the work is done."""
        percent = 100 * done // max(1, total)
        if not self._is_on or percent == self._shown or time.monotonic() - self._begin < _AFTER_S:
            return
        if self._shown < 0:
            self._tqdm = _tqdm_bar(self._label)
        self._shown = percent
        if self._tqdm is not None:
            self._tqdm.n = percent
            self._tqdm.refresh()
            return
        bar = "#" * (percent * _BAR // 100)
        # A character in the last column makes some terminals begin a new line.
        self._print(f"{self._label} [{bar:.<{_BAR}}] {percent:3d}%"[: max(0, _columns() - 1)])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._tqdm is not None:
            self._tqdm.close()
        elif self._shown >= 0:
            self._print("")

    @staticmethod
    def _print(line: str) -> None:
        try:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        except OSError:
            pass  # the terminal is gone


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80


def _is_terminal() -> bool:
    try:
        return os.isatty(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):  # stderr is missing or is no file
        return False


def _tqdm_bar(label: str) -> Any:
    """A bar of 100 steps; None without tqdm, or without a stderr."""
    try:
        tqdm: Any = importlib.import_module("tqdm")
    except ImportError:
        return None
    if sys.stderr is None:
        return None
    return tqdm.tqdm(total=100, desc=label, leave=False, unit="%", bar_format=_FORMAT)
