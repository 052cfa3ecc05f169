"""torch's products with int4 weights."""

from peers.exactness import SUM_UNIT, check_within, linear_and_magnitude, product_shapes, stored
from peers.timing import spread
from peers.triton_gptq import GROUP

INNER_K_TILES = (8, 4, 2)  # torch's layouts of an int4 weight


def check_int4_linear(x, codes, scales_and_zeros, y):
    """y = W x in bfloat16, W = (codes - 8) * scale + zero, rounded to bfloat16. A sum is off by at most a unit of the
    sum of its numbers' magnitudes for each number; tensor cores, which cut off where others round, by two."""
    scales, zeros = scales_and_zeros.double().repeat_interleave(GROUP, 0).unbind(-1)
    weight = ((codes.T.double() - 8) * scales + zeros).T.bfloat16().double()
    reference, magnitude = linear_and_magnitude(x, weight, 0)
    bound = stored(reference, 8) + 2 * x.shape[1] * SUM_UNIT * magnitude
    check_within("_weight_int4pack_mm", y, reference, bound)


def random_int4(outputs, inputs, device):
    """Random codes of four bits (outputs, inputs), and for each group and output a scale and a zero in bfloat16."""
    import torch

    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device=device)
    scales_and_zeros = torch.rand(inputs // GROUP, outputs, 2, device=device).mul(2.0**-7)
    return codes, scales_and_zeros.bfloat16()


def pack_int4(codes, inner_k_tiles):
    """Codes in torch's layout for a GPU, which takes two to a byte, the first in the high bits."""
    import torch

    return torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], inner_k_tiles)


def int4_product(*arguments):
    """torch's product for a GPU: of x, what pack_int4() made, the group's size, and scales with zeros."""
    import torch

    return torch.ops.aten._weight_int4pack_mm(*arguments)


def torch_int4_linears(model, inner_k_tiles, device="cuda"):
    """A callable that runs the four products of every layer by torch's kernel, and the number of layers. The products
    have no bias, and are in bfloat16, which is all that the kernel takes."""
    import torch

    shapes = product_shapes(model)
    x = {inputs: torch.randn(1, inputs, device=device).bfloat16() for _, inputs in shapes}
    layers = []

    def product(inputs, packed, scales_and_zeros):
        return int4_product(x[inputs], packed, GROUP, scales_and_zeros)

    for layer in range(model.num_hidden_layers):
        layers.append([])
        for outputs, inputs in shapes:
            codes, scales_and_zeros = random_int4(outputs, inputs, device)
            packed = pack_int4(codes, inner_k_tiles)
            if layer == 0:
                check_int4_linear(x[inputs], codes, scales_and_zeros, product(inputs, packed, scales_and_zeros))
            layers[-1].append((packed, scales_and_zeros))

    def run():
        for weights in layers:
            for (_, inputs), weight in zip(shapes, weights):
                product(inputs, *weight)

    return run, len(layers)


def time_torch_int4(model, timer):
    """The fields of torch's four products of every layer with int4 weights. Of its layouts the best one counts."""
    found = {}
    for inner_k_tiles in INNER_K_TILES:
        run, layers = torch_int4_linears(model, inner_k_tiles)
        found[inner_k_tiles] = spread(timer.graph(run), layers)
    best = min(found, key=lambda tiles: found[tiles]["median_us"])
    tried = {str(tiles): fields["median_us"] for tiles, fields in found.items()}
    return found[best] | {"layers": layers, "inner_k_tiles": tried}
