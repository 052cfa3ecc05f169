#!/usr/bin/env python3
"""Times decoding on a GPU beside what others make of the same work: torch op by op, the same in a CUDA graph, Hugging
Face eager, Hugging Face with a static cache and torch.compile, cuBLAS's products, torch's sdpa and layer_norm,
FlashInfer's attention over pages (of new tokens, and of prompts of --kv-len tokens), torch's products with int4
weights and two kernels in Triton, against cf-layer and cf-op, which are called as programs in the same run. A row of
an op that Triton has too says how many lines of code its kernel has.

Weights are random, of Hugging Face's own initial scale, in float16. All layers are resident, so that each layer finds
its weights cold. A step of the stack is the layers alone, without embedding and head; it sees kv_len cache entries, the
new token's with them. A peer that fails is recorded with its reason, and the others go on.

With --what model whole models run instead, of Pythia, Llama or Qwen2 and in the preset's own dtype, from a prompt's ids
to new ids on the host: cf-model bench beside Hugging Face's generate(), its continuous batching (hf_continuous), the
same with a static cache and compiled steps, and torch's operators in CUDA graphs, one for every step (torch_graph) or
one for each kv_len (torch_graphs). torch runs the products that checkpoints store, so Llama's q, k and v one by one.
Times are the host's: TTFT is the time to the last slot's first id, TPOT that between ids after it. Many prompts at
once, as evaluations run them: --slots 64,256 --prompt-len 32 --peers hf_generate,hf_continuous.
The greedy ids of one prompt are compared with hf_generate's: cf-model's with the same procedural weights of
--agreement-preset, the peers' with the random weights that they are timed with.

With --what int4 a layer's four products run with int4 weights, of each number of --tokens: cf-op, Humming
(pip install humming-kernels), torch's int4 product, and cuBLASLt with float16 weights. The outputs of all, and this
library's by the package cf_ops, are compared with float64.

Prints a markdown table. Needs torch and transformers, and the programs built with the CUDA backend.
"""

import contextlib
import importlib.metadata
import os
import shlex
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, os.pardir, "golden", "tools"))

import console
import dump_hf
import golden_file
import model_config
from peers import int4_products, layer_bench, model_peers, timing
from peers.int4_bench import Int4Bench
from peers.layer_bench import Bench
from peers.model_bench import AGREEMENT_PRESETS, ModelBench
from peers.programs import BUILD
from peers.stacks import COMPILE_MODES

NAME = os.path.basename(__file__)
# What is timed, and the options that are about it alone or have a default of its own.
DEFAULTS = {
    "layers": {
        "preset": "pythia-2.8b,pythia-6.9b",
        "peers": ",".join(layer_bench.PEERS),
        "impl": "graph,persistent",
        "runs": 30,
        "warmup": 5,
        "batch": [1, 4, 16],
        "kv_len": [128, 512, 1024, 2048],
        "compile_modes": COMPILE_MODES[0],
        "cf_layer": os.path.join(BUILD, "cf-layer"),
        "cf_op": os.path.join(BUILD, "cf-op"),
    },
    "model": {
        "preset": "pythia-2.8b",
        "peers": ",".join(model_peers.PEERS),
        "impl": "auto",
        "runs": 5,
        "warmup": 2,
        "prompt_len": [16, 128, 512, 2048],
        "new_tokens": [32],
        "slots": [1],
        "agreement_preset": "auto",
        "cf_model": os.path.join(BUILD, "cf-model"),
    },
    "int4": {
        "preset": "pythia-2.8b,llama-3.1-8b",
        "peers": ",".join(int4_products.PEERS),
        "runs": 20,
        "warmup": 3,
        "tokens": [1, 8, 16, 32, 64, 128, 512, 2048],
        "cf_op": os.path.join(BUILD, "cf-op"),
    },
}
NAMES = {"layers": "--cf-layer and --cf-op name", "model": "--cf-model names", "int4": "--cf-op names"}
KINDS = {"layers": Bench, "model": ModelBench, "int4": Int4Bench}


def default_text(attribute):
    """An option's default in its help, of each --what that takes it."""
    found = {what: defaults[attribute] for what, defaults in DEFAULTS.items() if attribute in defaults}
    texts = [",".join(map(str, value)) if isinstance(value, list) else str(value) for value in found.values()]
    if len(texts) == 1:
        return "default " + texts[0]
    return "default " + ", ".join(f"{text} ({what})" for what, text in zip(found, texts))


