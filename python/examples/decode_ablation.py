#!/usr/bin/env python3
"""Decodes greedily with four mixtures of kernels: a layer's attention half and its MLP half from cf_ops or from torch.

Prints a step's median time, the tokens that equal torch's, and the logits' error against float64. Every token must be
the one that float64 prefers, unless its margin is smaller than float32's error. The final norm and the head come
from the library of the MLP half. Needs torch.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import numpy as np

import common
from cf_ops import ops
from checkpoints import DIRECTORY, Array, Checkpoint, oracle, unexplained

MIXTURES = {  # the libraries of the attention half and of the MLP half
    "all torch": ("torch", "torch"),
    "our attention, torch's MLP": ("cf_ops", "torch"),
    "torch's attention, our MLP": ("torch", "cf_ops"),
    "all cf_ops": ("cf_ops", "cf_ops"),
}


class Decoded(NamedTuple):
    ids: list[int]  # the new ones
    logits: Array  # (new ids, vocab), from which they were chosen
    step_ms: float  # the median of the steps behind the prompt


def our_attention_half(
    weights: dict[str, Any], config: dict[str, Any], x: Any, cos: Any, sin: Any, k_cache: Any, v_cache: Any, kv_len: int
) -> Any:
    """torch_layer.attention_half() out of ops."""
    import torch

    tokens = len(x)
    lengths = torch.tensor([kv_len], dtype=torch.int32, device=x.device)
    rows = torch.arange(tokens, dtype=torch.int32, device=x.device)  # of cos and sin
    norm = weights["input_layernorm.weight"], weights["input_layernorm.bias"]
    product = linear_of(weights, "attention.query_key_value")
    q, _, _ = ops.ln_qkv(x, *norm, *product, cos, sin, rows, lengths, k_cache, v_cache, eps=config["layer_norm_eps"])
    context = ops.attention(q, k_cache, v_cache, lengths, scale=q.shape[-1] ** -0.5, max_kv_len=kv_len)
    return ops.linear(context.view(tokens, -1), *linear_of(weights, "attention.dense"), x, epilogue="residual")


def our_mlp_half(weights: dict[str, Any], config: dict[str, Any], x: Any, residual: Any) -> Any:
    """torch_layer.mlp_half() out of ops."""
    norm = weights["post_attention_layernorm.weight"], weights["post_attention_layernorm.bias"]
    gelu: ops.Epilogue = "gelu_erf" if config["hidden_act"] == "gelu" else "gelu_tanh"
    normed = ops.layernorm(x, *norm, eps=config["layer_norm_eps"])
    act = ops.linear(normed, *linear_of(weights, "mlp.dense_h_to_4h"), epilogue=gelu)
    return ops.linear(act, *linear_of(weights, "mlp.dense_4h_to_h"), residual, epilogue="residual")


def linear_of(weights: dict[str, Any], name: str) -> tuple[Any, Any]:
    return weights[f"{name}.weight"], weights.get(f"{name}.bias")


class Model:
    """A checkpoint's weights for one mixture."""

    def __init__(self, checkpoint: Checkpoint, mixture: str, device: str, has_fault: bool) -> None:
        import torch_layer

        self.checkpoint, self.device, self.dtype = checkpoint, device, common.activation_dtype(device)
        attention, self.mlp = MIXTURES[mixture]
        self.halves: list[Any] = [
            torch_layer.attention_half if attention == "torch" else our_attention_half,
            torch_layer.mlp_half if self.mlp == "torch" else our_mlp_half,
        ]
        of_library = {"torch": self.dtype, "cf_ops": None}  # the checkpoint's own
        self.layers = []
        for number in range(checkpoint.config["num_hidden_layers"]):
            weights = checkpoint.layer(number)
            if has_fault and attention == "cf_ops" and number == 0:
                weights["input_layernorm.bias"] = weights["input_layernorm.bias"] + np.float16(0.25)
            parts = {half: torch_layer.tensors(weights, device, of_library[half]) for half in {attention, self.mlp}}
            self.layers.append((parts[attention], parts[self.mlp]))
        names = [f"gpt_neox.final_layer_norm.{part}" for part in ("weight", "bias")]
        ends = {name: checkpoint.tensor(name) for name in names} | {"head": checkpoint.head()}
        ends["table"] = checkpoint.tensor("gpt_neox.embed_in.weight")
        self.ends = torch_layer.tensors(ends, device, of_library[self.mlp])
        self.norm = [self.ends[name] for name in names]

    def logits(self, ids: list[int], caches: list[Any], kv_len: int, table: list[Any]) -> Any:
        """Takes the newest ids through the model; the last one's logits (vocab)."""
        import torch
        from torch.nn import functional

        config, eps = self.checkpoint.config, self.checkpoint.config["layer_norm_eps"]
        cos, sin = (half[kv_len - len(ids) : kv_len] for half in table)
        x = functional.embedding(torch.tensor(ids, device=self.device), self.ends["table"]).to(self.dtype)
        for (for_attention, for_mlp), cache in zip(self.layers, caches):
            h = self.halves[0](for_attention, config, x, cos, sin, *cache, kv_len)
            x = self.halves[1](for_mlp, config, x if config["use_parallel_residual"] else h, h)
        last = x[-1:]
        if self.mlp == "torch":
            return functional.linear(functional.layer_norm(last, last.shape[-1:], *self.norm, eps), self.ends["head"])[
                0
            ]
        return ops.linear(ops.layernorm(last, *self.norm, eps=eps), self.ends["head"])[0]

    def decode(self, prompt: list[int], new_ids: int) -> Decoded:
        import torch

        capacity, heads = len(prompt) + new_ids, self.checkpoint.heads
        shape = 1, heads, capacity, self.checkpoint.head_dim
        caches = [[torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in "kv"] for _ in self.layers]
        table = [torch.from_numpy(half).to(self.device) for half in self.checkpoint.rope_table(capacity)]
        newest, kv_len, ids, logits, times = prompt, 0, [], [], []
        for _ in range(new_ids):
            begin = time.perf_counter()
            kv_len += len(newest)
            logits.append(self.logits(newest, caches, kv_len, table))
            ids.append(int(logits[-1].argmax()))
            times.append(1e3 * (time.perf_counter() - begin))
            newest = ids[-1:]
        rows = torch.stack(logits).float().cpu().numpy()
        return Decoded(ids, rows, statistics.median(times[1:]))


