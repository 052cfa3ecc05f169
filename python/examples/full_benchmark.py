#!/usr/bin/env python3
"""A checkpoint's generate() on Hugging Face, and the same model with cf_ops.hf.speed_up(), in one run.

For each number of new tokens: TTFT (time to first token: the prompt and one token), TPOT (time per output token behind
it), tokens a second, GFLOP/s of those steps, and how many tokens equal Hugging Face's. Then the perplexity of a text in
one window. Times are medians of runs that take turns. On the CPU Hugging Face runs in float32 too, the dtype in which
cf_ops computes there. Checked are tokens and perplexity against float64. Needs torch and transformers.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import cf_ops.hf
import common
from checkpoints import DIRECTORY, Checkpoint, oracle, unexplained


def step_flops(config: dict[str, Any], kv_len: float) -> float:
    """Multiplications and additions of a decode step behind kv_len tokens: matrices, head, scores and values."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    matrices = layers * (4 * hidden * hidden + 2 * hidden * config["intermediate_size"]) + config["vocab_size"] * hidden
    return float(2 * matrices + 4 * layers * hidden * kv_len)


def nll_of(logits: Any, ids: list[int]) -> float:
    """The mean of -log p(id | ids before it) over all ids but the first, in nats. logits (ids - 1, vocab)."""
    logits = logits.astype(np.float64)
    most = logits.max(1, keepdims=True)
    log_sum = most[:, 0] + np.log(np.exp(logits - most).sum(1))
    return float((log_sum - logits[np.arange(len(logits)), ids[1:]]).mean())


def main() -> int:
    parser = common.Parser(__doc__)
    parser.add_argument("--model", default=DIRECTORY / "neox-d80", metavar="DIR", help="checkpoint directory, dense")
    parser.add_argument("--prompt-len", type=common.integer(1), default=16, help="ids of the drawn prompt")
    parser.add_argument(
        "--new-tokens", type=common.integer(2), nargs="+", default=[16, 64], metavar="N", help="tokens of a row"
    )
    parser.add_argument("--runs", type=common.integer(1), default=5, help="of which a time is the median")
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="scored by the checkpoint's tokenizer; else ids are drawn, which no model predicts",
    )
    parser.add_argument("--text-len", type=common.integer(2), default=128, help="ids of the text that are scored")
    parser.add_argument("--seed", type=int, default=1, help="of drawn ids")
    args = parser.parse_args()
    args.device = common.device_of(args.device)
    import torch

    checkpoint = Checkpoint(args.model)
    config, vocab_size = checkpoint.config, checkpoint.config["vocab_size"]
    theirs = common.hugging_face(args.model).to(args.device)
    ours = cf_ops.hf.speed_up(common.hugging_face(args.model).to(args.device))
    models = {f"Hugging Face, {theirs.dtype}": theirs, "with speed_up()": ours}
    if args.device == "cpu" and theirs.dtype != torch.float32:  # cf_ops computes in float32 there
        models["Hugging Face, torch.float32"] = common.hugging_face(args.model, torch.float32)
    exact = common.hugging_face(args.model, torch.float64)
    stored, rounding = common.model_bound(args.device, theirs.dtype)
    if args.inject_fault:
        with torch.no_grad():
            ours.gpt_neox.layers[0].attention.dense.weight.neg_()
    if args.text:
        with open(args.text, encoding="utf-8") as file:
            text = cf_ops.load(args.model).encode(file.read())[: args.text_len]
    else:
        text = common.random_ids(args.text_len, vocab_size, args.seed + 1)
    if len(text) < 2:
        raise ValueError(f"{args.text}: expected a text of at least 2 ids, got {len(text)}")
    prompt = common.random_ids(args.prompt_len, vocab_size, args.seed)
    given = torch.tensor([prompt], device=args.device)

    def generate(model: Any, count: int) -> list[int]:
        mask = torch.ones_like(given)
        return [int(id) for id in model.generate(given, attention_mask=mask, max_new_tokens=count, do_sample=False)[0]]

    def all_logits(model: Any, ids: list[int]) -> Any:
        return model(input_ids=torch.tensor([ids], device=model.device)).logits[0].double().cpu().numpy()

    checks, rows = common.Checks(), []
    with torch.inference_mode():
        for count in args.new_tokens:
            calls = {}
            for name, model in models.items():
                calls[name, 1] = functools.partial(generate, model, 1)
                calls[name, count] = functools.partial(generate, model, count)
            times = common.medians_ms(
                {key: common.synchronised(c, args.device) for key, c in calls.items()}, args.runs, 1
            )
            texts = {name: generate(model, count) for name, model in models.items()}
            flops = step_flops(config, args.prompt_len + count / 2)
            of_theirs = None
            for name, ids in texts.items():
                ttft, tpot = times[name, 1], (times[name, count] - times[name, 1]) / (count - 1)
                of_theirs = of_theirs or tpot
                new, other = ids[len(prompt) :], next(iter(texts.values()))[len(prompt) :]
                same = sum(a == b for a, b in zip(new, other))
                speed = 1e3 / tpot, flops / tpot / 1e6
                rows.append((name, count, ttft, tpot, of_theirs / tpot, *speed, flops / 1e9, f"{same} / {count}"))
            ids = texts["with speed_up()"]
            relative = oracle(checkpoint, ids[:-1], stored)[1].rel_max + rounding
            wrong = unexplained(all_logits(exact, ids[:-1])[len(prompt) - 1 :], ids[len(prompt) :], relative)
            checks.expect(wrong == 0, f"{count} tokens: {wrong} that no error within the bound explains")

        scored = {name: all_logits(model, text[:-1]) for name, model in models.items()}
        scored["Hugging Face, float64"] = all_logits(exact, text[:-1])
    print(
        f"{checkpoint.directory.name}: prompt of {args.prompt_len} ids, batch 1, {args.device}, medians of {args.runs}"
    )
    units = "TTFT ms", "TPOT ms", "Hugging Face's / it", "tokens/s", "GFLOP/s", "GFLOP a token"
    common.print_table(["model", "new tokens", *units, "tokens as Hugging Face's"], rows)

    nlls = {name: nll_of(logits, text) for name, logits in scored.items()}
    print()
    common.print_table(
        [f"perplexity of {len(text)} ids", "perplexity", "nats a token"],
        [(name, float(np.exp(nll)), nll) for name, nll in nlls.items()],
    )
    # A logit that is off by e moves a log probability by at most 2 e.
    largest = np.abs(scored["Hugging Face, float64"]).max()
    allowed = 2 * float(largest) * (oracle(checkpoint, text[:-1], stored)[1].rel_max + rounding)
    off = abs(nlls["with speed_up()"] - nlls["Hugging Face, float64"])
    checks.expect(off <= allowed, f"nats a token differ by {off:.2g} from float64's, at most {allowed:.2g}")
    report = cf_ops.hf.report(ours)
    checks.expect(report.share == 1, f"{report.share:.0%} of the calls ran on cf_ops")
    return checks.end()


common.run(main, "torch", "transformers")
