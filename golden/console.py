"""What the scripts say to a person while they work."""

import sys


def progress(text):
    """One line on stderr that the next call overwrites; only on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
