"""Text: what tokenizers make of random ids, one by one and at once; stop texts; the settings that a file stores."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest

import cf_ops
from cf_ops._text import TextStream, first_stop, open_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers makes the tokenizers")
decoders = tokenizers.decoders

BYTES = [f"<0x{b:02X}>" for b in (0x41, 0x0A, 0xE6, 0xBC, 0xA2, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0xE2, 0x96, 0x81)]
WORDS = ["▁", "▁the", "▁a▁b", "b", "ab", "a ", "##ing", "##", "cat", "cat</w>", "a</w>", "</w>", " ", "  ", " ,", "|"]
WORDS += ["<pad>", ".", ",", " n't", "'m", "do", " do not", "\ufffd", "Ġ", "Ġthe", "æ", "¼", "¢", "Ã", "©", "é", "漢"]
PARTS = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "none": None,
    "BPEDecoder": decoders.BPEDecoder(),
    "ByteFallback": decoders.ByteFallback(),
    "ByteLevel": decoders.ByteLevel(),
    "CTC": decoders.CTC(),
    "CTC without cleanup": decoders.CTC(cleanup=False),
    "Fuse": decoders.Fuse(),
    "Metaspace": decoders.Metaspace(),
    "Metaspace never": decoders.Metaspace(prepend_scheme="never"),
    "Replace": decoders.Replace("▁", " "),
    "Replace by a pattern": decoders.Replace(tokenizers.Regex("a+"), "x"),
    "Strip": decoders.Strip(" ", 1, 0),
    "WordPiece": decoders.WordPiece(),
    "WordPiece without cleanup": decoders.WordPiece(cleanup=False),
    "Llama's": decoders.Sequence([*PARTS, decoders.Strip(" ", 1, 0)]),
    "Gemma's": decoders.Sequence(PARTS),
    "bytes, then Metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "joined, then replaced": decoders.Sequence([decoders.Fuse(), decoders.Replace(" ,", ",")]),
    "joined, then replaced by a pattern": decoders.Sequence(
        [decoders.ByteLevel(), decoders.Replace(tokenizers.Regex("a ?b"), "x")]
    ),
}
JOINED = [name for name in DECODERS if name.startswith("joined")]


def tokenizer_with(decoder: Any) -> Any:
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: id for id, word in enumerate(BYTES + WORDS)}, unk_token="b")
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["<mark>", "Ġadd", "é é"])
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


def random_ids(tokenizer: Any, generator: np.random.Generator) -> list[int]:
    """Ids of which every other one is a byte token; two have no token."""
    size, length = tokenizer.get_vocab_size() + 2, generator.integers(1, 14)
    return [int(generator.integers(size if generator.random() < 0.5 else len(BYTES))) for _ in range(length)]


def test_every_decoder_of_tokenizers_is_here() -> None:
    kinds = {name for name in dir(decoders) if name[0].isupper()} - {"Decoder", "DecodeStream"}
    assert kinds <= {type(part).__name__ for part in [*DECODERS.values(), *PARTS]}


@pytest.mark.parametrize("name", DECODERS)
def test_pieces_joined_are_the_decoded_text(name: str) -> None:
    tokenizer = tokenizer_with(DECODERS[name])
    generator = np.random.default_rng(0)
    pieces_before_the_end = 0
    for _ in range(1500):
        ids = random_ids(tokenizer, generator)
        stream = TextStream(tokenizer)
        pieces = [stream.put(id) for id in ids]
        assert "".join(pieces) + stream.finish() == tokenizer.decode(ids), [tokenizer.id_to_token(id) for id in ids]
        pieces_before_the_end += sum(map(bool, pieces))
    assert pieces_before_the_end > 1500 or name in JOINED


@pytest.mark.parametrize("name", DECODERS)
def test_a_stop_text_ends_the_pieces_where_it_begins(name: str) -> None:
    tokenizer = tokenizer_with(DECODERS[name])
    generator = np.random.default_rng(1)
    stop = ["the c", "\n", "b", "漢a", "aba"]
    stopped = 0
    for _ in range(1000):
        ids = random_ids(tokenizer, generator)
        stream = TextStream(tokenizer, stop)
        pieces: list[str] = []
        fed = 0
        while fed < len(ids) and not stream.stopped:
            pieces.append(stream.put(ids[fed]))
            fed += 1
        stopped += stream.stopped
        pieces.append(stream.finish())
        text = tokenizer.decode(ids[:fed])
        assert "".join(pieces) == text[: first_stop(text, stop)]
        # It ends with the first id whose text has a stop text.
        assert first_stop(tokenizer.decode(ids[: fed - 1]), stop) is None
    assert stopped > 100


def test_a_lone_byte_behind_a_character_takes_nothing_of_the_later_text() -> None:
    """Llama 2's and Mistral's decoder: the byte that follows makes U+FFFD of the whole character."""
    tokenizer = tokenizer_with(DECODERS["Llama's"])
    character, lone = ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"], ["<0xE6>"]
    for tokens, text in [
        (["▁the", *character, "cat"], "the\U0001f600cat"),
        (["▁the", *character, *lone, "cat", "▁the"], "the\ufffd\ufffd\ufffd\ufffd\ufffdcat the"),
        (["▁the", *character, "<s>", *lone, "cat"], "the\ufffd\ufffd\ufffd\ufffd\ufffdcat"),
        (["▁the", *character], "the\U0001f600"),
    ]:
        stream = TextStream(tokenizer)
        pieces = [stream.put(tokenizer.token_to_id(token)) for token in tokens]
        assert "".join(pieces) + stream.finish() == text
        assert pieces[0] == "the" and not any(pieces[1:5])


# --- whole models -----------------------------------------------------------------------------------------------------


NEW: dict[str, Any] = {"max_new_tokens": 60, "temperature": 8.0, "seed": 3}


def words_of(text: str | None) -> list[str]:
    """Pairs of characters that stand behind the first ten, without U+FFFD, which an incomplete character is too."""
    assert text is not None
    return [text[i : i + 2] for i in range(10, len(text) - 2) if "\ufffd" not in text[i : i + 2]]


def test_stop_texts_end_a_generation(text_checkpoint: str) -> None:
    model = cf_ops.load(text_checkpoint)
    model.eos_token_ids = []
    whole = model.generate("the fox", **NEW)
    text = "".join(whole)
    first, *_, last = words_of(text)
    for stop in [last, [last, "never there"], (first, last), [first[0]]]:
        texts = [stop] if isinstance(stop, str) else stop
        generation = model.generate("the fox", stop=stop, **NEW)
        pieces = list(generation)
        assert all(pieces) and generation.finish == "stop"
        assert "".join(pieces) == generation.text == text[: first_stop(text, texts)]
        assert generation.ids == whole.ids[: len(generation.ids)]
        assert first_stop(model.tokenizer.decode(generation.ids[:-1]), texts) is None
        (result,) = model.generate_batch(["the fox"], stop=stop, **NEW)
        assert (result.ids, result.text, result.finish) == (generation.ids, generation.text, "stop")
    with pytest.raises(ValueError, match="stop: expected ids, which end a prompt of ids, got 'x'"):
        model.generate([1, 2], stop=["x"])
    with pytest.raises(ValueError, match="stop: expected ids and texts that are not empty"):
        model.generate("a", stop=[""])


def test_ids_beside_stop_texts_take_the_place_of_the_checkpoints(text_checkpoint: str) -> None:
    model = cf_ops.load(text_checkpoint)
    whole = model.generate("the fox", stop=(), **NEW)
    list(whole)
    eos, other = whole.ids[10], next(id for id in whole.ids[11:] if id not in whole.ids[:11])
    model.eos_token_ids = [eos]
    cases: list[tuple[Any, int | None]] = [
        (None, eos),
        (["never there"], eos),
        ("never there", eos),
        (["never there", other], other),
        (other, other),
        (np.array([other]), other),
        ((), None),
    ]
    for stop, ends in cases:
        generation = model.generate("the fox", stop=stop, **NEW)
        list(generation)
        length = len(whole.ids) if ends is None else whole.ids.index(ends) + 1
        assert generation.ids == whole.ids[:length]
        assert generation.finish == ("length" if ends is None else "stop")


def test_a_batch_goes_on_where_one_of_its_prompts_stops(text_checkpoint: str) -> None:
    model = cf_ops.load(text_checkpoint)
    model.eos_token_ids = []
    prompts = ["the fox", "in the", "a"]
    whole = model.generate_batch(prompts, stop=(), **NEW)
    stop = words_of(whole[0].text)[0]
    for slots in (1, 2, 3):
        results = model.generate_batch(prompts, stop=stop, slots=slots, **NEW)
        assert [r.finish for r in results] == ["stop" if stop in (full.text or "") else "length" for full in whole]
        for result, full in zip(results, whole):
            assert result.ids == full.ids[: len(result.ids)]
            assert result.text == (full.text or "").partition(stop)[0]
        assert results[0].finish == "stop" and any(len(r.ids) > len(results[0].ids) for r in results)


@pytest.mark.parametrize(
    "stored",
    [
        {"truncation": {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}},
        {
            "padding": {
                "strategy": {"Fixed": 1024},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "<|endoftext|>",
            }
        },
    ],
    ids=lambda stored: next(iter(stored)),
)
def test_what_a_file_stores_of_an_earlier_call_is_not_used(
    text_checkpoint: str, tmp_path: pathlib.Path, stored: dict[str, Any]
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(text_checkpoint, directory)
    text = "the fox in the sky, " * 40
    expected = cf_ops.load(directory).encode(text)
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | stored))
    # The settings are in force where they are read as they stand.
    assert tokenizers.Tokenizer.from_file(str(path)).encode(text).ids != expected
    assert cf_ops.load(directory).encode(text) == expected
    assert open_tokenizer(str(directory)).encode(text).ids == expected
