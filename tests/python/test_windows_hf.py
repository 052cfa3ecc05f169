"""Windows beyond their length against Hugging Face's masks and caches, in float64."""

import json
import pathlib

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing")
transformers = pytest.importorskip("transformers", reason="transformers is missing")

from hf_models import CACHE
from safetensors import torch as safetensors_torch

from cf_ops import _core

WINDOW, VOCAB = 8, 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "sliding_window": WINDOW,
    "tie_word_embeddings": False,
}
SLIDES = {"use_sliding_window": True, "max_window_layers": 0}
# By name: the model type, and what its config has beside SIZES. The last three have layers that see all keys.
KINDS = {
    "mistral": ("mistral", {"head_dim": 8}),
    "qwen2": ("qwen2", SLIDES),
    "first-full": ("qwen2", {**SLIDES, "max_window_layers": 1}),
    "turns": ("qwen2", {**SLIDES, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "qwen3-turns": (
        "qwen3",
        {**SLIDES, "head_dim": 8, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
}


def in_float64(model):
    """The model in float64, its norms too: transformers takes these in float32 whatever the model's dtype."""

    def forward(norm, x):
        return norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)

    for module in model.double().modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = forward.__get__(module)
    return model


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory):
    """Hugging Face's model in float64, and a directory with its weights in float32."""
    directory: pathlib.Path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(1)
    model_type, fields = KINDS[request.param]
    config = transformers.AutoConfig.for_model(model_type, **SIZES, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    config.save_pretrained(directory)
    saved = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(saved | {"dtype": "float32"}))
    tensors = {name: t.contiguous() for name, t in model.state_dict().items()}
    safetensors_torch.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return in_float64(model), _core.Weights.open(str(directory))


def expected_logits(model, ids):
    """All logits of the ids: read at once, and token by token with Hugging Face's own cache."""
    with torch.no_grad():
        at_once = model(torch.tensor([ids])).logits[0]
        cache, rows = None, []
        for i in ids:
            out = model(torch.tensor([[i]]), use_cache=True, **({CACHE: cache} if cache is not None else {}))
            cache = getattr(out, CACHE)
            rows.append(out.logits[0, 0])
    return at_once.numpy(), torch.stack(rows).numpy()


@pytest.mark.parametrize("length", [WINDOW - 3, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_a_window_is_hugging_faces(checkpoint, length):
    model, weights = checkpoint
    ids = np.random.default_rng(length).integers(0, VOCAB, length).astype(np.int32)
    at_once, by_token = expected_logits(model, ids.tolist())
    assert np.abs(at_once - by_token).max() < 1e-10
    # Both have the same float32 angles.
    cos, sin = model.model.rotary_emb(torch.zeros(1, length, 1), torch.arange(length)[None])
    cos, sin = (np.ascontiguousarray(t[0, :, : t.shape[-1] // 2].float().numpy()) for t in (cos, sin))
    for chunk in (64, 3):
        runner = _core.Runner(weights, capacity=64, chunk=chunk, activation="float64")
        runner.set_rope_table(cos, sin)
        assert np.abs(runner.forward(0, 0, ids, length) - at_once).max() < 1e-10
        for i in range(length):
            assert np.abs(runner.forward(0, i, ids[i : i + 1], 1) - at_once[i]).max() < 1e-10
