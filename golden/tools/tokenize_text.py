#!/usr/bin/env python3
"""Turns texts into token ids with a model's tokenizer, into one int32 array of numpy's .npy format.

The ids of all texts stand one behind the other. The tokenizer adds no tokens of its own to a text.

Needs numpy and tokenizers.
"""

import sys
import warnings

from console import Parser, Refusal, require, require_numpy

NAME = "tokenize_text.py"
require_numpy(NAME)

import numpy as np

from golden_file import atomic, check_writable

EXAMPLES = """
examples
  text files, an end of text behind each:
    tokenize_text.py --tokenizer model/tokenizer.json a.txt b.txt --append-eos --out tokens.npy
  a prompt:
    tokenize_text.py --tokenizer model/tokenizer.json --literal "def main():" --out prompt.npy
  standard input:
    sort words.txt | tokenize_text.py --tokenizer model/tokenizer.json - --out words.npy
Exit status: 0 when the file is written, 2 when the arguments or the input are refused.
"""


def load_tokenizer(path):
    """The tokenizer of a tokenizer.json, which neither cuts nor pads: a file may store both from an earlier call."""
    from tokenizers import Tokenizer

    try:
        with open(path, encoding="utf-8") as file:
            tokenizer = Tokenizer.from_str(file.read())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}") from None
    # The package raises nothing more special.
    except Exception as error:
        raise Refusal(f"{path}: expected a tokenizer.json, got {' '.join(str(error).split())}") from None


def read_text(path):
    """A UTF-8 text file's content, that of standard input for "-"."""
    try:
        if path == "-":
            return sys.stdin.buffer.read().decode()
        with open(path, "rb") as file:
            return file.read().decode()
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Refusal(
            f"{path}: expected UTF-8, got the byte {error.object[error.start]:#04x} at {error.start}"
        ) from None


def encode(tokenizer, texts, eos=None):
    """The ids of the texts (int32), each followed by the id `eos` where there is one."""
    ids = []
    for text in texts:
        ids += tokenizer.encode(text, add_special_tokens=False).ids
        if eos is not None:
            ids.append(eos)
    return np.array(ids, np.int32)


def write_ids(path, ids):
    """Writes ids as .npy, atomically."""
    with atomic(path) as temporary, open(temporary, "wb") as file:
        np.save(file, ids, allow_pickle=False)


def read_ids(path, vocab_size, limit=None):
    """The first ids of a token file: one row of at least 2 integers below vocab_size, as int64."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of headers that numpy takes and we refuse
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror or error}") from None
    # numpy does not catch what zipfile, tokenize and others raise.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise Refusal(f"{path}: expected a .npy file of token ids: {reason}") from None
    if not isinstance(ids, np.ndarray):
        raise Refusal(f"{path}: expected a .npy file of token ids, got several arrays")
    if ids.dtype.kind not in "iu" or ids.ndim != 1 or len(ids) < 2:
        raise Refusal(f"{path}: expected a row of at least 2 integers, got shape {ids.shape} of {ids.dtype}")
    ids = ids[:limit]
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise Refusal(f"{path}: expected ids of 0 to {vocab_size - 1}, got {ids.min()} to {ids.max()}")
    return ids.astype(np.int64)


def parse_arguments(argv):
    parser = Parser(prog=NAME, description=__doc__, epilog=EXAMPLES)
    parser.add_argument("texts", metavar="TEXT", nargs="+", help="a UTF-8 text file, or - for standard input")
    parser.add_argument("--tokenizer", metavar="FILE", required=True, help="the model's tokenizer.json")
    parser.add_argument("--out", metavar="FILE", required=True, help="the .npy file to write")
    parser.add_argument("--literal", action="store_true", help="each TEXT is a text itself, not a file's name")
    parser.add_argument("--append-eos", action="store_true", help="put the end of text behind each text")
    parser.add_argument("--eos", metavar="TOKEN", help="the end of text, with --append-eos (default <|endoftext|>)")
    args = parser.parse_args(argv)
    if args.eos is not None and not args.append_eos:
        raise Refusal("--eos needs --append-eos")
    if not args.out.endswith(".npy"):
        raise Refusal(f"--out must end in .npy, got {args.out!r}")
    if not args.literal and args.texts.count("-") > 1:
        raise Refusal("standard input can be read once, got - twice")
    return args


def run(args):
    check_writable(args.out)
    require("tokenizers")
    tokenizer = load_tokenizer(args.tokenizer)
    eos = None
    if args.append_eos:
        token = args.eos or "<|endoftext|>"
        eos = tokenizer.token_to_id(token)
        if eos is None:
            raise Refusal(
                f"{args.tokenizer}: expected the token {token!r} for --append-eos, got a tokenizer without it"
            )
    ids = encode(tokenizer, args.texts if args.literal else [read_text(path) for path in args.texts], eos)
    if ids.size == 0:
        raise Refusal("expected at least one token, got texts without any")
    write_ids(args.out, ids)
    count = len(args.texts)
    print(f"{args.out}: {ids.size} tokens of {count} text{'' if count == 1 else 's'}, ids up to {ids.max()}")


def main(argv):
    try:
        run(parse_arguments(argv))
    except Refusal as refusal:
        print(f"{NAME}: {refusal}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
