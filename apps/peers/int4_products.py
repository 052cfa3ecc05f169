"""A layer's products with int4 weights, by this library and by others, each held against float64."""

import dataclasses

import model_config
from peers import torch_int4
from peers.exactness import SUM_UNIT, linear_and_magnitude, stored
from peers.timing import sets_beyond_l2
from peers.triton_gptq import GROUP, random_gptq

LINEARS = ("qkv", "dense", "up", "down")


@dataclasses.dataclass(frozen=True)
class Product:
    name: str
    outputs: int
    inputs: int

    @property
    def code_bytes(self):
        return self.outputs * self.inputs // 2


def products_of(model):
    """A layer's four products: q, k and v as one, and a gated MLP's gate and up as one."""
    shapes = [shape for shape in model_config.joined_layer_shapes(model).values() if len(shape) == 2]
    return [Product(name, *shape) for name, shape in zip(LINEARS, shapes, strict=True)]


def program_rows(report, preset, products):
    """cf-op's four products as rows."""
    rows = []
    for at, r in enumerate(r for r in report["results"] if r["site"] != "layer"):
        row = {"preset": preset, "tokens": r["batch"], "product": products[at % len(products)].name, "system": "cf-op"}
        rows.append(row | {key: r[key] for key in ("median_us", "p10_us", "p99_us", "bytes", "cold", "floor_us")})
    return rows


def dequantised(parts):
    """The weight (outputs, inputs) in float64 of GPTQ's parts in the format gptq_v2, whose zeros are as they are stored."""
    import torch

    shifts = torch.arange(0, 32, 4, device=parts["qweight"].device)
    codes = (parts["qweight"][:, None] >> shifts[:, None] & 15).flatten(0, 1)
    zeros = (parts["qzeros"][:, :, None] >> shifts & 15).flatten(1, 2)
    scales = parts["scales"].double().repeat_interleave(GROUP, 0)
    return ((codes - zeros.repeat_interleave(GROUP, 0)) * scales).T


class Peer:
    """One system's form of one product. A subclass makes `sets` forms of random weights, so that each is cold when its
    turn comes, and says how one is multiplied. `weight` is the first in float64, as the system defines it."""

    device = "cuda"
    dtype, bits = "float16", 11  # of activations, and of their significands
    is_ours = False  # whether cf-op has the times
    weight_bytes_of_codes = 1  # a weight's bytes over those of its codes

    def __init__(self, product):
        import torch

        self.product = product
        self.sets = sets_beyond_l2(product.code_bytes * self.weight_bytes_of_codes)
        torch.manual_seed(1)
        self.forms = [self.make(i == 0) for i in range(1 if self.is_ours else self.sets)]

    def run(self, x):
        for form in self.forms:
            self.multiply(x, form)

    def activations(self, tokens):
        import torch

        torch.manual_seed(tokens)
        return torch.randn(tokens, self.product.inputs, device=self.device).to(getattr(torch, self.dtype))

    def run(self, x):
        for form in self.forms:
            self.multiply(x, form)

    def errors(self, x):
        """How far the outputs are from float64: the largest error over the outputs' root mean square; the largest over
        what rounding the output and a float32 sum may add; how many outputs are no finite number."""
        import torch

        y = self.multiply(x, self.forms[0]).double()
        reference, magnitude = linear_and_magnitude(x, self.weight, 0)
        error = (y - reference).abs()
        finite = torch.isfinite(y)
        bound = stored(reference, self.bits) + 2 * x.shape[1] * SUM_UNIT * magnitude
        worst = lambda values: float(values[finite].max()) if bool(finite.any()) else None
        return {
            "max_error": worst(error / reference.square().mean().sqrt()),
            "of_bound": worst(error / bound),
            "non_finite": int((~finite).sum()),
        }


class OurProducts(Peer):
    """This library, by its Python package. Its first call packs a weight."""

    is_ours = True

    def make(self, is_first):
        import torch
        from cf_ops import ops

        parts = random_gptq(self.product.outputs, self.product.inputs, self.device)
        self.weight = dequantised(parts)
        g_idx = torch.arange(self.product.inputs, dtype=torch.int32, device=self.device) // GROUP
        return ops.GptqWeight(**parts, g_idx=g_idx, group_size=GROUP, zero_offset=0)

    def multiply(self, x, form):
        from cf_ops import ops

        return ops.linear(x, form)


class Humming(Peer):
    """Humming, which vLLM uses. It takes zeros as they are stored, and compiles a product's kernels at its first call."""

    def make(self, is_first):
        import torch
        from humming.layer import HummingLayer

        product = self.product
        parts = random_gptq(product.outputs, product.inputs, self.device)
        if is_first:
            self.weight = dequantised(parts)
        config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
        layer = HummingLayer(product.outputs, product.inputs, config, torch_dtype=torch.float16).cuda()
        g_idx = torch.arange(product.inputs, dtype=torch.int32, device=self.device) // GROUP
        layer.load_from_tensors(parts | {"g_idx": g_idx})
        layer.transform()
        return layer

    def multiply(self, x, form):
        return form(x)


