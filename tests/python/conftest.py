"""What the tests of the package share: the repository's root, checkpoints, golden files."""

from __future__ import annotations

import json
import pathlib
import shutil
import signal
import struct
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Ctrl-C is heard, by the programs that a test starts too: a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    """The repository's root, which holds the data."""
    return ROOT


@pytest.fixture(scope="session")
def checkpoints() -> pathlib.Path:
    return ROOT / "data" / "checkpoints"


@pytest.fixture(scope="session")
def cf_model() -> str:
    """The program of a build of this repository."""
    built = sorted(ROOT.glob("build/*/apps/cf-model"))
    if not built:
        pytest.skip("cf-model is not built in build/")
    return str(built[0])


@pytest.fixture(scope="session")
def text_checkpoint(tmp_path_factory: pytest.TempPathFactory, checkpoints: pathlib.Path) -> str:
    """A checkpoint of 128 ids with a byte-level BPE tokenizer: letters, and bytes that characters are made of."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers makes the tokenizer")
    directory = tmp_path_factory.mktemp("text") / "neox-tied"
    shutil.copytree(checkpoints / "neox-tied", directory)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    text = "abcdefghijklmnopqrstuvwxyz .,!?\n" + "é€漢😀ß"
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    needed = sorted({c for piece, _ in byte_level.pre_tokenize_str(text) for c in piece})
    rest = [c for c in alphabet if c not in needed]
    vocabulary = {"<|endoftext|>": 0}
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the")]
    for token in [*needed, *("".join(pair) for pair in merges), *rest][:127]:
        vocabulary[token] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return str(directory)


def read_safetensors(path: pathlib.Path) -> dict[str, tuple[np.ndarray[Any, Any], str]]:
    """The tensors of a file: an array of stored elements and the dtype's name, by name."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    names = {"F16": ("<f2", "float16"), "BF16": ("<u2", "bfloat16"), "F32": ("<f4", "float32"), "I32": ("<i4", "int32")}
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        stored, dtype = names[entry["dtype"]]
        tensors[name] = (np.frombuffer(data[begin:end], stored).reshape(entry["shape"]).copy(), dtype)
    return tensors


sys.path.insert(0, str(ROOT / "golden/tools"))  # procedural, with which golden files are made
