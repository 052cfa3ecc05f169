"""FlashInfer's attention of one new token a sequence over a cache in pages."""

from peers.timing import sets_beyond_l2

PAGE_ENTRIES = 64
WORKSPACE_BYTES = 128 << 20  # what its documentation advises


def pages(sequences, kv_len):
    """(where each sequence's pages begin among all, and where the last one's end; the entries of a sequence's last
    page)."""
    each = -(-kv_len // PAGE_ENTRIES)
    return [i * each for i in range(sequences + 1)], kv_len - (each - 1) * PAGE_ENTRIES


def flashinfer_decode(model, batch, kv_len, device="cuda"):
    """A callable that runs it over many layers' caches, and their number. Pages lie in a random order. The first layer's
    result is compared with sdpa's."""
    import flashinfer
    import torch
    import torch.nn.functional as F

    heads, kind = model.num_attention_heads, {"device": device, "dtype": torch.float16}
    count = sets_beyond_l2(4 * batch * kv_len * model.hidden_size)
    begins, in_last = pages(batch, kv_len)
    order = torch.randperm(begins[-1], device=device)
    caches = [torch.randn(begins[-1], 2, PAGE_ENTRIES, heads, model.head_dim, **kind) for _ in range(count)]
    q = torch.randn(batch, heads, model.head_dim, **kind)
    indices = {"device": device, "dtype": torch.int32}
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device), "NHD"
    )
    wrapper.plan(
        torch.tensor(begins, **indices),
        order.to(torch.int32),
        torch.full((batch,), in_last, **indices),
        heads,
        heads,
        model.head_dim,
        PAGE_ENTRIES,
        q_data_type=torch.float16,
        kv_data_type=torch.float16,
    )
    # (batch, 2, entries, heads, head_dim), and of each sequence the entries that it has.
    rows = caches[0][order].unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)[:, :, :kv_len]
    k, v = (side.transpose(1, 2).float() for side in rows.unbind(1))
    exact = F.scaled_dot_product_attention(q[:, :, None].float(), k, v)[:, :, 0]
    error = ((wrapper.run(q, caches[0]).float() - exact).norm() / exact.norm()).item()
    if not error < 1e-2:
        raise RuntimeError(f"expected sdpa's result, got a relative error of {error:.2g}")
    return lambda: [wrapper.run(q, cache) for cache in caches], count
