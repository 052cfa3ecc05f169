"""The command line of ``python -m cf_ops``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cf_ops import _core
from cf_ops.cli import _program as program
from cf_ops.cli import activations, bench, evaluate, generate, info, memorize, serve, stream, sweep

__all__ = ["main"]

_DESCRIPTION = (
    "Makes tokens with a whole model, scores texts, and times both. Without a command it prints versions and backends, "
    "and checks every op against the oracle."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, 1 for a failed check, 2 for bad input, 130 after Ctrl-C."""
    parser = program.Parser(prog=f"python -m {program.PROGRAM}", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"{program.PROGRAM} {_core.version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=program.Parser)
    runs = {
        "generate": generate,
        "stream": stream,
        "eval": evaluate,
        "memorize": memorize,
        "sweep": sweep,
        "activations": activations,
        "bench": bench,
        "serve": serve,
    }
    for name, module in runs.items():
        help = (module.__doc__ or "").partition(": ")[2].partition("\n")[0]
        module.declare(commands.add_parser(name, help=help, description=help))
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(words)
    args.argv = words
    try:
        program.check_output(args)
        code = info.run() if args.command is None else runs[args.command].run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return program.INTERRUPTED
    except BrokenPipeError:
        # What is left in the buffer has nowhere to go when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return program.fail("standard output: cannot be written")
    except (ValueError, OSError, ImportError, MemoryError, NotImplementedError, _core.CfError) as error:
        return program.fail(program.message_of(error))
