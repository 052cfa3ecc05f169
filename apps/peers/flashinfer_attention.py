"""FlashInfer's attention over a cache in pages: of one new token a sequence, and of a prompt."""

from peers.timing import sets_beyond_l2

PAGE_ENTRIES = 64
WORKSPACE_BYTES = 128 << 20  # what its documentation advises


def pages(sequences, kv_len):
    """(where each sequence's pages begin among all, and where the last one's end; the entries of a sequence's last
    page)."""
    each = -(-kv_len // PAGE_ENTRIES)
    return [i * each for i in range(sequences + 1)], kv_len - (each - 1) * PAGE_ENTRIES


def planned(wrapper_of, model, sequences, kv_len, device, plan):
    """A wrapper of FlashInfer's, planned by plan(wrapper, pages, sizes); caches of many layers, whose pages lie in a
    random order, and that order."""
    import torch

    heads, kind = model.num_attention_heads, {"device": device, "dtype": torch.float16}
    count = sets_beyond_l2(4 * sequences * kv_len * model.hidden_size)
    begins, in_last = pages(sequences, kv_len)
    order = torch.randperm(begins[-1], device=device)
    caches = [torch.randn(begins[-1], 2, PAGE_ENTRIES, heads, model.head_dim, **kind) for _ in range(count)]
    indices = {"device": device, "dtype": torch.int32}
    wrapper = wrapper_of(torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device), "NHD")
    where = torch.tensor(begins, **indices), order.to(torch.int32), torch.full((sequences,), in_last, **indices)
    plan(wrapper, where, (heads, heads, model.head_dim, PAGE_ENTRIES))
    return wrapper, caches, order


def keys_and_values(cache, order, sequences, kv_len):
    """(sequences, heads, kv_len, head_dim) in float32, twice, of a cache of pages."""
    rows = cache[order].unflatten(0, (sequences, -1)).transpose(1, 2).flatten(2, 3)[:, :, :kv_len]
    return (side.transpose(1, 2).float() for side in rows.unbind(1))


def check_same(found, exact):
    error = ((found.float() - exact).norm() / exact.norm()).item()
    if not error < 1e-2:
        raise RuntimeError(f"expected sdpa's result, got a relative error of {error:.2g}")


def flashinfer_decode(model, batch, kv_len, device="cuda"):
    """A callable that runs it over many layers' caches, and their number. The first layer's result is compared with
    sdpa's."""
    import flashinfer
    import torch
    import torch.nn.functional as F

    def plan(wrapper, where, sizes):
        wrapper.plan(*where, *sizes, q_data_type=torch.float16, kv_data_type=torch.float16)

    found = planned(flashinfer.BatchDecodeWithPagedKVCacheWrapper, model, batch, kv_len, device, plan)
    wrapper, caches, order = found
    q = torch.randn(batch, model.num_attention_heads, model.head_dim, device=device, dtype=torch.float16)
    k, v = keys_and_values(caches[0], order, batch, kv_len)
    check_same(wrapper.run(q, caches[0]), F.scaled_dot_product_attention(q[:, :, None].float(), k, v)[:, :, 0])
    return lambda: [wrapper.run(q, cache) for cache in caches], len(caches)


def flashinfer_prefill(model, tokens, device="cuda"):
    """The same of a prompt's tokens, each of which sees itself and those before it."""
    import flashinfer
    import torch
    import torch.nn.functional as F

    def plan(wrapper, where, sizes):
        begins = torch.tensor([0, tokens], device=device, dtype=torch.int32)
        kinds = {"q_data_type": torch.float16, "kv_data_type": torch.float16}
        wrapper.plan(begins, *where, *sizes, causal=True, **kinds)

    found = planned(flashinfer.BatchPrefillWithPagedKVCacheWrapper, model, 1, tokens, device, plan)
    wrapper, caches, order = found
    q = torch.randn(tokens, model.num_attention_heads, model.head_dim, device=device, dtype=torch.float16)
    k, v = keys_and_values(caches[0], order, 1, tokens)
    exact = F.scaled_dot_product_attention(q.transpose(0, 1)[None].float(), k, v, is_causal=True)
    check_same(wrapper.run(q, caches[0]), exact[0].transpose(0, 1))
    return lambda: [wrapper.run(q, cache) for cache in caches], len(caches)
