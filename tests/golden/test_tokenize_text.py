#!/usr/bin/env python3
"""Tests of tokenize_text.py. Needs numpy; what needs tokenizers is skipped without it."""

import contextlib
import importlib.util
import io
import json
import os
import sys
import tempfile
import unittest
from unittest import mock

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir, "golden", "tools")
sys.path.insert(0, GOLDEN)

import numpy as np

import tokenize_text

HAS_TOKENIZERS = importlib.util.find_spec("tokenizers") is not None

# Bytes as tokens, one merge, and an end of text.
LETTERS = "abcdefgh"
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {
            "id": 9,
            "content": "<|endoftext|>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE",
        "vocab": {**{letter: i for i, letter in enumerate(LETTERS)}, "ab": 8, "<|endoftext|>": 9},
        "merges": ["a b"],
    },
}


class TokenizeText(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name
        self.out = os.path.join(self.directory, "ids.npy")
        self.tokenizer = self.write("tokenizer.json", json.dumps(TOKENIZER).encode())

    def write(self, name, content):
        path = os.path.join(self.directory, name)
        with open(path, "wb") as file:
            file.write(content)
        return path

    def run_program(self, *argv, stdin=b""):
        stdout, stderr = io.StringIO(), io.StringIO()
        source = mock.Mock(buffer=io.BytesIO(stdin))
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr), mock.patch("sys.stdin", source):
            status = tokenize_text.main(["--tokenizer", self.tokenizer, "--out", self.out, *argv])
        return status, stdout.getvalue() + stderr.getvalue()

    def ids(self, *argv, **options):
        status, said = self.run_program(*argv, **options)
        self.assertEqual(status, 0, said)
        ids = np.load(self.out, allow_pickle=False)
        self.assertEqual((ids.dtype, ids.ndim), (np.int32, 1))
        self.assertIn(f"ids.npy: {ids.size} tokens of ", said)
        return ids.tolist()

    def refused(self, *argv):
        status, said = self.run_program(*argv)
        self.assertEqual((status, said.count("\n")), (2, 1), said)
        self.assertTrue(said.startswith("tokenize_text.py: "), said)
        self.assertFalse(os.path.exists(self.out))
        return said

    @unittest.skipUnless(HAS_TOKENIZERS, "needs tokenizers")
    def test_texts_stand_one_behind_the_other(self):
        a, b = self.write("a.txt", b"abc"), self.write("b.txt", b"ba")
        self.assertEqual(self.ids(a, b), [8, 2, 1, 0])
        self.assertEqual(self.ids(a, b, "--append-eos"), [8, 2, 9, 1, 0, 9])
        self.assertEqual(self.ids(a, "--append-eos", "--eos", "h"), [8, 2, 7])
        self.assertEqual(self.ids("-", b, stdin=b"dd"), [3, 3, 1, 0])
        self.assertEqual(self.ids("--literal", "cab", "h"), [2, 8, 7])
        self.assertEqual(self.ids("--literal", "a<|endoftext|>b"), [0, 9, 1])
        self.assertEqual([name for name in os.listdir(self.directory) if name.endswith(".tmp")], [])

    @unittest.skipUnless(HAS_TOKENIZERS, "needs tokenizers")
    def test_what_a_file_stores_of_an_earlier_call_is_not_used(self):
        text = self.write("a.txt", b"abc" * 9)
        expected = self.ids(text)
        truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
        padding = {"strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
        padding |= {"pad_type_id": 0, "pad_token": "<|endoftext|>"}
        self.write("tokenizer.json", json.dumps(TOKENIZER | {"truncation": truncation, "padding": padding}).encode())
        self.assertEqual(self.ids(text), expected)

    @unittest.skipUnless(HAS_TOKENIZERS, "needs tokenizers")
    def test_input_that_is_refused(self):
        text = self.write("a.txt", b"abc")
        self.assertIn("absent: No such file or directory", self.refused(os.path.join(self.directory, "absent")))
        said = self.refused(self.write("latin.txt", b"ab\xe9"))
        self.assertIn("latin.txt: expected UTF-8, got the byte 0xe9 at 2", said)
        self.assertIn("expected at least one token", self.refused(self.write("empty.txt", b"")))
        self.assertIn("expected the token '</s>' for --append-eos", self.refused(text, "--append-eos", "--eos", "</s>"))
        for content in (b"{", b"{}", b"\xff"):
            self.write("tokenizer.json", content)
            self.assertIn("tokenizer.json: expected a tokenizer.json, got ", self.refused(text))
        os.unlink(self.tokenizer)
        self.assertIn("tokenizer.json: No such file or directory", self.refused(text))

    def test_a_token_file_is_read_or_refused(self):
        path = self.out
        tokenize_text.write_ids(path, np.array([8, 0, 3], np.int32))
        ids = tokenize_text.read_ids(path, 9)
        self.assertEqual((ids.dtype, ids.tolist()), (np.int64, [8, 0, 3]))
        for content, part in (
            (np.zeros((2, 3), np.int32), "a row of at least 2 integers, got shape (2, 3)"),
            (np.zeros(3), "of float64"),
            (np.array([1]), "got shape (1,)"),
            (np.array([1, 9]), "expected ids of 0 to 8, got 1 to 9"),
            (np.array([-1, 8]), "expected ids of 0 to 8, got -1 to 8"),
        ):
            np.save(path, content)
            with self.assertRaises(tokenize_text.Refusal) as refusal:
                tokenize_text.read_ids(path, 9)
            self.assertIn(part, str(refusal.exception))
        # What zipfile and tokenize make of a file's first bytes is one line, too.
        deep = b"{'descr': '<i4', 'fortran_order': False, 'shape': " + b"(" * 4000
        for content in (b"no array", b"PK\x03\x04", b"\x93NUMPY\x01\x00" + len(deep).to_bytes(2, "little") + deep, b""):
            with self.assertRaises(tokenize_text.Refusal) as refusal:
                tokenize_text.read_ids(self.write("text.npy", content), 9)
            self.assertIn("text.npy: expected a .npy file of token ids", str(refusal.exception))
            self.assertNotIn("\n", str(refusal.exception))
        np.savez(os.path.join(self.directory, "several.npz"), a=np.zeros(3, np.int32))
        with self.assertRaisesRegex(tokenize_text.Refusal, "got several arrays"):
            tokenize_text.read_ids(os.path.join(self.directory, "several.npz"), 9)
        np.save(path, np.array([1, 2, 9], np.int32))
        self.assertEqual(tokenize_text.read_ids(path, 9, 2).tolist(), [1, 2])
        with self.assertRaises(tokenize_text.Refusal) as refusal:
            tokenize_text.read_ids(os.path.join(self.directory, "none.npy"), 9)
        self.assertIn("No such file", str(refusal.exception))

    def test_command_line(self):
        for argv, words in [
            ([], "the following arguments are required: TEXT"),
            (["a", "--eos", "x"], "--eos needs --append-eos"),
            (["a", "--out", "ids.txt"], "--out must end in .npy, got 'ids.txt'"),
            (["a", "--out", f"{self.directory}/absent/x.npy"], "absent: no such directory"),
            (["-", "-"], "standard input can be read once"),
        ]:
            with self.subTest(argv=argv):
                self.assertIn(words, self.refused(*argv))


if __name__ == "__main__":
    unittest.main()
