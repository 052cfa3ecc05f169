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


class Weights(NamedTuple):
    """A model's weights as one library reads them."""

    layers: list[dict[str, Any]]
    norm: list[Any]  # gamma and beta of the final norm
    table: Any  # of embeddings
    head: Any


def read_weights(checkpoint: Checkpoint, device: str, dtype: Any, has_fault: bool = False) -> Weights:
    """The weights in a torch dtype, or in the checkpoint's own where it is None."""
    import torch_layer

    layers = [checkpoint.layer(number) for number in range(checkpoint.config["num_hidden_layers"])]
    if has_fault:
        layers[0]["input_layernorm.bias"] = layers[0]["input_layernorm.bias"] + np.float16(0.25)
    names = "final_layer_norm.weight", "final_layer_norm.bias", "embed_in.weight"
    ends = {name: checkpoint.tensor(f"gpt_neox.{name}") for name in names} | {"head": checkpoint.head()}
    gamma, beta, table, head = torch_layer.tensors(ends, device, dtype).values()
    return Weights([torch_layer.tensors(layer, device, dtype) for layer in layers], [gamma, beta], table, head)


class Decoding:
    """A greedy decoding with one mixture of kernels."""

    def __init__(
        self, checkpoint: Checkpoint, mixture: str, weights: dict[str, Weights], prompt: list[int], new_tokens: int
    ) -> None:
        import torch
        import torch_layer

        attention, mlp = MIXTURES[mixture]
        self._config, self._is_torchs_end = checkpoint.config, mlp == "torch"
        self._halves: list[Any] = [
            torch_layer.attention_half if attention == "torch" else our_attention_half,
            torch_layer.mlp_half if mlp == "torch" else our_mlp_half,
        ]
        self._layers, self._ends = list(zip(weights[attention].layers, weights[mlp].layers)), weights[mlp]
        head = weights["torch"].head  # its dtype is that of all computations
        shape = 1, checkpoint.heads, len(prompt) + new_tokens, checkpoint.head_dim
        self._caches = [[torch.zeros(shape).to(head.device, head.dtype) for _ in "kv"] for _ in self._layers]
        self._table = [torch.from_numpy(half).to(head.device) for half in checkpoint.rope_table(shape[2])]
        self._newest, self._kv_len = prompt, 0
        self.ids: list[int] = []
        self.logits: list[Array] = []
        self.times_ms: list[float] = []

    def step(self) -> None:
        """Takes the newest tokens through the model and chooses the next one."""
        import torch
        from torch.nn import functional

        begin = time.perf_counter()
        self._kv_len += len(self._newest)
        config, (_, norm, table, head), cache = self._config, self._ends, self._caches[0][0]
        eps = config["layer_norm_eps"]
        cos, sin = (half[self._kv_len - len(self._newest) : self._kv_len] for half in self._table)
        x = functional.embedding(torch.tensor(self._newest, device=cache.device), table).to(cache.dtype)
        for (for_attention, for_mlp), caches in zip(self._layers, self._caches):
            h = self._halves[0](for_attention, config, x, cos, sin, *caches, self._kv_len)
            x = self._halves[1](for_mlp, config, x if config["use_parallel_residual"] else h, h)
        x = x[-1:]
        if self._is_torchs_end:
            logits = functional.linear(functional.layer_norm(x, x.shape[-1:], *norm, eps), head)[0]
        else:
            logits = ops.linear(ops.layernorm(x, *norm, eps=eps), head)[0]
        self._newest = [int(logits.argmax())]
        self.times_ms.append(1e3 * (time.perf_counter() - begin))
        self.ids += self._newest
        self.logits.append(logits.float().cpu().numpy())


def main() -> int:
    parser = common.Parser(__doc__)
    parser.add_argument("--model", default=DIRECTORY / "neox-d80", metavar="DIR", help="checkpoint directory")
    parser.add_argument("--prompt-len", type=common.integer(1), default=16, help="ids of the drawn prompt")
    parser.add_argument("--new-tokens", type=common.integer(2), default=64, help="tokens of each mixture")
    parser.add_argument("--seed", type=int, default=1, help="of the prompt's ids")
    args = parser.parse_args()
    args.device = common.device_of(args.device)
    import torch

    checkpoint = Checkpoint(args.model)
    prompt = common.random_ids(args.prompt_len, checkpoint.config["vocab_size"], args.seed)
    dtype = common.activation_dtype(args.device)
    weights = {
        "torch": read_weights(checkpoint, args.device, dtype),
        "cf_ops": read_weights(checkpoint, args.device, None, args.inject_fault),
    }
    decodings = {name: Decoding(checkpoint, name, weights, prompt, args.new_tokens) for name in MIXTURES}
    with torch.inference_mode():
        for _ in range(args.new_tokens):
            for decoding in decodings.values():  # all see the same machine
                decoding.step()

    checks, rows, of_torch = common.Checks(), [], decodings["all torch"]
    torchs_ms = statistics.median(of_torch.times_ms[1:])  # the first step is the prompt's
    for name, decoding in decodings.items():
        ids = decoding.ids
        logits, bound = oracle(checkpoint, prompt + ids[:-1], str(dtype).removeprefix("torch."))
        exact = logits[len(prompt) - 1 :]
        error, wrong = common.error_of(np.stack(decoding.logits), exact), unexplained(exact, ids, bound.rel_max)
        same = sum(a == b for a, b in zip(ids, of_torch.ids))
        step_ms = statistics.median(decoding.times_ms[1:])
        rows.append((name, step_ms, torchs_ms / step_ms, f"{same} / {len(ids)}", error.rel_max, bound.rel_max))
        checks.expect(error.rel_max <= bound.rel_max, f"{name}: logits within the bound")
        checks.expect(wrong == 0, f"{name}: {wrong} tokens that no error within the bound explains")
    print(f"{checkpoint.directory.name}: {args.prompt_len} + {args.new_tokens} tokens, {args.device}")
    headers = ["halves", "median ms a step", "torch / it", "tokens as torch's", "logits' rel max", "bound"]
    common.print_table(headers, rows)
    return checks.end()


common.run(main, "torch")
