"""How far long work has come, on a terminal alone."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType

_AFTER_S = 0.5  # shorter work shows nothing
_BAR = 30


class Progress:
    """A line on stderr such as "scoring [#####.....]  37%", which the block's end clears. Where stderr is no terminal,
    nothing is printed."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._shown = -1  # the percentage on the terminal
        self._begin = time.monotonic()
        try:
            self._terminal = os.isatty(sys.stderr.fileno())
        except (AttributeError, OSError, ValueError):  # stderr is missing or is no file
            self._terminal = False

    def __enter__(self) -> Progress:
        return self

    def set(self, done: int, total: int) -> None:
        """Says how much of the work is done."""
        percent = 100 * done // max(1, total)
        if not self._terminal or percent == self._shown or time.monotonic() - self._begin < _AFTER_S:
            return
        self._shown = percent
        bar = "#" * (percent * _BAR // 100)
        # A character in the last column makes some terminals begin a new line.
        self._print(f"{self._label} [{bar:.<{_BAR}}] {percent:3d}%"[: max(0, _columns() - 1)])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._shown >= 0:
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
