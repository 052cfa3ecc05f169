"""``python -m cf_ops eval``: the perplexity of a text."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cf_ops.cli import _program as program


def declare(parser: argparse.ArgumentParser) -> None:
    program.add_model(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", metavar="FILE", help="a text in UTF-8, encoded by the checkpoint's tokenizer")
    source.add_argument("--tokens", metavar="FILE.npy", help="token ids in one row")
    parser.add_argument("--context", type=program.integer(2, 1 << 20), default=2048, help="ids that a window holds")
    parser.add_argument(
        "--stride", type=program.integer(1, 1 << 20), help="ids between windows; --context when left out"
    )
    parser.add_argument("--limit", type=program.integer(2, 1 << 40), help="take the first ids alone")


def run(args: argparse.Namespace) -> int:
    if args.stride is not None and args.stride > args.context:
        raise ValueError(f"--stride: expected at most --context {args.context}, got {args.stride}")
    model = program.open_model(args, 1, args.context - 1)
    if args.tokens is not None:
        ids = _read_ids(args.tokens, args.limit, model.config["vocab_size"])
    else:
        ids = np.array(model.encode(program.read_text(args.text)))[: args.limit]
        if ids.size < 2:
            raise ValueError(f"{args.text}: expected a text of at least 2 ids, got {ids.size}")
    score = model.perplexity(ids, args.context, args.stride)
    rows = [
        ("positions", f"{score.positions}"),
        ("perplexity", f"{score.perplexity:.6g} +- {score.error:.2g}"),
        ("mean -log p of the next id", f"{score.nll:.6g} +- {score.nll_error:.2g}"),
    ]
    program.print_table(["what", model.activation], rows)
    report = program.about("eval", args, model)
    report |= {"tokens": args.tokens or args.text, "ids": int(ids.size), "context": args.context}
    report |= {"stride": args.stride or args.context, **score._asdict()}
    program.write_json(args.json, report)
    return program.OK


def _read_ids(path: str, limit: int | None, vocab_size: int) -> NDArray[Any]:
    """The first ids of a .npy file. The file is mapped, so that no more of it is read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns of headers that are refused below
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except Exception as error:  # numpy lets through what zipfile, tokenize and others raise
        raise ValueError(f"{path}: expected a .npy file of ids: {error}") from None
    if not isinstance(ids, np.ndarray) or (ids.ndim != 1 and (ids.ndim != 2 or ids.shape[0] != 1)):
        raise ValueError(f"{path}: expected ids in one row, got {getattr(ids, 'shape', 'several arrays')}")
    ids = ids.reshape(-1)[:limit]
    if ids.dtype.kind not in "iu" or ids.size < 2:
        raise ValueError(f"{path}: expected at least 2 integers, got {ids.size} of {ids.dtype}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(f"{path}: expected ids of 0 to {vocab_size - 1}, got {ids.min()} to {ids.max()}")
    return ids
