#!/usr/bin/env python3
"""A checkpoint's greedy ids and logits beside those of transformers in float64.

transformers continues a prompt greedily in float64. The model then sees the same ids, one by one as a decoder takes
them, in float64 (the oracle) and in float32. Printed are the share of equal ids, the logits' mean absolute error, and
the share of the 5 and 10 most likely ids that both have. Exits with 1 where logits are outside their bound, or where an
id differs although its margin in float64 is more than twice that bound. Needs torch and transformers.
"""

import argparse
import pathlib
import sys

import numpy as np
import torch
from bounds import logits_bound
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import cf_ops
from cf_ops import _core

DEFAULT = pathlib.Path(__file__).resolve().parents[2] / "data" / "checkpoints" / "neox-d80"


def of_transformers(directory, prompt, new_tokens):
    """The greedy ids behind the prompt, and the logits (new_tokens, vocab) that they were chosen from."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory).double().eval()
    ids, rows = list(prompt), []
    with torch.inference_mode():
        for _ in range(new_tokens):
            rows.append(model(torch.tensor([ids])).logits[0, -1].numpy())
            ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :], np.array(rows)


def of_cf_ops(directory, prompt, ids, activation):
    """The logits of the same positions."""
    runner = _core.Runner(_core.Weights.open(directory), capacity=len(prompt) + len(ids), activation=activation)
    runner.prefill(0, 0, prompt)
    rows = [runner.logits(0)]
    for position, id in enumerate(ids[:-1], len(prompt)):
        runner.step([(0, id, position)])
        rows.append(runner.logits(0))
    return np.array(rows, np.float64)


def shared(ours, theirs, count):
    """The share of the `count` most likely ids of each position that both have."""
    best = [np.argsort(-logits, axis=1, kind="stable")[:, :count] for logits in (ours, theirs)]
    return np.mean([len(set(a) & set(b)) / count for a, b in zip(*best)])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(DEFAULT), help="checkpoint directory, dense")
    parser.add_argument("--prompt-ids", default="1,2,3,4,5", help="ids such as 1,2,3")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--inject-fault", action="store_true", help="change the prompt's first id: the check must fail")
    args = parser.parse_args()
    prompt = [int(id) for id in args.prompt_ids.split(",")]
    ids, theirs = of_transformers(args.model, prompt, args.new_tokens)
    if args.inject_fault:
        prompt[0] ^= 1
    config = cf_ops.load(args.model).config
    ok = True
    for activation in ("float64", "float32"):
        bound = logits_bound(config, len(prompt) + len(ids), activation)
        ours = of_cf_ops(args.model, prompt, ids, activation)
        error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        chosen = ours.argmax(1)
        ordered = np.sort(theirs, axis=1)
        clear = ordered[:, -1] - ordered[:, -2] > 2 * bound * np.abs(theirs).max(1)
        same = chosen == np.array(ids)
        passed = error <= bound and same[clear].all()
        ok = ok and passed
        print(
            f"{activation}: ids equal {100 * same.mean():.1f} %, logits MAE {np.abs(ours - theirs).mean():.2e}, "
            f"relative L2 {error:.2e} (bound {bound:.2e}), shared of the top 5 {100 * shared(ours, theirs, 5):.1f} %, "
            f"of the top 10 {100 * shared(ours, theirs, 10):.1f} %: {'ok' if passed else 'FAIL'}"
        )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
