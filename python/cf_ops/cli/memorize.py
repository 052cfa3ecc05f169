"""``python -m cf_ops memorize``: how many sequences a model continues word for word."""

from __future__ import annotations

import argparse
import time

from cf_ops._memorize import memorize
from cf_ops._token_files import DTYPES, map_rows
from cf_ops.cli import _program as program
from cf_ops.model import USUAL_SLOTS

_MOST = 1 << 20


def declare(parser: argparse.ArgumentParser) -> None:
    program.add_model(parser)
    parser.add_argument(
        "--tokens",
        required=True,
        metavar="FILE",
        help="token ids: a .npy file with a sequence a row, or in one row; any other file has bare ids",
    )
    parser.add_argument(
        "--row", type=program.integer(2, _MOST), metavar="N", help="ids of a sequence: 2049 in Pythia's training data"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="uint16", help="of bare ids, little-endian (default uint16)")
    parser.add_argument("--context", type=program.integer(1, _MOST), default=32, metavar="N", help="ids that are read")
    parser.add_argument(
        "--continuation", type=program.integer(1, _MOST), default=32, metavar="N", help="ids that are made and compared"
    )
    parser.add_argument("--first", type=program.integer(0, 1 << 40), default=0, metavar="N", help="the first sequence")
    parser.add_argument("--count", type=program.integer(1, 1 << 40), metavar="N", help="sequences; all when left out")
    parser.add_argument("--slots", type=program.integer(1, _MOST), help="sequences that run at once; 64 when left out")
    parser.add_argument(
        "--exact-only", action="store_true", help="end a sequence at the first id that differs: exact match alone"
    )
    parser.add_argument(
        "--never", type=_never, metavar="IDS", help="ids that are not chosen, or none; eos_token_id when left out"
    )
    parser.add_argument(
        "--out",
        type=program.output_file,
        metavar="FILE",
        help="results, .csv or .npy; where an earlier run was interrupted, it goes on",
    )


def run(args: argparse.Namespace) -> int:
    length = args.context + args.continuation
    rows = map_rows(args.tokens, args.row, args.dtype)
    count = args.count or max(0, rows.shape[0] - args.first)
    slots = args.slots or min(USUAL_SLOTS, max(1, count))
    model = program.open_model(args, slots, length)
    begun = time.perf_counter()
    made = memorize(
        model,
        rows,
        context=args.context,
        continuation=args.continuation,
        first=args.first,
        count=args.count,
        slots=slots,
        exact_only=args.exact_only,
        never=args.never,
        out=args.out,
    )
    total_s = time.perf_counter() - begun
    memorized = int(made.exact.sum())
    table = [("sequences", f"{made.exact.size}"), ("memorised", f"{memorized} ({memorized / made.exact.size:.3%})")]
    table += [("mean prefix of equal ids", f"{made.prefix.mean():.6g} of {args.continuation}")]
    table += [] if args.exact_only else [("mean accuracy", f"{made.accuracy.mean():.6g}")]
    program.print_table(["what", model.activation], table)
    report = program.about("memorize", args, model)
    report |= {"tokens": args.tokens, "first": args.first, "sequences": int(made.exact.size), "memorized": memorized}
    report |= {"context": args.context, "continuation": args.continuation, "slots": slots, "total_s": total_s}
    report |= {"mean_prefix": float(made.prefix.mean())}
    report |= {} if args.exact_only else {"mean_accuracy": float(made.accuracy.mean())}
    program.write_json(args.json, report)
    return program.OK


def _never(text: str) -> list[int]:
    return [] if text == "none" else program.integers(0, 2**31 - 1)(text)
