"""config.json against transformers: where both run a changed config, their logits are the same, or a note says why not.

A mutant is a small model's config with one to three fields changed, and a checkpoint of the model that transformers
builds of it. The reader may refuse what transformers takes: it names what it does not build.
"""

import json
import os
import pathlib
import random
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing")
transformers = pytest.importorskip("transformers", reason="transformers is missing")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="safetensors is missing")

import cf_ops
from hf_models import VERSION, load_from

MUTANTS = int(os.environ.get("CF_MUTANTS", "40"))  # of each type; a larger number takes longer
IDS = [3, 14, 15, 9, 26, 5, 30, 8, 9, 7]
HAS_ROPE_PARAMETERS = VERSION >= (5, 0)

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GATED = SIZES | {"num_key_value_heads": 1, "hidden_act": "silu"}
CONFIGS = {
    "gpt_neox": SIZES | {"rotary_pct": 0.5, "hidden_act": "gelu"},
    "llama": GATED,
    "mistral": GATED | {"sliding_window": None},
    "qwen2": GATED,
    "qwen3": GATED | {"head_dim": 8},
    "stablelm": GATED,
    "gpt2": {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_inner": 24,
        "vocab_size": 32,
        "n_positions": 64,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
ROPES = [None, {}, {"rope_type": "default", "rope_theta": 500.0}, {"rope_theta": 20.0, **LLAMA3}]
VALUES = {
    "activation_function": ["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "relu"],
    "add_cross_attention": [True, False],
    "attention_bias": [True, False],
    "head_dim": [None, 4, 8, 16],
    "hidden_act": ["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "relu"],
    "layer_norm_eps": [1e-5, 0.5],
    "layer_norm_epsilon": [1e-5, 0.5],
    "layer_types": [None, ["full_attention"] * 2, ["full_attention", "sliding_attention"]],
    "max_position_embeddings": [8, 64],
    "max_window_layers": [0, 1, 28],
    "mlp_bias": [True, False],
    "n_head": [1, 2, 4],
    "n_inner": [None, 24, 64],
    "num_attention_heads": [1, 2, 4],
    "num_key_value_heads": [None, 1, 2],
    "original_max_position_embeddings": [4, 8],
    "partial_rotary_factor": [0.25, 0.5, 1.0],
    "qk_layernorm": [True, False],
    "reorder_and_upcast_attn": [True, False],
    "rms_norm_eps": [1e-6, 0.5],
    "rope_parameters": [*ROPES, {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}],
    "rope_scaling": [*ROPES, {"type": "linear", "factor": 2.0}, {"type": "default"}, LLAMA3],
    "rope_theta": [10.0, 500.0, 10000.0],
    "rotary_emb_base": [10, 500.0],
    "rotary_pct": [0.25, 0.5, 1.0],
    "scale_attn_by_inverse_layer_idx": [True, False],
    "scale_attn_weights": [True, False],
    "sliding_window": [None, 4, 10, 64],
    "tie_word_embeddings": [True, False],
    "torch_dtype": ["float32", "float16"],
    "use_parallel_residual": [True, False],
    "use_qkv_bias": [True, False],
    "use_sliding_window": [True, False],
}
if not HAS_ROPE_PARAMETERS:
    # The library reads them as transformers 5 does.
    del VALUES["rope_parameters"]
    for rope in VALUES["rope_scaling"]:
        (rope or {}).pop("rope_theta", None)


def mutants(kind):
    rng = random.Random(f"{kind} 1")
    for _ in range(MUTANTS):
        config = dict(CONFIGS[kind], model_type=kind)
        for name in rng.sample(sorted(VALUES), rng.randint(1, 3)):
            config[name] = rng.choice(VALUES[name])
        yield config


def write_checkpoint(config, directory):
    """The weights of the model that transformers builds of a config, random, and the config as it is. A tied model's
    file has a head of its own. False where transformers does not build it."""
    (directory / "config.json").write_text(json.dumps(config))
    try:
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(directory), torch_dtype=torch.float32
        )
    except Exception:  # of many kinds
        return False
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(t.shape, generator=generator) / 3 for name, t in sorted(model.state_dict().items())}
    if config["model_type"] == "gpt_neox" and "lm_head.weight" in tensors:
        tensors["embed_out.weight"] = tensors.pop("lm_head.weight")  # as files have it
    safetensors_torch.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return True


def theirs(directory):
    """Hugging Face's logits, None where it does not load or run the checkpoint."""
    try:
        with torch.no_grad():
            return load_from(directory, torch.float64)(torch.tensor([IDS])).logits[0].numpy()
    except Exception:  # of many kinds
        return None


def ours(directory):
    """The oracle's logits and the notes, or the refusal."""
    try:
        model = cf_ops.load(directory, activation="float64")
        return model.logits(IDS), model.notes
    except (NotImplementedError, ValueError) as error:
        return None, str(error)


@pytest.mark.parametrize("kind", CONFIGS)
def test_configs_mean_what_they_mean_to_transformers(kind, tmp_path: pathlib.Path):
    transformers.logging.set_verbosity_error()
    compared, wrong = 0, []
    for number, config in enumerate(mutants(kind)):
        directory = tmp_path / str(number)
        directory.mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not write_checkpoint(config, directory):
                continue
            expected = theirs(directory)
        got, notes = ours(directory)
        if expected is None or got is None:
            continue
        compared += 1
        # Both take RoPE's angles in float32.
        if np.abs(got - expected).max() > 1e-4 * np.abs(expected).max() and not notes:
            changed = {name: value for name, value in config.items() if CONFIGS[kind].get(name, ...) != value}
            wrong.append(f"{changed}: {np.abs(got - expected).max():.3g}")
    assert not wrong, "\n" + "\n".join(wrong)
    assert compared > MUTANTS // 4