class TorchInt4(Peer):
    """torch's product, in bfloat16, which is all that it takes, in the first of its layouts."""

    dtype, bits = "bfloat16", 8

    def make(self, is_first):
        codes, scales_and_zeros = torch_int4.random_int4(self.product.outputs, self.product.inputs, self.device)
        if is_first:
            scales, zeros = scales_and_zeros.double().repeat_interleave(GROUP, 0).unbind(-1)
            self.weight = ((codes.T.double() - 8) * scales + zeros).T.bfloat16().double()
        return torch_int4.pack_int4(codes, torch_int4.INNER_K_TILES[0]), scales_and_zeros

    def multiply(self, x, form):
        packed, scales_and_zeros = form
        return torch_int4.int4_product(x, packed, GROUP, scales_and_zeros)


class CublasFloat16(Peer):
    """torch's linear with float16 weights, by cuBLASLt: four times the bytes."""

    weight_bytes_of_codes = 4

    def make(self, is_first):
        import torch

        torch.backends.cuda.preferred_blas_library("cublaslt")
        weight = torch.randn(self.product.outputs, self.product.inputs, device=self.device).div(64).half()
        if is_first:
            self.weight = weight.double()
        return weight

    def multiply(self, x, form):
        import torch.nn.functional as F

        return F.linear(x, form)


PEERS = {"cf_ops": OurProducts, "humming": Humming, "torch_int4": TorchInt4, "cublaslt_float16": CublasFloat16}
OURS = "cf-op"


def with_ratios(rows):
    """The rows; a peer's with its time over cf-op's of the same product."""
    ours = {work(r): r["median_us"] for r in rows if r["system"] == OURS and "median_us" in r}
    found = []
    for r in rows:
        is_compared = r["system"] != OURS and "median_us" in r and work(r) in ours
        found.append(r | ({"ratio": r["median_us"] / ours[work(r)]} if is_compared else {}))
    return found


def work(row):
    return row["preset"], row["tokens"], row["product"]


def table(rows):
    """A line a product and number of tokens: each system's time, and its errors where they are more than roundings."""
    systems = list(dict.fromkeys(r["system"] for r in rows if r["system"] != "cf_ops"))
    lines = ["| preset | product | tokens | " + " | ".join(f"{s}, us" for s in systems) + " | beyond roundings |"]
    lines.append("|-|-|-:|" + "-:|" * len(systems) + "-|")
    products = list(dict.fromkeys((r["preset"], r["product"]) for r in rows))
    for key in sorted({work(r) for r in rows}, key=lambda w: (products.index((w[0], w[2])), w[1])):
        of = {r["system"]: r for r in rows if work(r) == key}
        cells = [f"{of[s]['median_us']:.1f}" if "median_us" in of.get(s, {}) else "" for s in systems]
        notes = [note for r in of.values() if (note := beyond(r))]
        lines.append("| " + " | ".join([key[0], str(key[2]), str(key[1]), *cells, "; ".join(notes)]) + " |")
    return lines


def layer_rows(rows):
    """The systems that have times, and a row for each preset and number of tokens, with the time of a layer's four
    products by each system: None where one of the four is missing."""
    systems = list(dict.fromkeys(r["system"] for r in rows if "median_us" in r))
    found = []
    for preset, tokens in dict.fromkeys((r["preset"], r["tokens"]) for r in rows if r["tokens"]):
        sums = {}
        for system in systems:
            of = [r for r in rows if (r["preset"], r["tokens"], r["system"]) == (preset, tokens, system)]
            times = [r["median_us"] for r in of if "median_us" in r]
            sums[system] = sum(times) if len(times) == len(LINEARS) else None
        found.append({"preset": preset, "tokens": tokens} | sums)
    return systems, found


def findings(rows):
    """A line for each system: how far its outputs are from float64 at most, where they are wrong and where it fails."""
    lines = []
    for system in dict.fromkeys(r["system"] for r in rows):
        of = [r for r in rows if r["system"] == system]
        errors = [r for r in of if r.get("max_error") is not None]
        said = []
        if errors:
            worst = max(errors, key=lambda r: r["max_error"])
            said.append(f"the largest error is {worst['max_error']:.2g} of the outputs' root mean square")
        wrong = [r for r in of if beyond(r)]
        places = lambda rows: ", ".join(f"{r['preset']} {r['product']} of {r['tokens']} tokens" for r in rows)
        if far := [r for r in wrong if "error" not in r]:
            said.append(f"beyond roundings: {places(far)}")
        for error in dict.fromkeys(r["error"] for r in wrong if "error" in r):
            said.append(f"failed {sum(r.get('error') == error for r in of)} times: {error}")
        if said:
            lines.append(f"- {system}: {'; '.join(said)}.")
    return lines


def beyond(row):
    """What a reader must know of a row: that it failed, or how its outputs are wrong."""
    if "error" in row:
        return f"{row['system']}: {row['error']}"
    if row.get("non_finite"):
        return f"{row['system']}: {row['non_finite']} not finite"
    if (row.get("of_bound") or 0) > 1:
        return f"{row['system']}: {row['of_bound']:.1f} times the bound"
    return ""