def main() -> int:
    parser = common.Parser(__doc__)
    parser.add_argument("--model", default=DIRECTORY / "neox-d80", metavar="DIR", help="checkpoint directory")
    parser.add_argument("--prompt-len", type=common.integer(1), default=16)
    parser.add_argument("--new-tokens", type=common.integer(2), default=64)
    parser.add_argument("--seed", type=int, default=1, help="of the prompt's ids")
    args = parser.parse_args()
    args.device = common.device_of(args.device)
    import torch

    checkpoint = Checkpoint(args.model)
    prompt = common.random_ids(args.prompt_len, checkpoint.config["vocab_size"], args.seed)
    checks, rows, made = common.Checks(), [], {}
    for mixture in MIXTURES:
        model = Model(checkpoint, mixture, args.device, args.inject_fault)
        with torch.inference_mode():
            model.decode(prompt, 3)  # warm-up
            made[mixture] = decoded = model.decode(prompt, args.new_tokens)
        logits, bound = oracle(checkpoint, prompt + decoded.ids[:-1], str(model.dtype).removeprefix("torch."))
        exact = logits[len(prompt) - 1 :]
        error, wrong = common.error_of(decoded.logits, exact), unexplained(exact, decoded.ids, bound.rel_max)
        same = sum(a == b for a, b in zip(decoded.ids, made["all torch"].ids))
        ratio = made["all torch"].step_ms / decoded.step_ms
        rows.append((mixture, decoded.step_ms, ratio, f"{same} / {len(decoded.ids)}", error.rel_max, bound.rel_max))
        checks.expect(error.rel_max <= bound.rel_max, f"{mixture}: logits within the bound")
        checks.expect(wrong == 0, f"{mixture}: {wrong} tokens that no error within the bound explains")
    print(f"{checkpoint.directory.name}: {args.prompt_len} + {args.new_tokens} tokens, {args.device}")
    headers = ["halves", "median ms a step", "torch / it", "tokens as torch's", "logits' rel max", "bound"]
    common.print_table(headers, rows)
    return checks.end()


common.run(main, "torch")
