"""The checkpoints of tests: those of the repository, and GPTQ ones of a GPT-2, which are made of a dense one when they
are needed."""

import functools
import json
import pathlib
import tempfile

import numpy as np
from conftest import ROOT, read_safetensors

# In golden/tools.
import gptq
from families import NAMES
from preset_checkpoint import write_safetensors
from quantize_gptq import Recipe, quantise

SOURCE = ROOT / "data" / "checkpoints" / "gpt2-d64"
RECIPES = {
    "gpt2-gptq-desc-act": Recipe(group_size=32, sym=False, desc_act=True),
    "gpt2-gptq-mixed": Recipe(
        bits=8, group_size=-1, checkpoint_format="gptq_v2", modules=("attn.c_attn", "mlp.c_fc", "mlp.c_proj")
    ),
}
_made = tempfile.TemporaryDirectory(prefix="cf-gptq-")  # goes with the process


@functools.cache
def checkpoint(name: str) -> pathlib.Path:
    """A checkpoint's directory."""
    if name not in RECIPES:
        return ROOT / "data" / "checkpoints" / name
    recipe, names = RECIPES[name], NAMES["gpt2"]
    rng = np.random.default_rng(1)
    tensors = {}
    for key, (array, _) in read_safetensors(SOURCE / "model.safetensors").items():
        module, _, kind = key.rpartition(".")
        if kind == "weight" and module.endswith(recipe.modules or names.linears):
            # A Conv1D's weight is (in, out). The Hessian only decides the order of the inputs.
            hessian = np.diag(rng.uniform(1, 2, len(array)))
            parts = quantise(array.view(np.float16).astype(np.float64).T, hessian, recipe)
            tensors |= {f"{module}.{part}": parts[part] for part in gptq.PARTS}
        else:
            tensors[key] = array
    directory = pathlib.Path(_made.name) / name
    directory.mkdir()
    shapes = {key: array.shape for key, array in tensors.items()}
    write_safetensors(directory / "model.safetensors", shapes, "float16", lambda key, _: tensors[key])
    config = json.loads((SOURCE / "config.json").read_text()) | {"quantization_config": recipe.config()}
    (directory / "config.json").write_text(json.dumps(config))
    return directory
