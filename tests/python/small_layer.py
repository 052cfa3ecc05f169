"""One small GPT-NeoX layer of random weights, as the arguments of ops.decode_layer()."""

from __future__ import annotations

import numpy as np

INTERMEDIATE = 40


def small_layer(heads, head_dim, capacity, dtype):
    """The weights by name, and the config."""
    hidden = heads * head_dim
    config = {
        "model_type": "gpt_neox",
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": 8,
        "max_position_embeddings": capacity,
        "rotary_pct": 0.5,
    }
    shapes = {
        "attention.query_key_value": (3 * hidden, hidden),
        "attention.dense": (hidden, hidden),
        "mlp.dense_h_to_4h": (INTERMEDIATE, hidden),
        "mlp.dense_4h_to_h": (hidden, INTERMEDIATE),
    }
    random = np.random.default_rng(6)
    weights = {}
    for name, shape in shapes.items():
        weights[f"{name}.weight"] = (0.1 * random.standard_normal(shape)).astype(dtype)
        weights[f"{name}.bias"] = random.standard_normal(shape[0]).astype(dtype)
    for name in ("input_layernorm", "post_attention_layernorm"):
        for part in ("weight", "bias"):
            weights[f"{name}.{part}"] = random.standard_normal(hidden).astype(dtype)
    return weights, config
