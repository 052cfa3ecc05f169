"""Files of results: written under a temporary name and renamed, so that none is ever half written."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """Yields a temporary name beside `path`. At the block's end the file of that name becomes `path` and takes the mode
    of the file that it replaces. An error in the block removes the temporary file and leaves `path` as it was."""
    path = os.path.realpath(path)
    handle, temporary = tempfile.mkstemp(prefix=".cf-", suffix=".tmp", dir=os.path.dirname(path))
    os.close(handle)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, stat.S_IMODE(os.stat(path).st_mode) if os.path.exists(path) else 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_text(path: str, text: str) -> None:
    """Writes a text file."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        file.write(text)


def write_json(path: str, value: Any) -> None:
    """Writes a value as JSON."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: str) -> dict[str, Any]:
    """An object in a JSON file. Raises ValueError where the file holds anything else."""
    with open(path, encoding="utf-8") as file:
        try:
            value = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path}: expected JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def check_same(path: str, settings: dict[str, Any]) -> bool:
    """Whether the work whose settings lie at `path` can go on: False where there are none. Raises ValueError where they
    are others than `settings`."""
    if not os.path.exists(path):
        return False
    found = read_json(path)
    for name in sorted({*found, *settings}):
        if found.get(name) != settings.get(name):
            raise ValueError(
                f"{path}: expected the settings of this call, to go on with its results: {name} is "
                f"{_short(found.get(name))}, and {_short(settings.get(name))} was asked"
            )
    return True


def _short(value: Any) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
