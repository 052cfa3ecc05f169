"""The families of models as core/families says them (python/cf_ops/_families.json), and the joining of what checkpoints
store apart or transposed."""

import json
import os
from dataclasses import dataclass

import numpy as np

import gptq

HERE = os.path.dirname(os.path.abspath(__file__))
FILE = os.path.join(HERE, os.pardir, os.pardir, "python", "cf_ops", "_families.json")


@dataclass(frozen=True)
class Names:
    """A family's names. Linears and taps are named below the layer."""

    layers: str  # what a layer's names begin with, before its number
    base: str  # the attribute of the causal model that holds all but the head
    embedding: str
    positions: str  # the table of learned positions; empty where there is none
    final_norm: str
    head: str
    norm_parts: tuple  # the parameters of a norm
    norms: tuple  # a layer's two norms
    head_norms: tuple  # of each head of q and of k; empty where there are none
    qkv: str  # the product of query, key and value, as the walk has it
    qkv_parts: tuple  # the modules that checkpoints store of it, one below the other
    dense: str
    mlp: str  # the MLP's first product, as the walk has it
    mlp_parts: tuple  # the modules that checkpoints store of it, their rows in turn
    down: str
    transposed: tuple  # the modules whose weights checkpoints store as (in, out)
    taps: tuple  # (step, tap) of every site
    embedding_tap: str
    final_norm_tap: str

    @property
    def linears(self):
        """The Linears that checkpoints store, in the order of the walk."""
        return (*self.qkv_parts, self.dense, *self.mlp_parts, self.down)

    def layer(self, index):
        return f"{self.layers}{index}."

    def tap(self, step):
        """The tap of a step, by the name that core/families/site.hpp gives the step."""
        return dict(self.taps)[step]


def _names(family):
    sites = {site["id"]: site for site in (*family["sites"], *family["outside"])}
    name = {step: site["name"] for step, site in sites.items()}
    stored = family["stored"]

    def parts(step):
        return tuple(stored.get(step, {}).get("parts") or (name[step],))

    return Names(
        layers=family["layers"],
        base=family["layers"].partition(".")[0],
        embedding=name["embed_in"],
        positions=name.get("embed_positions", ""),
        final_norm=name["final_layer_norm"],
        head=name["embed_out"],
        norm_parts=("weight", "bias") if family["norm"] == "layernorm" else ("weight",),
        norms=(name["input_layernorm"], name["post_attention_layernorm"]),
        head_norms=tuple(family["head_norms"]),
        qkv=name["query_key_value"],
        qkv_parts=parts("query_key_value"),
        dense=name["dense"],
        mlp=name["dense_h_to_4h"],
        mlp_parts=parts("dense_h_to_4h"),
        down=name["dense_4h_to_h"],
        transposed=tuple(part for step, how in stored.items() if how["transposed"] for part in parts(step)),
        taps=tuple((step, site["tap"]) for step, site in sites.items()),
        embedding_tap=sites["embed_in"]["tap"],
        final_norm_tap=sites["final_layer_norm"]["tap"],
    )


with open(FILE, encoding="utf-8") as _file:
    FAMILIES = {family["model_type"]: family for family in json.load(_file)}
"""model_type -> what core/families says of it."""
NAMES = {model_type: _names(family) for model_type, family in FAMILIES.items()}


def _joined(kind, arrays, interleaved, bits):
    """The tensor of a joined Linear. `kind` says which; arrays are those of its parts."""
    if kind == "g_idx":
        if any(not np.array_equal(array, arrays[0]) for array in arrays):
            raise ValueError("expected one g_idx for Linears that are joined")
        return arrays[0]
    if kind == "qzeros":
        codes = [gptq.unpack(array, bits, 1) for array in arrays]
        return gptq.pack(_joined("codes", codes, interleaved, bits), bits, 1)
    axis = 0 if kind in ("weight", "bias") else 1
    if not interleaved:
        return np.concatenate(arrays, axis)
    # Row i of every part in turn.
    shape = list(arrays[0].shape)
    shape[axis] *= len(arrays)
    return np.ascontiguousarray(np.stack(arrays, axis + 1).reshape(shape))


def is_transposed(names, name):
    """Whether a tensor's stored form is the transpose of the walk's."""
    module, _, kind = name.rpartition(".")
    return kind == "weight" and module.endswith(names.transposed) if names.transposed else False


@dataclass(frozen=True)
class Joined:
    """A tensor that checkpoints store in parts."""

    name: str
    kind: str  # of a Linear's tensor: weight, bias, or a part of a GPTQ weight
    parts: list  # the names of the tensors that are stored
    is_interleaved: bool  # the parts' rows in turn, otherwise one part below the other


def joined_of(names, name):
    """The tensor that a stored tensor is a part of, or None for one that is stored as the walk has it."""
    module, _, kind = name.rpartition(".")
    for whole, parts, is_interleaved in ((names.qkv, names.qkv_parts, False), (names.mlp, names.mlp_parts, True)):
        part = next((p for p in parts if len(parts) > 1 and module.endswith(p)), None)
        if part:
            prefix = module.removesuffix(part)
            return Joined(f"{prefix}{whole}.{kind}", kind, [f"{prefix}{p}.{kind}" for p in parts], is_interleaved)
    return None


def join(names, arrays, bits=0):
    """A layer's or a model's tensors as the walk has them, in the order of weights_checksum(), from those that the
    checkpoint stores: name -> array."""
    tensors = {}
    arrays = {
        name: np.ascontiguousarray(array.T) if is_transposed(names, name) else array for name, array in arrays.items()
    }
    for name, array in arrays.items():
        joined = joined_of(names, name)
        if not joined:
            tensors[name] = array
        elif name == joined.parts[0]:
            sources = [arrays[part] for part in joined.parts]
            tensors[joined.name] = _joined(joined.kind, sources, joined.is_interleaved, bits)
    return tensors


def join_shapes(names, shapes):
    """The same of the shapes of dense tensors."""
    whole = {}
    shapes = {name: shape[::-1] if is_transposed(names, name) else shape for name, shape in shapes.items()}
    for name, shape in shapes.items():
        joined = joined_of(names, name)
        if not joined:
            whole[name] = shape
        elif name == joined.parts[0]:
            whole[joined.name] = (sum(shapes[part][0] for part in joined.parts), *shape[1:])
    return whole


def split(names, arrays, shapes):
    """The inverse of join() for dense tensors: those that a checkpoint stores, whose shapes are given."""
    stored = {}
    shapes = {name: shape[::-1] if is_transposed(names, name) else shape for name, shape in shapes.items()}
    for name, shape in shapes.items():
        joined = joined_of(names, name)
        if not joined:
            stored[name] = arrays[name]
        else:
            place = joined.parts.index(name)
            if joined.is_interleaved:
                rows = slice(place, None, len(joined.parts))
            else:
                first = sum(shapes[part][0] for part in joined.parts[:place])
                rows = slice(first, first + shape[0])
            stored[name] = np.ascontiguousarray(arrays[joined.name][rows])
        if is_transposed(names, name):
            stored[name] = np.ascontiguousarray(stored[name].T)
    return stored
