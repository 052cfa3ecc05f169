"""Dumps a whole model's greedy run from Hugging Face into a golden file, in the schema of model_golden.hpp."""

import json
import os
from dataclasses import replace

import numpy as np

import procedural
from console import Refusal, progress, require
from families import join_shapes, split
from golden_file import MODEL_SCHEMA, MODEL_SCHEMA_VERSION, check_writable, write_golden
from hf_model import (
    PACKAGES,
    Checkpoint,
    about,
    attention_implementations,
    build_causal,
    generate,
    has_rms_norms,
    run_model,
    torch_device,
    versions,
    widen_norms,
)
from model_config import PRESETS, config_json, model_shapes
from numpy_model import MAX_ERROR, MAX_ERROR_FLOAT32_NORMS, Step, check_rope, check_taps, reference_model, rough_error

ALL_LOGITS_VOCAB = 4096  # the largest vocabulary whose logits are all kept by default
TOP = 64  # of larger ones


def check_arguments(args, model):
    """Refuses arguments that contradict the model, and fills in those that are not given."""
    layers, vocab, positions = model.num_hidden_layers, model.vocab_size, model.max_position_embeddings
    if args.prompt_ids and max(args.prompt_ids) >= vocab:
        raise Refusal(f"--prompt-ids must be below vocab_size {vocab}, got {max(args.prompt_ids)}")
    prompt_len = len(args.prompt_ids or []) or args.prompt_len
    if prompt_len + args.new_tokens - 1 > positions:
        raise Refusal(
            f"the prompt and --new-tokens must be at most {positions + 1} tokens, the last of which is not fed, for "
            f"max_position_embeddings {positions}, got {prompt_len} and {args.new_tokens}"
        )
    if args.top is None:
        args.top = 0 if vocab <= ALL_LOGITS_VOCAB else TOP
    if args.top > vocab:
        raise Refusal(f"--top must be at most vocab_size {vocab}, got {args.top}")
    if args.taps_of is None:
        args.taps_of = list(range(layers)) if layers <= 2 else [0, layers - 1]
    if args.taps_of and max(args.taps_of) >= layers:
        raise Refusal(f"--taps-of must be 0 to {layers - 1}, got {max(args.taps_of)}")


def log_sum_exp(logits):
    """log(sum(exp(row))) of each row, in float64."""
    most = logits.max(1)
    return most + np.log(np.exp(logits - most[:, None]).sum(1))


def top_ids(logits, count):
    """The ids of each row's `count` largest logits, the largest first, of equal ones the lowest id first."""
    return np.argsort(-logits, 1, kind="stable")[:, :count].astype(np.int32)


def float64_run(model, weights, dtype, prompt, new_tokens, device):
    """Hugging Face in float64, checked against its own decoding with a cache and against numpy: the greedy token ids,
    the taps and logits of one pass over all but the last of them, cos and sin, and the attention implementation."""
    implementation = attention_implementations()[-1]
    progress(f"float64 {implementation}")
    hf = build_causal(model, weights, dtype, "float64", implementation, device)
    if has_rms_norms(model):
        widen_norms(hf)
    ids, decoded = generate(hf, prompt, new_tokens)
    taps, tables = run_model(hf, model, ids[:-1])
    del hf
    chosen = taps["logits"][len(prompt) - 1 :]
    if not np.array_equal(chosen.argmax(1), ids[len(prompt) :]):
        raise Refusal("float64: one pass must choose the ids of the run with a cache, got others")
    check_taps("float64 with a cache", {"logits": decoded}, {"logits": chosen}, MAX_ERROR)
    fed = len(ids) - 1
    check_rope(model, Step(dtype, fed, [fed], None, "none"), **tables)
    progress("float64 numpy")
    reference, logits = reference_model(model, weights, ids[:-1], tables.get("cos"), tables.get("sin"), dtype)
    check_taps("float64", taps, reference | {"logits": logits}, MAX_ERROR)
    if has_rms_norms(model):
        hf = build_causal(model, weights, dtype, "float64", implementation, device)
        as_it_is, _ = run_model(hf, model, ids[:-1])
        check_taps("float64 with norms in float32", as_it_is, taps, MAX_ERROR_FLOAT32_NORMS)
    return ids, taps, tables, implementation


