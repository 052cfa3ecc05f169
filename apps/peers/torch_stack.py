"""torch_ops and torch_graph: a step of all layers by torch's operators."""

from peers import model_peers


def torch_stack(hf, step):
    """A callable that runs all layers op by op, and returns what leaves the last one."""
    import torch.nn.functional as F

    cos, sin = (t.unsqueeze(1) for t in hf.rotary_emb(step.hidden, position_ids=step.position))
    last, model = step.kv_len - 1, model_peers.model_of(hf)
    layers = [model_peers.TorchLayer(model, layer) for layer in hf.layers]
    shape = (step.batch, step.heads, step.kv_len, step.head_dim)
    caches = []
    for old_k, old_v in step.past:
        k, v = old_k.new_empty(shape), old_v.new_empty(shape)
        k[:, :, :last], v[:, :, :last] = old_k, old_v
        caches.append((k, v))

    def run():
        x = step.hidden
        for layer, (k_cache, v_cache) in zip(layers, caches):

            def attend(q, k, v):
                k_cache[:, :, last:], v_cache[:, :, last:] = k, v
                return F.scaled_dot_product_attention(q, k_cache, v_cache)

            x = layer(x, cos, sin, attend)
        return x

    return run