def parse_arguments(argv):
    count = console.integer(1, 1 << 20)
    parser = console.Parser(prog=NAME, description=__doc__)
    parser.add_argument("--what", choices=list(DEFAULTS), default="layers", help="what is timed (default layers)")
    parser.add_argument("--preset", metavar="NAME[,NAME...]", help=default_text("preset"))
    parser.add_argument("--peers", metavar="NAME[,NAME...]", help="some of these; " + default_text("peers"))
    parser.add_argument("--impl", metavar="NAME[,NAME...]", help="the programs' --impl; " + default_text("impl"))
    parser.add_argument("--runs", type=count, help="timed steps, or runs of a model; " + default_text("runs"))
    parser.add_argument("--warmup", type=count, help="steps or runs before them; " + default_text("warmup"))
    parser.add_argument(
        "--peer-timeout-s", type=count, default=600, metavar="N",
        help="seconds that one measurement may take (default 600)",
    )  # fmt: skip
    parser.add_argument(
        "--time-limit-s", type=count, default=7200, metavar="N",
        help="seconds after which nothing more is measured; what is left out says so (default 7200)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write everything there, anew after each measurement")
    layers = parser.add_argument_group("--what layers")
    layers.add_argument("--batch", type=dump_hf.lengths, metavar="N[,N...]", help=default_text("batch"))
    layers.add_argument(
        "--kv-len", type=dump_hf.lengths, metavar="N[,N...]",
        help="cache entries after the append; " + default_text("kv_len"),
    )  # fmt: skip
    layers.add_argument(
        "--compile-modes", metavar="NAME[,NAME...]",
        help=f"torch.compile's modes, some of {','.join(COMPILE_MODES)}; the second compiles for minutes; "
        + default_text("compile_modes"),
    )  # fmt: skip
    layers.add_argument("--cf-layer", metavar="FILE", help="the program")
    layers.add_argument("--cf-op", metavar="FILE", help="the program; with --what int4, too")
    model = parser.add_argument_group("--what model")
    model.add_argument(
        "--prompt-len", type=dump_hf.lengths, metavar="N[,N...]", help="a prompt's ids; " + default_text("prompt_len")
    )
    model.add_argument(
        "--new-tokens", type=dump_hf.lengths, metavar="N[,N...]", help="of a prompt; " + default_text("new_tokens")
    )
    model.add_argument(
        "--slots", type=dump_hf.lengths, metavar="N[,N...]", help="prompts at once; " + default_text("slots")
    )
    model.add_argument(
        "--agreement-preset", metavar="NAME",
        help="whose ids are compared where one prompt runs, none, or auto: "
        + f"{' or '.join(AGREEMENT_PRESETS)}, by the family; a large one's weights take minutes to make; "
        + default_text("agreement_preset"),
    )  # fmt: skip
    model.add_argument("--cf-model", metavar="FILE", help="the program")
    int4 = parser.add_argument_group("--what int4")
    int4.add_argument("--tokens", type=dump_hf.lengths, metavar="N[,N...]", help=default_text("tokens"))
    args = parser.parse_args(argv)
    for what, defaults in DEFAULTS.items():
        for attribute, default in defaults.items():
            if what == args.what and getattr(args, attribute) is None:
                setattr(args, attribute, default)
            elif attribute not in DEFAULTS[args.what] and getattr(args, attribute) is not None:
                raise console.Refusal(f"--{attribute.replace('_', '-')}: expected with --what {what}")
    peers = {
        "layers": layer_bench.PEERS,
        "model": tuple(model_peers.PEERS),
        "int4": tuple(int4_products.PEERS),
    }[args.what]
    presets = model_config.PYTHIA_PRESETS if args.what == "layers" else model_config.PRESETS
    known = {"preset": tuple(presets), "peers": peers, "compile_modes": COMPILE_MODES}
    for attribute in (name for name in known if name in DEFAULTS[args.what]):
        values = getattr(args, attribute).split(",")
        for value in values:
            if value not in known[attribute]:
                option = attribute.replace("_", "-")
                raise console.Refusal(f"--{option} must be of {', '.join(known[attribute])}, got {value!r}")
        setattr(args, attribute, values)
    longest = min(presets[preset].max_position_embeddings for preset in args.preset)
    if args.what == "layers":
        if min(args.kv_len) < 2 or max(args.kv_len) > longest:
            raise console.Refusal(f"--kv-len must be 2 to {longest}, got {min(args.kv_len)} to {max(args.kv_len)}")
        programs = (args.cf_layer, args.cf_op)
    elif args.what == "int4":
        programs = (args.cf_op,)
    else:
        if max(args.prompt_len) > longest:
            raise console.Refusal(f"--prompt-len must be at most {longest}, got {max(args.prompt_len)}")
        if args.agreement_preset not in ("auto", "none", *presets):
            raise console.Refusal(
                f"--agreement-preset must be auto, none or of {', '.join(presets)}, got {args.agreement_preset!r}"
            )
        args.agreement_preset = None if args.agreement_preset == "none" else args.agreement_preset
        programs = (args.cf_model,)
    for program in programs:
        if not os.access(program, os.X_OK):
            raise console.Refusal(f"{program}: no such program; scripts/test builds it, {NAMES[args.what]} it")
    if args.json:
        golden_file.check_writable(args.json)
    return args


def main(argv):
    try:
        args = parse_arguments(argv)
        import torch
        import transformers

        if not torch.cuda.is_available():
            raise console.Refusal("torch finds no GPU")
        transformers.logging.set_verbosity_error()
    except console.Refusal as refusal:
        print(f"{NAME}: {refusal}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"{NAME}: {error}; torch and transformers are needed", file=sys.stderr)
        return 2

    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__}
    with contextlib.suppress(ImportError):  # its rows say that it is missing
        import triton

        versions["triton"] = triton.__version__
    try:
        import flashinfer

        versions["flashinfer"] = flashinfer.__version__
    except Exception as error:  # a wheel for another torch or CUDA raises whatever it likes
        versions["flashinfer"] = timing.one_line(error)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["humming"] = importlib.metadata.version("humming-kernels")
    kind = KINDS[args.what]
    about = {
        "what": kind.WHAT,
        "command": shlex.join([NAME, *argv]),
        "gpu": torch.cuda.get_device_name(0),
        "versions": versions,
        "dtype": ", ".join(dict.fromkeys(model_config.PRESET_DTYPES[preset] for preset in args.preset)),
        "runs": args.runs,
        "warmup": args.warmup,
    }
    bench = kind(args, about)
    for preset in args.preset:
        bench.run(preset)
        bench.free()
    bench.print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
