"""Hugging Face's models of the GPTQ checkpoints, with a stand-in for the Linears of GPTQModel and AutoGPTQ."""

import json

import gptq
import numpy as np
import torch
import transformers
from conftest import read_safetensors
from families import NAMES
from made_gptq import checkpoint

PARTS = ("qweight", "qzeros", "scales", "g_idx")
CHECKPOINTS = [f"neox-gptq-{kind}" for kind in ("8bit", "asym", "desc-act", "mixed", "sym", "v2")]
CHECKPOINTS += ["llama-gptq-desc-act", "qwen2-gptq-8bit", "qwen3-gptq-sym", "gpt2-gptq-desc-act"]


class QuantLinear(torch.nn.Module):
    """A Linear that holds what those of the packages hold, and dequantises its weight in each call."""

    QUANT_TYPE = "torch"

    def __init__(self, bits, group_size, parts, bias, form):
        super().__init__()
        for name in PARTS:
            self.register_buffer(name, parts[name])
        self.register_buffer("bias", bias) if bias is not None else setattr(self, "bias", None)
        self.bits, self.adapter, self._form = bits, None, form
        self.in_features, self.out_features = self.qweight.shape[0] * 32 // bits, self.qweight.shape[1]
        self.group_size = self.in_features if group_size == -1 else group_size

    def qzero_format(self):
        return self._form

    def weight_values(self):
        parts = {name: getattr(self, name).cpu().numpy() for name in PARTS}
        return torch.from_numpy(np.ascontiguousarray(gptq.dequantise(parts, self.bits, self._form == 2)))

    def forward(self, x):
        weight = self.weight_values().to(device=x.device, dtype=x.dtype)
        return torch.nn.functional.linear(x, weight, self.bias)

    def convert_to_v2(self):
        """What GPTQModel does with a checkpoint of format v1 when it loads it."""
        self.qzeros += 0x11111111 if self.bits == 4 else 0x01010101
        self._form = 2


class AutoGptqLinear(QuantLinear):
    """One of AutoGPTQ, which has format v1 alone and does not say so."""

    QUANT_TYPE = "cuda-old"
    qzero_format = None


AutoGptqLinear.__module__ = "auto_gptq.nn_modules.qlinear.qlinear_cuda_old"


def read(name):
    """A checkpoint's config without quantisation, that of GPTQ, and its tensors."""
    directory = checkpoint(name)
    config = json.loads((directory / "config.json").read_text())
    quantised = config.pop("quantization_config")
    tensors = {
        key: torch.from_numpy(array.view(np.float16) if dtype == "float16" else array)
        for key, (array, dtype) in read_safetensors(directory / "model.safetensors").items()
    }
    names = NAMES[config["model_type"]]
    if f"{names.head}.weight" not in tensors:
        tensors[f"{names.head}.weight"] = tensors[f"{names.embedding}.weight"]  # tied
    return transformers.AutoConfig.for_model(**config), quantised, tensors


def renamed(key, model):
    """A tensor's name in this transformers, which has renamed GPT-NeoX's head."""
    return key.replace("embed_out.", "lm_head.") if hasattr(model, "lm_head") else key


def empty_model(config, dtype):
    model = transformers.AutoModelForCausalLM.from_config(config, torch_dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def load_gptq(name, kind=QuantLinear):
    """A checkpoint's model in float16, whose quantised Linears are of a class."""
    config, quantised, tensors = read(name)
    model = empty_model(config, torch.float16)
    form = 2 if quantised["checkpoint_format"] == "gptq_v2" else 1
    for key in [key for key in tensors if key.endswith(".qweight")]:
        module = key.removesuffix(".qweight")
        parts = {part: tensors.pop(f"{module}.{part}") for part in PARTS}
        made = kind(quantised["bits"], quantised["group_size"], parts, tensors.pop(f"{module}.bias", None), form)
        parent, _, last = module.rpartition(".")
        setattr(model.get_submodule(parent), last, made.eval())
    missing, unexpected = model.load_state_dict({renamed(k, model): v for k, v in tensors.items()}, strict=False)
    assert not unexpected and all(key.rpartition(".")[2] in (*PARTS, "bias") for key in missing)
    return model


def load_reference(name):
    """The same in float64, with dense Linears of the same values."""
    config, quantised, tensors = read(name)
    model, names = empty_model(config, torch.float64), NAMES[config.model_type]
    form = gptq.Format(quantised, name, names.linears, names.transposed)
    dense = form.dense({key: tensor.numpy() for key, tensor in tensors.items()})
    state = {renamed(key, model): torch.from_numpy(np.array(array)).double() for key, array in dense.items()}
    model.load_state_dict(state)
    return model
