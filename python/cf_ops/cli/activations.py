"""``python -m cf_ops activations``: what a model's modules make of many prompts, as files of safetensors."""

from __future__ import annotations

import argparse
import time
from typing import Any

from cf_ops._activations import activations
from cf_ops._text import encode, open_tokenizer
from cf_ops._token_files import DTYPES, map_rows
from cf_ops.cli import _program as program

_MOST = 1 << 20


def declare(parser: argparse.ArgumentParser) -> None:
    program.add_model(parser, several=False)  # each GPU has a part of what a module makes
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts-file", metavar="FILE", help="texts, a line each; empty lines are left out")
    source.add_argument(
        "--tokens", metavar="FILE", help="token ids: a .npy file with a prompt a row, or in one row; else bare ids"
    )
    parser.add_argument("--row", type=program.integer(1, _MOST), metavar="N", help="ids of a prompt, in --tokens")
    parser.add_argument("--dtype-of-tokens", choices=DTYPES, default="uint16", help="of bare ids (default uint16)")
    parser.add_argument("--limit", type=program.integer(1, 1 << 40), help="take the first prompts alone")
    parser.add_argument(
        "--tap",
        action="append",
        metavar="NAME",
        help="a name of Hugging Face or TransformerLens, such as hidden_states.3 or 'blocks.*.hook_mlp_out'; may be "
        "repeated; all hidden states when left out",
    )
    parser.add_argument("--stop-at-layer", type=program.integer(1, _MOST), metavar="N", help="run the first N layers")
    parser.add_argument(
        "--positions", type=_positions, metavar="PLACES", help="of each prompt: 0,-1, or a slice such as 1: or -32:"
    )
    parser.add_argument(
        "--dtype",
        choices=["float64", "float32", "float16", "bfloat16"],
        help="of the files; the activations' own when left out",
    )
    parser.add_argument(
        "--rows-of-file",
        type=program.integer(1, 2**31 - 1),
        default=1 << 16,
        metavar="N",
        help="rows after which a new file begins, with the next prompt (default 65536)",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder of the files; an earlier run goes on")


def run(args: argparse.Namespace) -> int:
    prompts: Any
    if args.tokens is not None:
        prompts = map_rows(args.tokens, args.row, args.dtype_of_tokens)[: args.limit]
        model = program.open_model(args, 1, prompts.shape[1], args.stop_at_layer)
    else:
        texts = [line for line in program.read_text(args.prompts_file).split("\n") if line][: args.limit]
        if not texts:
            raise ValueError(f"{args.prompts_file}: expected a text on a line, got none")
        capacity = 0
        if program.check_device(args) is not None:  # a GPU's cache gets its size when the model is loaded
            tokenizer = open_tokenizer(program.model_directory(args))
            capacity = max(len(encode(tokenizer, text)) for text in texts)
        model = program.open_model(args, 1, capacity, args.stop_at_layer)
        prompts = texts
    begun = time.perf_counter()
    made = activations(
        model,
        prompts,
        args.tap,
        out=args.out,
        dtype=args.dtype,
        stop_at_layer=args.stop_at_layer,
        positions=args.positions,
        rows_of_file=args.rows_of_file,
    )
    total_s = time.perf_counter() - begun
    rows = [(name, " x ".join(map(str, made.rows(name, [0]).shape[1:]))) for name in made.taps]
    program.print_table([f"tap of {len(made)} rows, {made.dtype}", "shape of a row"], rows)
    report = program.about("activations", args, model)
    report |= {"out": args.out, "rows": len(made), "taps": made.taps, "dtype": made.dtype, "total_s": total_s}
    program.write_json(args.json, report)
    return program.OK


def _positions(text: str) -> slice | list[int]:
    """An argument's type: places, or a slice of them."""
    try:
        if ":" not in text:
            return [int(part) for part in text.split(",")]
        first, last = (int(part) if part else None for part in text.split(":"))
        return slice(first, last)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected places such as 0,-1 or a slice such as 1:, got {text!r}") from None
