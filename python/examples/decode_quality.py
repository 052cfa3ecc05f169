#!/usr/bin/env python3
"""How close decoding on cf_ops is to Hugging Face in float64, beside Hugging Face in the checkpoint's own dtype.

Tokens: each decodes greedily by itself; where it first leaves float64's text, the margin between float64's two best
logits is printed. Logits: each reads float64's text; their mean error, and the share of the 5 and 10 best tokens that
are float64's. Needs torch and transformers.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

import cf_ops
import cf_ops.hf
import common
from checkpoints import DIRECTORY, Array, Checkpoint, oracle, unexplained

TOPS = 5, 10


def agreement(logits: Array, exact: Array, count: int) -> float:
    """The share of the exact logits' best tokens that are among the best of `logits`, over all positions."""
    best = [np.argsort(rows, 1, kind="stable")[:, -count:] for rows in (logits, exact)]
    return float(np.mean([len(set(a) & set(b)) / count for a, b in zip(*best)]))


def first_difference(ids: list[int], exact_ids: list[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(ids, exact_ids)) if a != b), None)


def error_bound(checkpoint: Checkpoint, ids: list[int], device: str, dtype: Any) -> float:
    """How far logits may be off relative to the largest: by float32 sums, and rounded where they are stored."""
    stored, rounding = common.model_bound(device, dtype)
    return oracle(checkpoint, ids, stored)[1].rel_max + rounding


def main() -> int:
    parser = common.Parser(__doc__)
    parser.add_argument("--model", default=DIRECTORY / "neox-d80", metavar="DIR", help="checkpoint directory, dense")
    parser.add_argument("--prompts", type=common.integer(1), default=3, help="prompts of drawn ids")
    parser.add_argument("--prompt-len", type=common.integer(1), default=16, help="ids of a prompt")
    parser.add_argument("--new-tokens", type=common.integer(1), default=48, help="tokens behind each prompt")
    parser.add_argument("--seed", type=int, default=1, help="of the first prompt's ids")
    args = parser.parse_args()
    args.device = common.device_of(args.device)
    import torch

    checkpoint = Checkpoint(args.model)
    vocab_size = checkpoint.config["vocab_size"]
    ours = cf_ops.hf.speed_up(common.hugging_face(args.model).to(args.device))
    theirs = common.hugging_face(args.model).to(args.device)
    exact = common.hugging_face(args.model, torch.float64)
    names = ["cf_ops", f"Hugging Face, {theirs.dtype}"]

    def decode(model: Any, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt], device=model.device)
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.new_tokens, do_sample=False)
        return [int(id) for id in made[0, len(prompt) :]]

    def logits_of(model: Any, prompt: list[int], text: list[int]) -> Array:
        """The logits from which each id of a text is chosen, made step by step."""
        parameters = inspect.signature(type(model).forward).parameters.items()
        name = next(name for name, p in parameters if "Cache" in str(p.annotation))  # cache, before 5.24 past_key_values
        cache, rows, newest = None, [], prompt
        for id in text:
            ids = torch.tensor([newest], device=model.device)
            made = model(input_ids=ids, **{name: cache}, use_cache=True)
            cache, newest = getattr(made, name), [id]
            rows.append(made.logits[0, -1].double().cpu().numpy())
        return np.stack(rows)

    checks, rows, maes = common.Checks(), [], {name: list[float]() for name in names}
    for number in range(args.prompts):
        prompt = common.random_ids(args.prompt_len, vocab_size, args.seed + number)
        with torch.inference_mode():
            text = decode(exact, prompt)
            reference = logits_of(exact, prompt, text)
            top = np.sort(reference, 1)
            margins = top[:, -1] - top[:, -2]
            for name, model in zip(names, (ours, theirs)):
                read = [(id + 1) % vocab_size for id in prompt] if args.inject_fault and model is ours else prompt
                ids, logits = decode(model, read), logits_of(model, read, text)
                error, first = common.error_of(logits, reference), first_difference(ids, text)
                maes[name].append(error.mae)
                same = sum(a == b for a, b in zip(ids, text))
                left = "never" if first is None else f"{first}, margin {margins[first]:.2g}"
                best = [f"{agreement(logits, reference, count):.1%}" for count in TOPS]
                rows.append((number, name, f"{same} / {len(text)}", left, error.mae, error.rel_max, *best))
                if model is ours:
                    relative = error_bound(checkpoint, prompt + text[:-1], args.device, theirs.dtype)
                    checks.expect(error.rel_max <= relative, f"prompt {number}: logits within the bound {relative:.2g}")
                    relative = error_bound(checkpoint, prompt + ids[:-1], args.device, theirs.dtype)
                    wrong = unexplained(logits_of(exact, prompt, ids), ids, relative)
                    checks.expect(
                        wrong == 0, f"prompt {number}: {wrong} tokens that no error within the bound explains"
                    )
    print(
        f"{checkpoint.directory.name}: {args.prompt_len} + {args.new_tokens} tokens; reference: Hugging Face, float64"
    )
    best_of = [f"top {count}" for count in TOPS]
    common.print_table(["prompt", "model", "tokens", "first other", "logits' MAE", "rel max", *best_of], rows)
    mine, other = (float(np.mean(maes[name])) for name in names)
    if theirs.dtype != torch.float32:  # with float32 weights both compute in float32
        checks.expect(mine <= other, f"logits' MAE {mine:.3g} is at most Hugging Face's own {other:.3g}")
    share = cf_ops.hf.report(ours).share
    checks.expect(share == 1, f"{share:.0%} of the calls ran on cf_ops")
    return checks.end()


common.run(main, "torch", "transformers")
