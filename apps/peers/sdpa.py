"""torch's scaled_dot_product_attention."""

from peers.timing import sets_beyond_l2


def sdpa(model, batch, kv_len, q_len=1):
    """A callable that runs sdpa over many layers' caches, and their number. Several queries are a whole prompt, each of
    which sees itself and those before it."""
    import torch
    import torch.nn.functional as F

    shape = (batch, model.num_attention_heads, kv_len, model.head_dim)
    count = sets_beyond_l2(4 * batch * kv_len * model.hidden_size)
    kind = {"device": "cuda", "dtype": torch.float16}
    caches = [(torch.randn(shape, **kind), torch.randn(shape, **kind)) for _ in range(count)]
    q = torch.randn(batch, model.num_attention_heads, q_len, model.head_dim, **kind)
    return lambda: [F.scaled_dot_product_attention(q, k, v, is_causal=q_len > 1) for k, v in caches], count
