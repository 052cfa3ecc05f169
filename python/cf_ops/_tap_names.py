"""Taps by the names of Hugging Face and of TransformerLens."""

from __future__ import annotations

import fnmatch
import importlib.resources
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Source(NamedTuple):
    """What a tap is made of: the library's tap `whole`, less its tap `less` where there is one. layers: how many of the
    model's first layers make it."""

    whole: str
    less: str | None
    layers: int


def sources(config: Mapping[str, Any], library: Iterable[str], is_cut: bool = False) -> dict[str, Source]:
    """Every tap of a model by each of its names, in the order of the model.

    is_cut: whether layers behind the model's last were left out. The last hidden state is then that layer's output, as
    it is in the whole model, and not the last norm's. library: the library's own names, which are taken too.

    Hugging Face's names are "hidden_states.0" and on, as output_hidden_states gives them, and the modules' own, such as
    "gpt_neox.layers.3.mlp". TransformerLens's are its hooks of weights that it has not processed, such as
    "blocks.3.hook_resid_pre"; hook_resid_mid is of models with a sequential residual alone, as there.
    """
    layers, family = layers_of(config), _family_of(config)
    sites = {site["id"]: site for site in (*family["sites"], *family["outside"])}
    last = {sites["final_layer_norm"]["tap"], sites["embed_out"]["tap"]}

    def source(tap: str) -> Source:
        in_layer = re.match(r"layers\.(\d+)\.", tap)
        return Source(tap, None, int(in_layer.group(1)) + 1 if in_layer else layers if tap in last else 0)

    made = {name: source(name) for name in library}
    embedding, attention = sites["embed_in"]["tap"], sites["query_key_value"]["name"].rpartition(".")[0]
    mlp = sites["dense_h_to_4h"]["name"].rpartition(".")[0]
    is_parallel = bool(config.get("use_parallel_residual", False))
    before = embedding
    for i in range(layers):
        mid, after = f"layers.{i}.{sites['dense']['tap']}", f"layers.{i}.output"
        theirs, block = f"{family['layers']}{i}", f"blocks.{i}."
        stream = {f"hidden_states.{i}": before, theirs: after}
        stream |= {f"{block}hook_resid_pre": before, f"{block}hook_resid_post": after}
        stream |= {} if is_parallel else {f"{block}hook_resid_mid": mid}
        stream |= {f"{block}attn.hook_z": f"layers.{i}.{sites['context']['tap']}"}
        stream |= {f"{block}mlp.hook_post": f"layers.{i}.{sites['dense_h_to_4h']['tap']}"}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            stream[f"{theirs}.{sites[norm]['name']}"] = f"layers.{i}.{sites[norm]['tap']}"
        made |= {name: source(tap) for name, tap in stream.items()}
        made |= {name: Source(mid, before, i + 1) for name in (f"{theirs}.{attention}", f"{block}hook_attn_out")}
        made |= {name: Source(after, mid, i + 1) for name in (f"{theirs}.{mlp}", f"{block}hook_mlp_out")}
        before = after
    norm = sites["final_layer_norm"]
    made |= {f"hidden_states.{layers}": source(before if is_cut else norm["tap"]), norm["name"]: source(norm["tap"])}
    if "embed_positions" not in sites:  # the embedding alone is no tap of a model with learned positions
        made |= {name: source(embedding) for name in (sites["embed_in"]["name"], "hook_embed")}
    return made


def layers_of(config: Mapping[str, Any]) -> int:
    """How many layers a model has."""
    fields = {field["key"]: field["name"] for field in _family_of(config)["fields"]}
    return int(config[fields["num_hidden_layers"]])


def resolve(names: Iterable[str], known: Mapping[str, Source], layers: int) -> dict[str, Source]:
    """The taps of these names, which may have a * for any layer, of the first `layers` layers. Raises ValueError for a
    name that the model does not have, or that is made by a later layer."""
    made: dict[str, Source] = {}
    for name in names:
        found = [n for n in known if fnmatch.fnmatchcase(n, name)] if "*" in name else [name] * (name in known)
        if not found:
            raise ValueError(f"tap {name!r} is unknown; there are {', '.join(_short(known))}, with a number or * for N")
        within = [n for n in found if known[n].layers <= layers]
        if not within:
            raise ValueError(f"tap {name!r}: expected one of the first {layers} layers, where the model stops")
        made |= {n: known[n] for n in within}
    return made


def _family_of(config: Mapping[str, Any]) -> dict[str, Any]:
    text = importlib.resources.files("cf_ops").joinpath("_families.json").read_text(encoding="utf-8")
    return next(family for family in json.loads(text) if family["model_type"] == config["model_type"])


def _short(names: Iterable[str]) -> list[str]:
    """The names with N for a number, each once."""
    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".N", name) for name in names))
