#!/usr/bin/env python3
"""Scores a text with Hugging Face's model in 16 bits beside float64, as `cf-model eval --oracle` scores it with ours.

Windows, figures and their names are those of cf-model eval: the JSON files of both can be laid side by side. With
--beside each of cf-model's files is compared: a divergence from float64, or a loss, that is larger than that of every
run of Hugging Face's beyond chance (95 %, from the standard errors of both) is a failure.

Needs torch, transformers, safetensors, numpy and h5py.
"""

import json
import math
import os
import sys

from console import Parser, Refusal, integer, progress, require, require_numpy

NAME = "eval_hf.py"
require_numpy(NAME)

import numpy as np

from golden_file import atomic, check_writable, write_json
from hf_model import (
    Checkpoint,
    attention_implementations,
    build_causal,
    call,
    device_name,
    empty_cache,
    has_rms_norms,
    torch_device,
    versions,
    widen_norms,
)
from tokenize_text import read_ids

EXAMPLES = """
examples
  Hugging Face's float16 on 32,768 ids, and ours beside it:
    cf-model eval --backend cuda --model DIR --tokens ids.npy --context 512 --stride 256 --limit 32768 --oracle \\
      --json ours.json
    eval_hf.py --model DIR --tokens ids.npy --context 512 --stride 256 --limit 32768 --beside ours.json
Exit status: 0 when all is well, 1 when one of --beside is worse than Hugging Face, 2 when the arguments are refused.
"""

PERCENTILES = (("kl_p99_9", 99.9), ("kl_p99", 99), ("kl_p90", 90), ("kl_median", 50), ("kl_p10", 10))
# The figures of which smaller is better, and that have a standard error.
COMPARED = ("kl", "nll", "log_perplexity_ratio")


def windows(count, context, stride):
    """(first, last, scored) of each window: ids [first, last) go through the model, and the predictions of id `scored`
    and of the later ones count. A window's first id has no prediction."""
    found, first, scored = [], 0, 1
    while scored < count:
        last = min(first + context, count)
        found.append((first, last, scored))
        first += stride
        scored = max(last, first + 1)
    return found


def mean_of(values):
    """The mean and its standard error."""
    values = np.asarray(values, np.float64)
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return {"mean": float(values.mean()), "error": float(error)}


class Scores:
    """What a run's logits say of a text, beside those in float64."""

    def __init__(self):
        self.nll, self.reference_nll, self.kl = [], [], []
        self.error2 = self.norm2 = self.absolute = self.largest = 0.0
        self.same = self.logits = 0

    def add(self, ours, reference, following):
        """Adds positions: logits (positions, vocab) in float64, and the ids that came next."""
        log_q = ours - np.logaddexp.reduce(ours, axis=1, keepdims=True)
        log_p = reference - np.logaddexp.reduce(reference, axis=1, keepdims=True)
        rows = np.arange(len(following))
        self.nll.append(-log_q[rows, following])
        self.reference_nll.append(-log_p[rows, following])
        self.kl.append((np.exp(log_p) * (log_p - log_q)).sum(1))
        difference = ours - reference
        self.error2 += float((difference**2).sum())
        self.norm2 += float((reference**2).sum())
        self.absolute += float(np.abs(difference).sum())
        self.largest = max(self.largest, float(np.abs(difference).max()))
        self.same += int((ours.argmax(1) == reference.argmax(1)).sum())
        self.logits += ours.size

    def figures(self):
        nll, reference, kl = map(np.concatenate, (self.nll, self.reference_nll, self.kl))

        def perplexity(values):
            loss = mean_of(values)
            return {"mean": math.exp(loss["mean"]), "error": math.exp(loss["mean"]) * loss["error"]}

        return {
            "positions": len(nll),
            "perplexity": perplexity(nll),
            "nll": mean_of(nll),
            "reference_perplexity": perplexity(reference),
            "log_perplexity_ratio": mean_of(nll - reference),
            "kl": mean_of(kl),
            "kl_max": float(kl.max()),
            **{key: float(np.percentile(kl, percent)) for key, percent in PERCENTILES},
            "logits_mae": self.absolute / self.logits,
            "logits_max_error": self.largest,
            "logits_rel_l2": math.sqrt(self.error2 / self.norm2),
            "top_1_percent": 100 * self.same / len(nll),
        }


def logits_of(hf, ids, skipped):
    """The logits (positions, vocab) behind the ids from number `skipped` on, in float64."""
    import torch

    positions = torch.arange(len(ids), device=hf.device)[None]
    result, _ = call(hf, empty_cache(), input_ids=torch.from_numpy(ids).to(hf.device)[None], position_ids=positions)
    return result.logits[0, skipped:].double().cpu().numpy()


def worse(ours, theirs):
    """The figures of which ours is above every run of theirs by more than chance explains."""
    found = []
    for key in COMPARED:
        beyond = [
            ours[key]["mean"] > other[key]["mean"] + 1.96 * math.hypot(ours[key]["error"], other[key]["error"])
            for other in theirs.values()
        ]
        if all(beyond):
            found.append(key)
    return found


