"""The command lines of the programs: arguments, missing packages, progress."""

import argparse
import importlib.util
import json
import os
import sys
import unittest.mock

MOST_JSON_BYTES = 1 << 27


class Refusal(Exception):
    """Bad arguments or input, in one line."""


def require(*packages):
    """Refuses to go on without these packages."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise Refusal(f"needs {', '.join(missing)}, which {sys.executable} does not have")


def require_numpy(program):
    """Ends the program where numpy is missing: every program calls this before it imports numpy. A program that was
    asked for its help goes on with a stand-in: printing the help computes nothing."""
    if sys.modules.get("numpy"):
        return
    try:
        require("numpy")
    except Refusal as refusal:
        if {"-h", "--help"} & set(sys.argv):
            sys.modules["numpy"] = unittest.mock.MagicMock()
            return
        print(f"{program}: {refusal}", file=sys.stderr)
        sys.exit(2)


def read_json_file(path):
    """The text of a JSON file, and its content. Refuses a file beyond MOST_JSON_BYTES before it is read."""
    try:
        if (size := os.path.getsize(path)) > MOST_JSON_BYTES:
            raise Refusal(f"{path}: expected at most {MOST_JSON_BYTES} bytes of JSON, got {size}")
        with open(path, encoding="utf-8") as file:
            text = file.read()
        return text, json.loads(text)
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{path}: not JSON: {error}") from None


def integer(low, high):
    """The type of an argument that is an integer from low to high."""

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
    """Raises a Refusal for bad arguments. Prints its description and epilog as they are."""

    def __init__(self, **options):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message):
        raise Refusal(message)


def progress(text):
    """Prints one line on stderr, which the next call overwrites, if stderr is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
