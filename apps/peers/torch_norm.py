"""torch's layer_norm and additions."""

from peers.timing import sets_beyond_l2

NORM_PEERS = ("layernorm_residual", "residual_layernorm")
NORM_TOKENS = (1, 4096)


def norm_inputs(model, tokens, inputs, tensors):
    """gamma and beta, and many sets of a norm's inputs; a set's op reads or writes so many tensors."""
    import torch

    shape, kind = (tokens, model.hidden_size), {"device": "cuda", "dtype": torch.float16}
    count = sets_beyond_l2(tensors * 2 * tokens * model.hidden_size)
    weights = [torch.randn(shape[1:], **kind) for _ in range(2)]
    return weights, [[torch.randn(shape, **kind) for _ in range(inputs)] for _ in range(count)]


def norm_and_add(op, model, tokens):
    """A callable that runs an op of NORM_PEERS as torch's layer_norm and additions over many sets, and their number."""
    import torch.nn.functional as F

    norm = lambda x: F.layer_norm(x, gamma.shape, gamma, beta)

    def layernorm_residual(x, residual):
        return norm(x) + residual

    def residual_layernorm(x, a, b):
        h = x + a + b
        return h, norm(h)

    step, inputs, tensors = {
        "layernorm_residual": (layernorm_residual, 2, 3),
        "residual_layernorm": (residual_layernorm, 3, 5),
    }[op]
    (gamma, beta), sets = norm_inputs(model, tokens, inputs, tensors)
    return lambda: [step(*one) for one in sets], len(sets)