# What a report says of the run whose figures it holds.
ABOUT_RUN = ("program", "version", "commit", "command", "gpu", "impl")


def read_ours(path, length):
    """{name: figures} of a file that cf-model eval --json has written, and what it says of its run."""
    try:
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        figures = report["figures"]
        for name, of_run in figures.items():
            if of_run["positions"] != length:
                raise Refusal(f"{path}: {name}: expected {length} positions, got {of_run['positions']}")
            _ = [of_run[key]["mean"] + of_run[key]["error"] for key in COMPARED]
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Refusal(f"{path}: expected a report of cf-model eval --oracle --json") from None
    how = report.get("impl") or report.get("backend", "")
    named = {f"{os.path.basename(path)}, {how} {name}": of_run for name, of_run in figures.items()}
    return named, {key: report[key] for key in ABOUT_RUN if key in report}


def print_table(columns):
    def cell(value):
        return f"{value['mean']:.6g} +- {value['error']:.2g}" if isinstance(value, dict) else f"{value:.6g}"

    print("| what | " + " | ".join(columns) + " |")
    print("|---|" + "---:|" * len(columns))
    keys = dict.fromkeys(key for figures in columns.values() for key in figures)
    for key in keys:
        print(f"| {key} | " + " | ".join(cell(f[key]) if key in f else "-" for f in columns.values()) + " |")


def run(args, command):
    require("torch", "transformers", "safetensors", "h5py")
    if args.json:
        check_writable(args.json)
    checkpoint = Checkpoint(args.model)
    model, device = checkpoint.model, torch_device(args.device)
    ids = read_ids(args.tokens, model.vocab_size, args.limit)
    parts = windows(len(ids), args.context, args.stride or args.context)
    ours, programs = {}, []
    for path in args.beside:
        figures, about = read_ours(path, sum(last - scored for _, last, scored in parts))
        ours |= figures
        programs.append(about)
    _, weights, stored = checkpoint.whole()
    reference = build_causal(model, weights, stored, "float64", attention_implementations()[-1], device)
    if has_rms_norms(model):
        widen_norms(reference)
    runs = {v: build_causal(model, weights, stored, *v.split(":"), device) for v in args.runs}
    scores = {variant: Scores() for variant in runs}
    for first, last, scored in parts:
        fed, skipped = ids[first : last - 1], scored - first - 1
        progress(f"id {first} of {len(ids)}")
        expected = logits_of(reference, fed, skipped)
        for variant, hf in runs.items():
            scores[variant].add(logits_of(hf, fed, skipped), expected, ids[first + skipped + 1 : last])
    progress("")
    theirs = {variant: score.figures() for variant, score in scores.items()}
    print_table(theirs | ours)
    faults = {name: found for name, figures in ours.items() if (found := worse(figures, theirs))}
    for name, found in faults.items():
        print(f"{name}: worse than every run of Hugging Face's: {', '.join(found)}")
    if args.json:
        about = {"program": NAME, "command": command, "device": device_name(device), "versions": versions()}
        with atomic(args.json) as temporary:
            write_json(temporary, about | {"figures": theirs, "beside": ours, "worse": faults, "programs": programs})
    return 1 if faults else 0


def parse_arguments(argv):
    parser = Parser(prog=NAME, description=__doc__, epilog=EXAMPLES)
    parser.add_argument("--model", metavar="DIR", required=True, help="the checkpoint, as dump_hf.py takes it")
    parser.add_argument("--tokens", metavar="FILE", required=True, help="a .npy file of token ids in one row")
    parser.add_argument("--context", type=integer(2, 1 << 20), default=2048, metavar="N", help="ids of a window (2048)")
    parser.add_argument("--stride", type=integer(1, 1 << 20), metavar="N", help="ids between windows (--context)")
    parser.add_argument("--limit", type=integer(2, 1 << 40), metavar="N", help="take the first ids alone")
    parser.add_argument(
        "--runs",
        default="float16:eager,float16:sdpa",
        metavar="DTYPE:ATTENTION[,...]",
        help="Hugging Face's runs (float16:eager,float16:sdpa)",
    )
    parser.add_argument(
        "--beside", nargs="*", default=[], metavar="FILE", help="reports of cf-model eval --oracle --json"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="of torch (default auto)")
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    args = parser.parse_args(argv)
    args.runs = args.runs.split(",")
    for variant in args.runs:
        dtype, _, attention = variant.partition(":")
        if dtype not in ("float16", "bfloat16", "float32") or attention not in ("eager", "sdpa"):
            raise Refusal(f"--runs: expected float16, bfloat16 or float32 with :eager or :sdpa, got {variant!r}")
    if args.stride and args.stride > args.context:
        raise Refusal(f"--stride: expected at most --context {args.context}, got {args.stride}")
    return args


def main(argv):
    try:
        return run(parse_arguments(argv), " ".join([NAME, *argv]))
    except Refusal as refusal:
        progress("")
        print(f"{NAME}: {refusal}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
