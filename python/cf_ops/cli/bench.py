"""``python -m cf_ops bench``: time to first token, time per token, throughput.

The figures are those of ``cf-model bench``:
  TTFT      from the prompts to the last slot's first id, the median of the runs
  TPOT      (total - TTFT) / (new tokens - 1), by medians; 0 for one new token
  p50, p90, p99   the time between two steps, over all steps of all runs
  tokens/s  new tokens of all slots a second, prompts included, by the median of the total
With --score-len also, of one prompt of so many ids, by medians:
  prefill   ids a second that the model reads, for the logits of the last one
  score     ids a second whose log-probabilities Model.score() gives
  share     score / prefill
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from cf_ops import _core
from cf_ops._progress import Progress
from cf_ops.cli import _program as program
from cf_ops.model import Model


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
    parser.add_argument(
        "--score-len",
        type=program.integers(2, 1 << 19),
        default=[],
        metavar="N,...",
        help="time the scores of all ids of a prompt of so many beside its prefill",
    )
    parser.add_argument("--runs", type=program.integer(1, 10**6), default=3, help="timed runs of each configuration")
    parser.add_argument("--warmup", type=program.integer(0, 10**6), default=1, help="runs before the timed ones")


def run(args: argparse.Namespace) -> int:
    capacity = max(max(args.prompt_len) + max(args.new_tokens) - 1, max(args.score_len, default=0))
    scores: list[dict[str, float]] = []
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
        if not scores:
            decoder.close()
            scores = [_time_score(model, length, args.runs, args.warmup) for length in args.score_len]
    print(f"{described}, model {args.model}\n")
    headers = ["prompt", "new", "slots", "TTFT ms", "TPOT ms", "p50 ms", "p90 ms", "p99 ms", "total ms", "tokens/s"]
    digits = [0, 0, 0, 2, 3, 3, 3, 3, 1, 1]
    rows = [[f"{value:.{n}f}" for value, n in zip(result.values(), digits)] for result in results]
    program.print_table(headers, rows)
    if scores:
        print()
        score_rows = [[f"{value:.{n}f}" for value, n in zip(result.values(), [0, 0, 0, 3])] for result in scores]
        program.print_table(["prompt", "prefill ids/s", "score ids/s", "share"], score_rows)
    report = about | {"runs": args.runs, "warmup": args.warmup, "capacity": capacity, "results": results}
    if scores:
        report["scores"] = scores
    program.write_json(args.json, report)
    return program.OK


def _prompt(length: int, slot: int, vocab_size: int) -> list[int]:
    """Ids that spread over the vocabulary, the same for the same slot, as cf-model's are."""
    return [(((i + 1) * 2654435761 + slot * 40503) % 2**64) % vocab_size for i in range(length)]


def _time_score(model: Model, length: int, runs: int, warmup: int) -> dict[str, float]:
    ids = _prompt(length, 0, model.config["vocab_size"])
    seconds: dict[str, list[float]] = {"prefill": [], "score": []}
    with Progress(f"scores of {length} ids") as progress:
        for number in range(-warmup, runs):
            with model._runner(length) as runner:
                begin = time.perf_counter()
                runner.prefill(0, 0, ids)
                runner.logits(0)  # waits for a GPU
                prefill_s = time.perf_counter() - begin
            scorer = model.scorer(1, length)
            try:
                begin = time.perf_counter()
                scorer.begin([(ids, 1)])
                while not scorer.done:
                    scorer.step()
                score_s = time.perf_counter() - begin
            finally:
                scorer.close()
            if number >= 0:
                seconds["prefill"].append(prefill_s)
                seconds["score"].append(score_s)
            progress.set(warmup + number + 1, warmup + runs)
    prefill = length / float(np.median(seconds["prefill"]))
    score = (length - 1) / float(np.median(seconds["score"]))
    return {"prompt_len": length, "prefill_ids_per_s": prefill, "score_ids_per_s": score, "share": score / prefill}


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
