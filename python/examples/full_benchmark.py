#!/usr/bin/env python3
"""A checkpoint's speed and perplexity on the CPU beside transformers' own, both in float32 on as many threads.

  TTFT      from the prompt to the first new id
  TPOT      (time to the last id - TTFT) / (new ids - 1)
  tokens/s  new ids over the time to the last one
  GFLOP/s   2 flops for each element of the matrices that a token meets, and 4 for each of the keys that it sees
  PPL       perplexity of the prompt and its greedy ids, in one window

Times are medians. Exits with 1 where the perplexities differ by more than the bound of the logits allows, or the greedy
ids do although the larger logits are farther apart than that. Needs torch and transformers.
"""

import argparse
import pathlib
import sys
import time

import numpy as np
import torch
from bounds import logits_bound
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import cf_ops
from cf_ops import _core

DEFAULT = pathlib.Path(__file__).resolve().parents[2] / "data" / "checkpoints" / "neox-d80"


class Transformers:
    name = "transformers"

    def __init__(self, directory):
        logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(directory).float().eval()

    def ids(self, prompt, count):
        """The greedy ids, each as it is made."""
        step, cache = torch.tensor([prompt]), None
        for _ in range(count):
            with torch.inference_mode():
                made = self.model(step, past_key_values=cache, use_cache=True)
            cache, step = made.past_key_values, made.logits[:, -1:].argmax(-1)
            yield int(step)

    def logits(self, ids):
        with torch.inference_mode():
            return self.model(torch.tensor([ids])).logits[0].double().numpy()


class CfOps:
    name = "cf_ops"

    def __init__(self, directory):
        self.model = cf_ops.load(directory)

    def ids(self, prompt, count):
        return self.model.generate(prompt, max_new_tokens=count, stop=())

    def logits(self, ids):
        return self.model.logits(ids).astype(np.float64)


def seconds(made):
    """The times from now to each piece that an iterator makes, and the pieces."""
    start, times, pieces = time.perf_counter(), [], []
    for piece in made:
        pieces.append(piece)
        times.append(time.perf_counter() - start)
    return times, pieces


def perplexity(logits, ids):
    """exp of the mean of -log p of every id but the first."""
    rows = logits[:-1]
    most = rows.max(1)
    nll = most + np.log(np.exp(rows - most[:, None]).sum(1)) - rows[np.arange(len(rows)), ids[1:]]
    return float(np.exp(nll.mean()))


def flops(config, prompt_len, new_tokens):
    """Of a prompt and its new ids, of which the last is not fed."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    fed = prompt_len + new_tokens - 1
    matrices = layers * (4 * hidden * hidden + 2 * hidden * config["intermediate_size"])
    keys = fed * (fed + 1) // 2
    return 2 * fed * matrices + 2 * new_tokens * hidden * config["vocab_size"] + 4 * layers * hidden * keys


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(DEFAULT), help="checkpoint directory, dense")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--inject-fault", action="store_true", help="score other ids with cf_ops: the check must fail")
    args = parser.parse_args()
    sides = [Transformers(args.model), CfOps(args.model)]
    torch.set_num_threads(_core.num_threads())
    config = sides[1].model.config
    prompt = np.random.default_rng(0).integers(0, config["vocab_size"], args.prompt_len).tolist()
    work = flops(config, args.prompt_len, args.new_tokens)

    made, scores = [], []
    for side in sides:
        runs = [seconds(side.ids(prompt, args.new_tokens)) for _ in range(args.runs + 1)][1:]  # one to warm up
        first = float(np.median([times[0] for times, _ in runs]))
        last = float(np.median([times[-1] for times, _ in runs]))
        made.append(runs[0][1])
        ids = prompt + made[0]  # both score what transformers chose
        logits = side.logits([1, *ids[1:]] if args.inject_fault and side is sides[1] else ids)
        scores.append((perplexity(logits, ids), logits))
        tpot_ms = 1e3 * (last - first) / max(1, args.new_tokens - 1)
        print(
            f"{side.name:<13} TTFT {1e3 * first:8.2f} ms, TPOT {tpot_ms:8.3f} ms, {args.new_tokens / last:9.1f} "
            f"tokens/s, {work / last * 1e-9:8.2f} GFLOP/s, PPL {scores[-1][0]:.6g}"
        )

    (theirs, reference), (ours, _) = scores
    # Both sides may be off by the bound, and -log p by twice what a logit is off by.
    most = 2 * logits_bound(config, len(prompt) + args.new_tokens, "float32") * np.abs(reference).max()
    error = abs(np.log(ours / theirs))
    chosen = np.sort(reference[args.prompt_len - 1 : -1], axis=1)
    margins = chosen[:, -1] - chosen[:, -2]
    differ = [i for i, (a, b) in enumerate(zip(*made)) if a != b]
    same = not differ or margins[differ[0]] <= 2 * most
    ids_are = "differ" if differ else "equal"
    print(f"log of the perplexities' ratio {error:.2e} (bound {2 * most:.2e}), greedy ids {ids_are}")
    ok = error <= 2 * most and same
    print("ok" if ok else "FAIL")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
