"""The names that families of models give their modules (core/model/names.hpp), and the joining of what checkpoints
store apart."""

from dataclasses import dataclass

import numpy as np

import gptq


@dataclass(frozen=True)
class Names:
    """A family's names. Linears and taps are named below the layer."""

    base: str  # the attribute of the causal model that holds all but the head
    embedding: str
    final_norm: str
    head: str
    norm_parts: tuple  # the parameters of a norm
    attention: str
    qkv: str  # the product of query, key and value, as the walk has it
    qkv_parts: tuple  # the modules that checkpoints store of it, one below the other
    dense: str
    mlp: str  # the MLP's first product, as the walk has it
    mlp_parts: tuple  # the modules that checkpoints store of it, their rows in turn
    down: str
    embedding_tap: str
    final_norm_tap: str

    @property
    def linears(self):
        """The Linears that checkpoints store, in the order of the walk."""
        return (*self.qkv_parts, self.dense, *self.mlp_parts, self.down)

    def layer(self, index):
        return f"{self.base}.layers.{index}."


NEOX = Names(
    base="gpt_neox",
    embedding="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    norm_parts=("weight", "bias"),
    attention="attention",
    qkv="attention.query_key_value",
    qkv_parts=("attention.query_key_value",),
    dense="attention.dense",
    mlp="mlp.dense_h_to_4h",
    mlp_parts=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    embedding_tap="embed_in",
    final_norm_tap="final_layer_norm",
)

LLAMA = Names(
    base="model",
    embedding="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    norm_parts=("weight",),
    attention="self_attn",
    qkv="self_attn.qkv_proj",
    qkv_parts=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    dense="self_attn.o_proj",
    mlp="mlp.gate_up_proj",
    mlp_parts=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    embedding_tap="embed_tokens",
    final_norm_tap="norm",
)


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
    for name, shape in shapes.items():
        joined = joined_of(names, name)
        if not joined:
            stored[name] = arrays[name]
            continue
        place = joined.parts.index(name)
        if joined.is_interleaved:
            rows = slice(place, None, len(joined.parts))
        else:
            first = sum(shapes[part][0] for part in joined.parts[:place])
            rows = slice(first, first + shape[0])
        stored[name] = np.ascontiguousarray(arrays[joined.name][rows])
    return stored
