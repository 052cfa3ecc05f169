#!/usr/bin/env python3
"""Runs a generation n times, greedy and sampled, and counts the distinct outputs: there must be one of each.

An output is the new ids and the bits of the logits of every position. Runs differ in what must not matter: the number
of threads on the CPU, and the other prompts that decode beside the first. Needs numpy alone, on a GPU too.
"""

from __future__ import annotations

import hashlib
from typing import Any

import cf_ops
import common
from checkpoints import DIRECTORY

SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": 7}
THREADS = 1, 2, 3


def main() -> int:
    parser = common.Parser(__doc__)
    parser.add_argument("--model", default=DIRECTORY / "neox-d80", metavar="DIR", help="checkpoint directory")
    parser.add_argument("--runs", type=common.integer(2), default=12, help="of each generation")
    parser.add_argument("--prompt", help="a text, where the checkpoint has a tokenizer.json; else ids are drawn")
    parser.add_argument("--prompt-len", type=common.integer(1), default=16, help="ids of a drawn prompt")
    parser.add_argument("--new-tokens", type=common.integer(1), default=32, help="tokens of a run")
    parser.add_argument("--seed", type=int, default=1, help="of a drawn prompt")
    args = parser.parse_args()
    args.device = common.device_without_torch(args.device)

    def load(run: int) -> cf_ops.Model:
        if args.device == "cpu":
            return cf_ops.load(args.model, threads=THREADS[run % len(THREADS)])
        # The room of all runs: bits depend on the number of slots.
        longest = max(len(cf_ops.load(args.model).encode(args.prompt)) if args.prompt else args.prompt_len, args.runs)
        return cf_ops.load(args.model, device="cuda", slots=4, capacity=longest + args.new_tokens)

    settings: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": SAMPLED}
    checks, rows = common.Checks(), []
    for name in settings:
        texts, logits = set(), set()
        for run in range(args.runs):
            model = load(run)
            vocab_size = model.config["vocab_size"]
            prompt = model.encode(args.prompt or common.random_ids(args.prompt_len, vocab_size, args.seed))
            if args.inject_fault and run == args.runs - 1:
                prompt[0] = (prompt[0] + 1) % vocab_size  # the last run reads another prompt
            others = [common.random_ids(1 + run, vocab_size, args.seed + run + i) for i in range(run % 4)]
            made = model.generate_batch([prompt, *others], max_new_tokens=args.new_tokens, stop=[], **settings[name])
            texts.add(tuple(made[0].ids))
            logits.add(hashlib.sha256(model.logits(prompt + made[0].ids).tobytes()).hexdigest())
            model.close()
        rows.append((name, args.runs, args.new_tokens, len(texts), len(logits)))
        checks.expect(len(texts) == len(logits) == 1, f"{name}: {args.runs} runs give one output")
    common.print_table(["generation", "runs", "new ids", "distinct ids", "distinct logits"], rows)
    return checks.end()


common.run(main)
