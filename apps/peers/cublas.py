"""cuBLAS: the products of every layer by torch's linear."""


def four_products(hf, batch):
    """A callable that runs the four products of every layer, by cuBLAS."""
    import torch
    import torch.nn.functional as F

    h = hf.config.hidden_size
    narrow, wide = (torch.randn(batch, n, device="cuda", dtype=torch.float16) for n in (h, hf.config.intermediate_size))

    def run():
        for layer in hf.layers:
            for module in (layer.attention.query_key_value, layer.attention.dense, layer.mlp.dense_h_to_4h):
                F.linear(narrow, module.weight, module.bias)
            F.linear(wide, layer.mlp.dense_4h_to_h.weight, layer.mlp.dense_4h_to_h.bias)

    return run
