#!/usr/bin/env python3
"""Writes what Hugging Face's logits processors keep of rows of logits, for tests/cpu_ref/test_sampling.cpp.

    golden/tools/make_sampling_cases.py --out data/sampling_cases.json

The processors and their order are those of GenerationMixin._get_logits_processor, on float32 logits. The logits of a
case are not stored: logit i is value i of the procedural tensor "logits" of kind activation under the case's seed,
times its scale, plus i * 2^-20. All are exact in float32 and none equals another. `ids` are the tokens that the
processors leave above -infinity, `probabilities` the softmax in float64 of the float32 scores that they leave, to ten
digits. A case whose ids hang on a rounding error is refused: they must stay with top_p and min_p a millionth higher and
lower.

Needs torch, transformers and numpy.
"""

import json
import sys

from console import Parser, Refusal, require, require_numpy

NAME = "make_sampling_cases.py"
require_numpy(NAME)

import numpy as np

import procedural

COMMAND = "python3 golden/tools/make_sampling_cases.py --out data/sampling_cases.json"
MARGIN = 1e-6

NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
HISTORY = [5, 3, 5, 60, 2, 90, 3]
# name: vocabulary, scale, settings that are not neutral. Temperature 0 is greedy.
CASES = {
    "greedy": (97, 1, {"temperature": 0.0}),
    "greedy, penalised": (97, 1, {"temperature": 0.0, "repetition_penalty": 1.5}),
    "all": (97, 1, {}),
    "hot": (97, 1, {"temperature": 1.7}),
    "cold": (97, 1, {"temperature": 0.35}),
    "penalised": (97, 1, {"repetition_penalty": 1.3}),
    "encouraged": (97, 1, {"temperature": 0.8, "repetition_penalty": 0.7}),
    "top_k": (97, 1, {"top_k": 5}),
    "top_k 1": (97, 1, {"temperature": 0.6, "top_k": 1}),
    "top_k above the vocabulary": (97, 1, {"top_k": 200}),
    "top_p": (97, 1, {"top_p": 0.9}),
    "small top_p": (97, 1, {"top_p": 0.01}),
    "min_p": (97, 1, {"min_p": 0.05}),
    "min_p 1": (97, 1, {"min_p": 1.0}),
    "top_k, then top_p": (97, 1, {"top_k": 12, "top_p": 0.6}),
    "top_p, then min_p": (97, 1, {"top_p": 0.95, "min_p": 0.1}),
    "large, all": (2048, 1, {}),
    "large, peaked": (2048, 4, {"temperature": 1.3}),
    "large, top_k": (2048, 2, {"temperature": 0.7, "top_k": 50}),
    "large, top_p": (2048, 2, {"temperature": 0.9, "top_p": 0.9}),
    "large, min_p": (2048, 2, {"temperature": 1.2, "min_p": 0.02}),
    "large, everything": (
        2048,
        2,
        {"temperature": 0.8, "top_k": 100, "top_p": 0.92, "min_p": 0.03, "repetition_penalty": 1.2},
    ),
}


def logits_of(vocabulary, scale, seed):
    values = procedural.values("float32", (vocabulary,), "activation", seed, "logits").astype(np.float64)
    exact = values * scale + np.arange(vocabulary) * 2.0**-20
    logits = exact.astype(np.float32)
    if (logits != exact).any() or len(set(logits.tolist())) != vocabulary:
        raise Refusal(f"the logits of seed {seed} are not all exact and different")
    return logits


def scores_of(logits, settings, model):
    """The scores that the processors make of the logits."""
    import torch
    from transformers import GenerationConfig

    sampled = settings["temperature"] != 0
    # What is neutral is left out, as generate() leaves out processors: None turns one off.
    given = {key: value for key, value in settings.items() if value != NEUTRAL[key] and (sampled or value != 0)}
    config = GenerationConfig(do_sample=sampled, **({"top_k": None} | given))
    processors = model._get_logits_processor(
        generation_config=config, input_ids_seq_length=len(HISTORY), logits_processor=[]
    )
    return processors(torch.tensor([HISTORY]), torch.from_numpy(logits.copy())[None])[0]


def kept_ids(scores):
    import torch

    return torch.nonzero(scores > -torch.inf)[:, 0].tolist()


def make_case(name, seed, model):
    import torch

    vocabulary, scale, given = CASES[name]
    settings = NEUTRAL | given
    logits = logits_of(vocabulary, scale, seed)
    scores = scores_of(logits, settings, model)
    if scores.dtype != torch.float32:
        raise Refusal(f"{name}: expected scores in float32, got {scores.dtype}")
    ids = kept_ids(scores)
    if len(set(scores[ids].tolist())) != len(ids):
        raise Refusal(f"{name}: expected scores without ties, choose another seed")
    for factor in (1 - MARGIN, 1 + MARGIN):
        # A value at its bound stays there.
        moved = {k: v * factor if k in ("top_p", "min_p") and v < 1 else v for k, v in settings.items()}
        if kept_ids(scores_of(logits, moved, model)) != ids:
            raise Refusal(f"{name}: a cut-off lies within {MARGIN} of a token, choose another seed")
    if settings["temperature"] == 0:
        ids, probabilities = [int(scores.argmax())], [1.0]
    else:
        probabilities = [float(f"{p:.9e}") for p in scores.double().softmax(-1)[ids].tolist()]
    case = {"name": name, "vocabulary": vocabulary, "scale": scale, "seed": seed, "history": HISTORY}
    return case | settings | {"ids": ids, "probabilities": probabilities}


def make_cases():
    """The file's content."""
    from hf_model import versions
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    # generate()'s list of processors does not depend on the model's sizes.
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=8)
    )
    return {
        "about": {"command": COMMAND, "versions": versions()},
        "cases": [make_case(name, seed, model) for seed, name in enumerate(CASES, start=1)],
    }


def to_text(content):
    """JSON with a line a case."""
    cases = ",\n".join(json.dumps(case, separators=(",", ":")) for case in content["cases"])
    return f'{{"about": {json.dumps(content["about"])},\n"cases": [\n{cases}\n]}}\n'


def main(argv):
    parser = Parser(prog=NAME, description=__doc__)
    parser.add_argument("--out", metavar="FILE", default="data/sampling_cases.json", help="default: %(default)s")
    try:
        args = parser.parse_args(argv)
        require("torch", "transformers")
        text = to_text(make_cases())
        with open(args.out, "w", encoding="utf-8") as file:
            file.write(text)
    except (Refusal, OSError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
