"""Models of every family: the presets, config.json, and the shapes of the weights."""

import json

import llama
import neox
from console import Refusal

# The larger models pad the vocabulary to a larger multiple.
PYTHIA_PRESETS = {
    f"pythia-{size}": neox.Model(hidden, layers, heads, 4 * hidden, vocab)
    for size, hidden, layers, heads, vocab in [
        ("14m", 128, 6, 4, 50304),
        ("31m", 256, 6, 8, 50304),
        ("70m", 512, 6, 8, 50304),
        ("160m", 768, 12, 12, 50304),
        ("410m", 1024, 24, 16, 50304),
        ("1b", 2048, 16, 8, 50304),
        ("1.4b", 2048, 24, 16, 50304),
        ("2.8b", 2560, 32, 32, 50304),
        ("6.9b", 4096, 32, 32, 50432),
        ("12b", 5120, 36, 40, 50688),
    ]
}
PRESETS = PYTHIA_PRESETS


def parse_config(text, source):
    """The Model of a config.json's text, of transformers 4.x or 5.x."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise Refusal(f"{source}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise Refusal(f"{source}: expected a JSON object, got {type(config).__name__}")
    if config.get("model_type") in llama.MODEL_TYPES:
        return llama.parse(config, source)
    if config.get("model_type") != "gpt_neox":
        known = ", ".join(("gpt_neox", *llama.MODEL_TYPES))
        raise Refusal(f"{source}: model_type must be one of {known}, got {config.get('model_type')!r}")
    return neox.parse(config, source)


def hf_config(model):
    """The content of a config.json."""
    return {"model_type": model.model_type, **model.hf_fields()}


def config_json(model):
    return json.dumps(hf_config(model), indent=2)


def layer_shapes(model):
    return model.layer_shapes()


def model_shapes(model, of_layer=None):
    """Name -> shape of all weights as stored; of_layer is that of a layer's, where they are not all dense."""
    names, embedding = model.names, (model.vocab_size, model.hidden_size)
    shapes = {f"{names.embedding}.weight": embedding}
    for layer in range(model.num_hidden_layers):
        shapes |= {names.layer(layer) + name: shape for name, shape in (of_layer or layer_shapes(model)).items()}
    shapes |= {f"{names.final_norm}.{part}": (model.hidden_size,) for part in names.norm_parts}
    return shapes if model.tie_word_embeddings else shapes | {f"{names.head}.weight": embedding}
