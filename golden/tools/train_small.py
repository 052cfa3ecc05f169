#!/usr/bin/env python3
"""Trains a small GPT-NeoX or Llama model on the sources of Python's standard library and writes it as a checkpoint.

The model has learnt something: a run of it in 16 bits or with quantised weights can be judged by its loss on text that
it has not seen. Its tokenizer is a byte-level BPE made from the same sources. The files, sorted by path, are split by a
hash of the path: about one in ten is held out. The output directory holds model.safetensors (float16), config.json,
generation_config.json, tokenizer.json, held_out.npy (token ids of held-out files), and provenance.json. A second
model can take the tokenizer and the held-out ids of the first, so that the two losses can be compared.

Needs torch, transformers, tokenizers, safetensors and numpy.
"""

import hashlib
import math
import os
import shlex
import sys
import sysconfig
import time
from dataclasses import dataclass, replace

from console import Parser, Refusal, integer, progress, require, require_numpy

NAME = "train_small.py"
require_numpy(NAME)

import numpy as np


from golden_file import current_umask, new_directory, write_json
from hf_model import class_of, default_dtype, device_name, torch_device, transformers_config, versions
from model_config import Model
from tokenize_text import encode, load_tokenizer, read_ids, write_ids

EXAMPLES = """
examples
  the model of about 3.4 million parameters, on a GPU:
    train_small.py --device cuda --out stdlib-4m
  a Llama of about 2 million parameters beside it, on a CPU:
    train_small.py --family llama --text-of stdlib-4m --device cpu --batch 16 --out stdlib-llama-2m
  a try on a CPU, of a tiny model:
    train_small.py --size tiny --steps 50 --out tiny
Exit status: 0 when the directory is written, 2 when the arguments are refused.
"""

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")
END_OF_TEXT = "<|endoftext|>"  # behind each file
# Other people's packages, and tests, whose files are partly not meant to be read.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
HELD_OUT_BYTES = 26  # of the hash's first byte's 256 values: a tenth
EVALUATIONS = 20  # losses that are noted on the way


@dataclass(frozen=True)
class Size:
    """A model and how it is trained."""

    model: Model
    source_bytes: int  # read at most
    held_out_tokens: int
    batch: int  # sequences of a step, of max_position_embeddings tokens each
    learning_rate: float


# Heads have 64 elements. Embeddings are tied: two would be a large part of so small a model.
def neox_shape(hidden, layers, intermediate, vocab, positions):
    sizes = (hidden, layers, hidden // 64, intermediate, vocab, positions)
    return Model(*sizes, tie_word_embeddings=True)


def llama_shape(hidden, layers, intermediate, vocab, positions):
    """All query heads share one kv head."""
    sizes = (hidden, layers, hidden // 64, intermediate, vocab, positions)
    return Model(*sizes, model_type="llama", num_key_value_heads=1, head_dim=64, tie_word_embeddings=True)


SIZES = {
    "gpt_neox": {
        "small": Size(neox_shape(256, 4, 896, 2048, 512), 1 << 30, 1 << 16, 32, 2e-3),
        "tiny": Size(neox_shape(64, 1, 128, 384, 32), 2_000_000, 1 << 11, 8, 4e-3),
    },
    "llama": {
        "small": Size(llama_shape(192, 4, 512, 2048, 512), 1 << 30, 1 << 16, 32, 2e-3),
        "tiny": Size(llama_shape(64, 1, 128, 384, 32), 2_000_000, 1 << 11, 8, 4e-3),
    },
}


def sources(folder, most_bytes):
    """(path below the folder, text) of the UTF-8 .py files, sorted by path, of at most so many bytes together."""
    paths = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        paths += [os.path.relpath(os.path.join(root, name), folder) for name in files if name.endswith(".py")]
    found, total = [], 0
    for path in sorted(path.replace(os.sep, "/") for path in paths):
        try:
            with open(os.path.join(folder, path), "rb") as file:
                content = file.read()
            text = content.decode()
        except (OSError, UnicodeDecodeError):
            continue
        if not text.strip():
            continue
        total += len(content)
        if total > most_bytes:
            break
        found.append((path, text))
    return found


def is_held_out(path):
    return hashlib.sha256(path.encode()).digest()[0] < HELD_OUT_BYTES


def train_tokenizer(texts, vocab_size):
    """A byte-level BPE whose token 0 is the end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() > vocab_size:
        raise Refusal(f"tokenizers: expected at most {vocab_size} tokens, got {tokenizer.get_vocab_size()}")
    return tokenizer


def rate_at(step, steps, highest):
    """The learning rate of a step: a linear rise over the first twentieth, then half a cosine down to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return highest * (step + 1) / warmup
    return highest * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))


