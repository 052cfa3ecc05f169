"""How far logits may be from those of transformers in float64."""

import math

SITES = 9  # of a layer
UNIT_ROUNDOFF = 2.0**-24  # of float32


def logits_bound(config, positions, activation):
    """The bound of the relative L2 error of a model's logits.

    transformers computes RoPE's angles in float32, so an angle is off by up to position * 2^-24, and so is what it
    turns, in each layer. In float32, every site of a layer, the embedding, the last norm and the head round sums of n
    terms: 4 sqrt(n) * 2^-24 each (core/contract.hpp, reduction_budget).
    """
    layers = config["num_hidden_layers"]
    angles = layers * positions * UNIT_ROUNDOFF
    if activation == "float64":
        return angles
    return angles + (SITES * layers + 3) * 4 * math.sqrt(config["intermediate_size"]) * UNIT_ROUNDOFF
