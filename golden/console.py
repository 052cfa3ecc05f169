"""What the scripts take from a command line, and say to a person while they work."""

import argparse
import sys

from neox import Refusal


def integer(low, high):
    def parse(text):
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected an integer from {low} to {high}, got {text!r}")
        return value

    return parse


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Refusal(message)


def progress(text):
    """One line on stderr that the next call overwrites; only on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
