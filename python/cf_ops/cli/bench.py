"""``python -m cf_ops bench``: time to first token, time per token, throughput.

The figures are those of ``cf-model bench``:
  TTFT      from the prompts to the last slot's first id, the median of the runs
  TPOT      (total - TTFT) / (new tokens - 1), by medians; 0 for one new token
  p50, p90, p99   the time between two steps, over all steps of all runs
  tokens/s  new tokens of all slots a second, prompts included, by the median of the total
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from cf_ops import _core
from cf_ops._progress import Progress
from cf_ops.cli import _program as program


def declare(parser: argparse.ArgumentParser) -> None:
    program.add_model(parser)
    sizes = program.integers(1, 1 << 19)
    parser.add_argument(
        "--prompt-len",
        type=sizes,
        default=[128],
        metavar="N,...",
        help="ids of a prompt; caches have room for the longest",
    )
    parser.add_argument("--new-tokens", type=sizes, default=[32], metavar="N,...", help="new tokens of a prompt")
    parser.add_argument("--slots", type=program.integers(1, 64), default=[1], metavar="N,...", help="prompts at once")
    parser.add_argument("--runs", type=program.integer(1, 10**6), default=3, help="timed runs of each configuration")
    parser.add_argument("--warmup", type=program.integer(0, 10**6), default=1, help="runs before the timed ones")


def run(args: argparse.Namespace) -> int:
    capacity = max(args.prompt_len) + max(args.new_tokens) - 1
    results: list[dict[str, float]] = []
    described, about = "", {}
    for slots, model in program.open_models(args, args.slots, capacity):
        decoder = model.decoder(slots, capacity)
        described, about = program.describe_device(model), program.about("bench", args, model)
        for prompt_len in args.prompt_len:
            for new_tokens in args.new_tokens:
                sizes_of_run = {"prompt_len": prompt_len, "new_tokens": new_tokens, "slots": slots}
                with Progress(f"prompt {prompt_len}, {new_tokens} new, {slots} slots") as progress:
                    timed = _time(
                        decoder,
                        model.config["vocab_size"],
                        prompt_len,
                        new_tokens,
                        slots,
                        args.runs,
                        args.warmup,
                        progress,
                    )
                results.append(sizes_of_run | timed)
    print(f"{described}, model {args.model}\n")
    headers = ["prompt", "new", "slots", "TTFT ms", "TPOT ms", "p50 ms", "p90 ms", "p99 ms", "total ms", "tokens/s"]
    digits = [0, 0, 0, 2, 3, 3, 3, 3, 1, 1]
    rows = [[f"{value:.{n}f}" for value, n in zip(result.values(), digits)] for result in results]
    program.print_table(headers, rows)
    report = about | {"runs": args.runs, "warmup": args.warmup, "capacity": capacity, "results": results}
    program.write_json(args.json, report)
    return program.OK


def _prompt(length: int, slot: int, vocab_size: int) -> list[int]:
    """Ids that spread over the vocabulary, the same for the same slot, as cf-model's are."""
    return [(((i + 1) * 2654435761 + slot * 40503) % 2**64) % vocab_size for i in range(length)]


def _time(
    decoder: _core.Decoder,
    vocab_size: int,
    prompt_len: int,
    new_tokens: int,
    slots: int,
    runs: int,
    warmup: int,
    progress: Progress,
) -> dict[str, float]:
    first_ms: list[float] = []
    total_ms: list[float] = []
    token_ms: list[float] = []
    for number in range(-warmup, runs):
        sequences = [
            decoder.add(_prompt(prompt_len, slot, vocab_size), max_new_tokens=new_tokens) for slot in range(slots)
        ]
        times = [time.perf_counter()]
        decoder.prefill()
        times.append(time.perf_counter())
        while decoder.active:
            decoder.decode(1)
            times.append(time.perf_counter())
        for sequence in sequences:
            if fault := decoder.status(sequence):
                raise ValueError(fault)
            decoder.drop(sequence)
        progress.set(warmup + number + 1, warmup + runs)
        if number < 0:
            continue
        ms = np.diff(times) * 1e3
        first_ms.append(ms[0])
        total_ms.append(ms.sum())
        token_ms.extend(ms[1:])
    ttft, total = float(np.median(first_ms)), float(np.median(total_ms))
    p50, p90, p99 = map(float, np.percentile(token_ms, [50, 90, 99])) if token_ms else (0.0, 0.0, 0.0)
    return {
        "ttft_ms": ttft,
        "tpot_ms": (total - ttft) / (new_tokens - 1) if new_tokens > 1 else 0.0,
        "inter_token_p50_ms": p50,
        "inter_token_p90_ms": p90,
        "inter_token_p99_ms": p99,
        "total_ms": total,
        "tokens_per_s": 1e3 * new_tokens * slots / total,
    }
