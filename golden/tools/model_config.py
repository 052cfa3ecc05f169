"""Models of every family: the presets, config.json, and the shapes of the weights."""

import json
import os
import re

import llama
import neox
from console import Refusal
from families import join_shapes

HERE = os.path.dirname(os.path.abspath(__file__))
PRESETS_FILE = os.path.join(HERE, os.pardir, os.pardir, "core", "model", "presets.def")


def pythia(hidden, layers, heads, vocab):
    return neox.Model(hidden, layers, heads, 4 * hidden, vocab)


def gated(model_type, hidden, layers, heads, kv_heads, intermediate, vocab, positions, theta, *rest):
    """A preset of another family."""
    *scaling, is_tied, eps = rest
    return llama.Model(
        model_type,
        hidden,
        layers,
        heads,
        kv_heads,
        hidden // heads,
        intermediate,
        vocab,
        positions,
        rope_theta=theta,
        rope_scaling=tuple(scaling) if scaling[0] else (),
        layer_norm_eps=eps,
        tie_word_embeddings=is_tied,
    )


def read_presets():
    """Name -> model, and name -> dtype of the weights, of the presets that core/model/presets.def lists."""
    with open(PRESETS_FILE, encoding="utf-8") as file:
        lines = re.findall(r"^CF_(\w+)\((.*)\)$", file.read(), re.MULTILINE)
    models, dtypes = {}, {}
    for kind, arguments in lines:
        name, *values = json.loads(f"[{arguments}]")
        dtypes[name] = "float16" if kind == "PYTHIA" else values.pop(0)
        models[name] = pythia(*values) if kind == "PYTHIA" else gated(kind.lower(), *values)
    return models, dtypes


PRESETS, PRESET_DTYPES = read_presets()
PYTHIA_PRESETS = {name: model for name, model in PRESETS.items() if isinstance(model, neox.Model)}


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


def joined_layer_shapes(model):
    """The same of a layer's weights as the walk has them."""
    return join_shapes(model.names, layer_shapes(model))


def model_shapes(model, of_layer=None):
    """Name -> shape of all weights as stored; of_layer is that of a layer's, where they are not all dense."""
    names, embedding = model.names, (model.vocab_size, model.hidden_size)
    shapes = {f"{names.embedding}.weight": embedding}
    for layer in range(model.num_hidden_layers):
        shapes |= {names.layer(layer) + name: shape for name, shape in (of_layer or layer_shapes(model)).items()}
    shapes |= {f"{names.final_norm}.{part}": (model.hidden_size,) for part in names.norm_parts}
    return shapes if model.tie_word_embeddings else shapes | {f"{names.head}.weight": embedding}