def mean_loss(hf, ids, length):
    """The mean loss of a token in nats, over windows of `length` tokens that stand one behind the other. A window's
    first token is not predicted."""
    import torch

    hf.eval()
    windows = ids[: len(ids) // length * length].reshape(-1, length)
    with torch.no_grad():
        losses = [float(hf(input_ids=part, labels=part).loss) * len(part) for part in windows.split(32)]
    hf.train()
    return sum(losses) / len(windows)


def train(hf, ids, held_out, size, steps, seed):
    """Trains the model in float32. Returns the losses on the way: a list of dicts."""
    import torch

    length, losses, running = size.model.max_position_embeddings, [], []
    matrices = [p for p in hf.parameters() if p.dim() > 1]
    vectors = [p for p in hf.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=size.learning_rate, betas=(0.9, 0.95))
    random = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length)
    every = max(1, steps // EVALUATIONS)
    for step in range(steps):
        starts = torch.randint(len(ids) - length + 1, (size.batch, 1), generator=random)
        batch = ids[(starts + offsets).to(ids.device)]
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps, size.learning_rate)
        loss = hf(input_ids=batch, labels=batch).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.0)
        optimizer.step()
        running.append(loss.detach())
        if (step + 1) % every == 0 or step + 1 == steps:
            train_loss = float(torch.stack(running).mean())
            if not math.isfinite(train_loss):
                raise Refusal(f"step {step + 1}: expected a finite loss, got {train_loss}")
            losses.append({"step": step + 1, "train": train_loss, "held_out": mean_loss(hf, held_out, length)})
            running = []
            progress(f"step {step + 1} of {steps}: {losses[-1]['train']:.3f}, held out {losses[-1]['held_out']:.3f}")
    return losses


def rounded(hf):
    """The model's weights rounded to float16, in place; the same as a dict. Refuses weights beyond float16."""
    import torch

    state = {}
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            state[name] = parameter.to(torch.float16)
            if not bool(torch.isfinite(state[name]).all()):
                raise Refusal(f"{name}: expected weights within float16, got larger ones")
            parameter.copy_(state[name])
    return state


def write_model(directory, model, state):
    """Writes a checkpoint in float16."""
    import torch
    from transformers import logging

    logging.disable_progress_bar()
    with default_dtype("float16"), torch.no_grad():
        hf = class_of(model, "ForCausalLM")(transformers_config(model, "sdpa"))
        for name, parameter in hf.named_parameters():
            parameter.copy_(state[name])
    hf.save_pretrained(directory, safe_serialization=True)


def tokenizer_and_held_out(directory, size):
    """Those that this program has written into a directory."""
    path = os.path.join(directory, "tokenizer.json")
    tokenizer = load_tokenizer(path)
    if tokenizer.get_vocab_size() > size.model.vocab_size or tokenizer.token_to_id(END_OF_TEXT) != 0:
        raise Refusal(
            f"{path}: expected at most {size.model.vocab_size} tokens, {END_OF_TEXT} the first of them, "
            f"got {tokenizer.get_vocab_size()}, {END_OF_TEXT} as {tokenizer.token_to_id(END_OF_TEXT)}"
        )
    path = os.path.join(directory, "held_out.npy")
    ids = read_ids(path, size.model.vocab_size)
    if len(ids) < size.held_out_tokens:
        raise Refusal(f"{path}: expected {size.held_out_tokens} ids, got {len(ids)}")
    return tokenizer, ids