def dump_model(args, command):
    """Writes the golden file that the arguments ask for."""
    checkpoint = Checkpoint(args.model) if args.model else None
    model = checkpoint.model if checkpoint else PRESETS[args.preset]
    if args.layers:
        if args.layers > model.num_hidden_layers:
            raise Refusal(f"--layers must be at most {model.num_hidden_layers}, got {args.layers}")
        model = replace(model, num_hidden_layers=args.layers)
    check_arguments(args, model)
    check_writable(args.out)
    require(*PACKAGES)

    import transformers

    transformers.logging.set_verbosity_error()
    device = torch_device(args.device)

    progress("weights")
    if checkpoint:
        stored, weights, dtype = checkpoint.whole()
        if args.dtype not in (None, dtype):
            raise Refusal(f"--dtype must be the checkpoint's {dtype}, got {args.dtype}")
    else:
        dtype = args.dtype or "float16"
        shapes = model_shapes(model)
        joined = join_shapes(model.names, shapes)
        stored = {name: procedural.weight(dtype, shape, args.seed, name) for name, shape in joined.items()}
        weights = split(model.names, stored, shapes)
    prompt = args.prompt_ids
    if prompt is None:
        prompt = np.random.default_rng(args.seed).integers(0, model.vocab_size, args.prompt_len).tolist()

    ids, reference, tables, implementation = float64_run(model, weights, dtype, prompt, args.new_tokens, device)
    best = top_ids(reference["logits"], args.top)
    outside = model.names.embedding_tap, model.names.final_norm_tap
    kept = [outside[0], *(f"layers.{n}.output" for n in args.taps_of), outside[1]] if args.taps_of else []
    groups = {
        "": {"ids": (ids, "int32")},
        "inputs": {name: (table.astype(np.float32), "float32") for name, table in tables.items()},
    }
    variants, about_logits = {}, {}

    def add(name, taps, dtype, implementation, wide_norms=False):
        described = about(dtype, implementation, device, wide_norms)
        logits, path = taps["logits"], f"logits/{name}"
        about_logits[path] = described
        if args.top:
            groups[path] = {
                "ids": (best, "int32"),
                "values": (np.take_along_axis(logits, best, 1), dtype),
                "log_sum_exp": (log_sum_exp(procedural.widen(logits, dtype)), "float64"),
            }
        else:
            groups.setdefault("logits", {})[name] = (logits, dtype)
        if kept:
            variants[name] = described, {tap: taps[tap] for tap in kept}, dtype

    add("float64", reference, "float64", implementation, has_rms_norms(model))
    for implementation in attention_implementations():
        progress(f"{dtype} {implementation}")
        hf = build_causal(model, weights, dtype, dtype, implementation, device)
        low, _ = run_model(hf, model, ids[:-1])
        del hf
        name = f"{dtype}_{implementation}"
        widened = {tap: procedural.widen(array, dtype) for tap, array in low.items()}
        # Each layer rounds anew.
        check_taps(name, widened, reference, rough_error(dtype) * model.num_hidden_layers)
        add(name, low, dtype, implementation)

    checksum = checkpoint.checksum(stored) if checkpoint else procedural.weights_checksum(stored)
    attributes = {
        "schema": MODEL_SCHEMA,
        "schema_version": np.int64(MODEL_SCHEMA_VERSION),
        "producer": "golden/tools/dump_hf.py",
        "command": command,
        "versions": json.dumps(versions()),
        "config": checkpoint.config_text if checkpoint else config_json(model),
        "model": os.path.basename(os.path.abspath(args.model)) if checkpoint else args.preset,
        "dtype": dtype,
        "seed": np.uint64(args.seed),
        "weights": "checkpoint" if checkpoint else "procedural",
        "weights_checksum": np.uint64(checksum),
        "prompt_len": np.int64(len(prompt)),
    }
    if checkpoint:
        attributes["weights_checkpoint"] = os.path.relpath(args.model, os.path.dirname(args.out) or ".")
    progress("writing")
    write_golden(args.out, attributes, groups, variants, about_logits)
    progress("")
