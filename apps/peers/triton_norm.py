"""layernorm_residual in Triton."""

from peers.exactness import SUM_UNIT, check_within, stored
from peers.torch_norm import norm_inputs


def check_layernorm_residual(x, residual, gamma, beta, eps, y):
    """y = LayerNorm(x) + residual in float16. To first order: the mean is off by at most n units of mean |x|, which
    moves every centred x; the variance by n + 3 units relatively, of which the root halves what it is off; quotients,
    root and product add a few units, and each of the last sums one of what has been summed."""
    n = x.shape[1]
    x, residual, gamma, beta = (t.double() for t in (x, residual, gamma, beta))
    mean = x.mean(1, keepdim=True)
    inverse = ((x - mean).square().mean(1, keepdim=True) + eps).rsqrt()
    scaled = (x - mean) * inverse * gamma
    reference = scaled + beta + residual
    of_mean = n * x.abs().mean(1, keepdim=True) * inverse * gamma.abs()
    of_rest = (n / 2 + 8) * scaled.abs() + 2 * (scaled.abs() + beta.abs() + residual.abs())
    check_within("layernorm_residual", y, reference, stored(reference, 11) + SUM_UNIT * (of_mean + of_rest))


def triton_norm(model, tokens):
    """A callable that runs layernorm_residual in Triton over many sets, and their number."""
    import peers.triton_kernels as triton_kernels

    (gamma, beta), sets = norm_inputs(model, tokens, inputs=2, tensors=3)
    step = lambda x, residual: triton_kernels.layernorm_residual(x, residual, gamma, beta, model.layer_norm_eps)
    check_layernorm_residual(*sets[0], gamma, beta, model.layer_norm_eps, step(*sets[0]))
    return lambda: [step(*one) for one in sets], len(sets)
