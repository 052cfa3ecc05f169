"""hf_eager and hf_compile: a step of all layers by Hugging Face's model."""

import hf_model


def hf_stack(hf, step, cache_class):
    """A callable that runs Hugging Face's model for the step, and a callable that takes the step out of its cache."""
    import torch
    from transformers import DynamicCache, StaticCache

    static = cache_class is StaticCache
    cache = StaticCache(hf.config, max_cache_len=step.kv_len) if static else DynamicCache(config=hf.config)
    for n, (k, v) in enumerate(step.past):
        cache.update(k, v, n)
    last = step.kv_len - 1

    def back():
        if static:
            torch._foreach_copy_([layer.cumulative_length for layer in cache.layers], filled)
        elif cache.get_seq_length() > last:
            cache.crop(-1)

    filled = [torch.full_like(layer.cumulative_length, last) for layer in cache.layers] if static else None
    kept = {hf_model.cache_name(getattr(hf, "_orig_mod", hf)): cache}  # _orig_mod: what torch.compile made it of

    def run():
        with torch.no_grad():
            out = hf(inputs_embeds=step.hidden, position_ids=step.position, **kept, use_cache=True)
        return out.last_hidden_state

    return run, back
