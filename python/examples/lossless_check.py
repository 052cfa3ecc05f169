#!/usr/bin/env python3
"""The same prompt again and again: all runs must give the same ids, and the same logits to the last bit.

The runs differ in what must not matter: the number of threads, and the other prompts that decode beside this one. Exits
with 1 where there is more than one distinct output.
"""

import argparse
import pathlib
import sys

import cf_ops
from cf_ops import _core

DEFAULT = pathlib.Path(__file__).resolve().parents[2] / "data" / "checkpoints" / "neox-d80"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(DEFAULT), help="checkpoint directory")
    parser.add_argument("--prompt-ids", default="1,2,3,4,5", help="ids such as 1,2,3")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--slots", type=int, default=4, help="prompts that decode at once")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--inject-fault", action="store_true", help="another seed in the last run: the check must fail")
    args = parser.parse_args()
    prompt = [int(id) for id in args.prompt_ids.split(",")]
    model = cf_ops.load(args.model)
    vocab_size = model.config["vocab_size"]

    outputs = set()
    for run in range(args.runs):
        _core.set_num_threads(1 + run % 3)
        others = [[(7 * run + 3 * slot + i) % vocab_size for i in range(run + 1)] for slot in range(1, args.slots)]
        seed = int(args.inject_fault and run == args.runs - 1)
        first, *_ = model.generate_batch(
            [prompt, *others],
            max_new_tokens=args.new_tokens,
            temperature=args.temperature,
            seed=seed,
            stop=(),
            slots=args.slots,
        )
        ids = tuple(first.ids)
        outputs.add((ids, model.logits(prompt + first.ids).tobytes()))
    print(f"{args.runs} runs of {args.new_tokens} new ids, 1 to 3 threads, {args.slots} slots")
    print(f"distinct outputs: {len(outputs)}: {'ok' if len(outputs) == 1 else 'FAIL'}")
    return 0 if len(outputs) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
