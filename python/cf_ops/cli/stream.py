"""``python -m cf_ops stream``: continue a prompt without end, in constant memory."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from cf_ops._text import encode, open_tokenizer
from cf_ops.cli import _program as program


def declare(parser: argparse.ArgumentParser) -> None:
    program.add_model(parser)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="a text")
    prompts.add_argument("--prompt-ids", type=program.integers(0, 2**31 - 1), metavar="IDS", help="ids such as 1,2,3")
    program.add_streams(parser, window=2044, sinks=4)
    parser.add_argument(
        "--max-new-tokens", type=program.integer(1, 2**62), metavar="N", help="new ids; until Ctrl-C when left out"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 for the most likely token")
    parser.add_argument("--top-k", type=program.integer(0, 2**31 - 1), default=0, help="keep so many tokens, 0 for all")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the fewest that reach this probability")
    parser.add_argument("--min-p", type=float, default=0.0, help="keep those of this share of the largest probability")
    parser.add_argument("--seed", type=program.integer(0, 2**64 - 1), default=0, help="seed of the draws")
    parser.add_argument(
        "--stop", type=program.integers(0, 2**31 - 1), default=[], metavar="IDS", help="ids that end the text"
    )


def run(args: argparse.Namespace) -> int:
    is_text = args.prompt is not None
    prompt: Any = args.prompt if is_text else args.prompt_ids
    program.check_device(args)
    length = len(encode(open_tokenizer(program.model_directory(args)), prompt) if is_text else prompt)
    model = program.open_model(args, 1, length)
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "stop")
    options = {name: getattr(args, name) for name in names}
    interrupted = False
    start = time.perf_counter()
    with model.stream(prompt, max_new_tokens=args.max_new_tokens, **options) as stream:
        try:
            for place, piece in enumerate(stream):
                print(piece if is_text or place == 0 else f",{piece}", end="", flush=True)
        except KeyboardInterrupt:
            interrupted = True
    print(flush=True)
    total_s = time.perf_counter() - start
    rate = stream.count / total_s
    print(f"{stream.count} new tokens in {total_s:.2f} s, {rate:.1f} tokens/s", file=sys.stderr)
    report = program.about("stream", args, model)
    report |= {"window": args.window, "sinks": args.sinks, "prompt_len": length, "new_tokens": stream.count}
    program.write_json(args.json, report | {"total_s": total_s})
    return program.INTERRUPTED if interrupted else program.OK