def run(args, command):
    size = SIZES[args.family][args.size]
    size = replace(size, batch=args.batch or size.batch)
    model, length = size.model, size.model.max_position_embeddings
    with new_directory(args.out) as directory:
        require(*PACKAGES)
        import torch

        device = torch_device(args.device)
        progress("sources")
        files = sources(sysconfig.get_paths()["stdlib"], size.source_bytes)
        parts = {held: [text for path, text in files if is_held_out(path) == held] for held in (False, True)}
        if args.text_of:
            tokenizer, held_out = tokenizer_and_held_out(args.text_of, size)
        else:
            tokenizer = train_tokenizer(parts[False], model.vocab_size)
            held_out = encode(tokenizer, parts[True], 0)[: size.held_out_tokens]
        ids = encode(tokenizer, parts[False], 0)
        if len(held_out) < size.held_out_tokens or len(ids) < length:
            raise Refusal(
                f"{sysconfig.get_paths()['stdlib']}: expected sources of {size.held_out_tokens} held-out tokens and "
                f"{length} others, got {len(held_out)} and {len(ids)}"
            )

        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        hf = class_of(model, "ForCausalLM")(transformers_config(model, "sdpa")).to(device).train()
        parameters = sum(p.numel() for p in hf.parameters())
        on_device = [torch.from_numpy(part).long().to(device) for part in (ids, held_out)]
        start = time.monotonic()
        losses = train(hf, *on_device, size, args.steps, args.seed)
        seconds = time.monotonic() - start
        state = rounded(hf)
        final_loss = mean_loss(hf, on_device[1], length)

        progress("writing")
        write_model(directory, model, state)
        tokenizer.save(os.path.join(directory, "tokenizer.json"), pretty=False)
        if not args.text_of:
            write_ids(os.path.join(directory, "held_out.npy"), held_out.astype(np.uint16))
        about = {
            "command": command,
            "seed": args.seed,
            "steps": args.steps,
            "training": {
                "family": args.family,
                "size": args.size,
                "parameters": parameters,
                "tokens": len(ids),
                "tokens_of_a_step": size.batch * length,
                "learning_rate": size.learning_rate,
                "device": device_name(device),
                "seconds": round(seconds, 1),
            },
            "sources": {
                "what": "Python's standard library without its tests",
                "licence": "PSF-2.0",
                "python": sys.version.split()[0],
                "files": len(files),
                "bytes": sum(len(text.encode()) for _, text in files),
                "held_out_files": len(parts[True]),
                "held_out_tokens": len(held_out),
            },
            **({"tokenizer_and_held_out_ids": os.path.basename(os.path.abspath(args.text_of))} if args.text_of else {}),
            "losses_in_nats": losses,
            "held_out_loss_of_the_rounded_weights": final_loss,
            "versions": versions(*PACKAGES, "numpy"),
        }
        write_json(os.path.join(directory, "provenance.json"), about)
        for name in os.listdir(directory):
            os.chmod(os.path.join(directory, name), 0o666 & ~current_umask())
    progress("")
    print(f"{args.out}: {parameters} parameters, {args.steps} steps, held-out loss {final_loss:.4f} nats a token")


def parse_arguments(argv):
    parser = Parser(prog=NAME, description=__doc__, epilog=EXAMPLES)
    parser.add_argument("--out", metavar="DIR", required=True, help="the directory to write, which must not be there")
    parser.add_argument(
        "--steps", type=integer(1, 1 << 24), default=2000, metavar="N", help="of training (default 2000)"
    )
    parser.add_argument("--family", choices=list(SIZES), default="gpt_neox", help="of the model (default gpt_neox)")
    parser.add_argument("--size", choices=["small", "tiny"], default="small", help="tiny is for a try (default small)")
    parser.add_argument(
        "--batch", type=integer(1, 1 << 16), metavar="N", help="sequences of a step (default: what the size says)"
    )
    parser.add_argument(
        "--text-of",
        metavar="DIR",
        help="take the tokenizer and the held-out ids of this directory of the program; the ids are not written again",
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="where to train (default: the GPU where torch has one)",
    )
    parser.add_argument("--seed", type=integer(0, (1 << 63) - 1), default=0, help="of weights and batches (default 0)")
    return parser.parse_args(argv)


def main(argv):
    try:
        run(parse_arguments(argv), shlex.join([NAME, *argv]))
    except Refusal as refusal:
        progress("")
        print(f"{NAME}: {refusal}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
