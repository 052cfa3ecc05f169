#!/usr/bin/env python3
"""Rewrites golden files in the current schema, in place, and compares golden files.

A file is rewritten only if its copy holds the same groups, attributes and datasets: every tensor bit for bit, and every
attribute but schema_version. A file of the current schema is left alone.

Needs numpy and h5py.
"""

import os
import sys

from console import Parser, Refusal, progress, require, require_numpy

NAME = "convert_golden.py"
require_numpy(NAME)

import numpy as np

from golden_file import SCHEMA, SCHEMA_VERSION, atomic, attributes_of, read_sealed, write_golden

EXAMPLES = """
examples
  rewrite files:
    convert_golden.py data/golden/*.h5
  compare the files of one directory with those of the same names in another:
    convert_golden.py --compare old data/golden/*.h5
Exit status: 0 when all files are rewritten or the same, 1 when a comparison finds a difference, 2 when the arguments or
a file are refused.
"""


def objects(file):
    """Path -> object of all groups and datasets, the root as ''."""
    found = {"": file}
    file.visititems(found.__setitem__)
    return found


def difference(a, b):
    """The first difference of two open golden files, or ''. Strings are compared as text, tensors by their bytes;
    schema_version is not compared."""
    a, b = objects(a), objects(b)
    if a.keys() != b.keys():
        return f"/{min(a.keys() ^ b.keys())}: in one file only"
    for path, x in a.items():
        y = b[path]
        of_x, of_y = attributes_of(x), attributes_of(y)
        for attributes in (of_x, of_y):
            if path == "":
                attributes.pop("schema_version", None)
        if of_x != of_y or any(type(of_x[name]) is not type(of_y[name]) for name in of_x):
            names = [name for name in of_x.keys() | of_y.keys() if of_x.get(name) != of_y.get(name)]
            return f"/{path}: attribute {min(names) if names else 'of another type'}"
        if hasattr(x, "dtype") != hasattr(y, "dtype"):
            return f"/{path}: a dataset in one file only"
        if hasattr(x, "dtype"):
            if (x.dtype, x.shape) != (y.dtype, y.shape):
                return f"/{path}: {x.dtype} {x.shape} and {y.dtype} {y.shape}"
            if x[()].tobytes() != y[()].tobytes():
                return f"/{path}: other bytes"
    return ""


def convert(path):
    """Rewrites one file. Returns whether it had an older schema."""
    with read_sealed(path) as file:
        attributes = attributes_of(file)
        if attributes.get("schema") != SCHEMA:
            raise Refusal(f"{path}: schema must be {SCHEMA}, got {attributes.get('schema')!r}")
        version = int(attributes.get("schema_version", 0))
        if not 1 <= version <= SCHEMA_VERSION:
            raise Refusal(f"{path}: schema_version must be 1 to {SCHEMA_VERSION}, got {version}")
        if version == SCHEMA_VERSION:
            return False

        def content(dataset):
            return dataset[()], attributes_of(dataset).get("dtype")

        attributes["schema_version"] = np.int64(SCHEMA_VERSION)
        groups = {
            name: {key: content(dataset) for key, dataset in file[name].items()}
            for name in ("inputs", "weights")
            if name in file
        }
        variants = {}
        for name, group in file["taps"].items():
            about = attributes_of(group)
            variants[name] = about, {tap: dataset[()] for tap, dataset in group.items()}, about["dtype"]
        with atomic(path) as temporary:
            write_golden(temporary, attributes, groups, variants)
            with read_sealed(temporary) as copy:
                if fault := difference(file, copy):
                    raise Refusal(f"{path}: cannot be converted without a loss: {fault}")
    return True


def parse_arguments(argv):
    parser = Parser(prog=NAME, description=__doc__, epilog=EXAMPLES)
    parser.add_argument("files", metavar="FILE", nargs="+", help="golden files")
    parser.add_argument(
        "--compare", metavar="DIR", help="compare each FILE with the file of its name in DIR, and write nothing"
    )
    return parser.parse_args(argv)


def main(argv):
    try:
        args = parse_arguments(argv)
        require("h5py")
        differences = converted = 0
        for path in args.files:
            progress(path)
            try:
                if args.compare:
                    with read_sealed(path) as a, read_sealed(os.path.join(args.compare, os.path.basename(path))) as b:
                        if fault := difference(a, b):
                            progress("")
                            print(f"{path}: {fault}")
                            differences += 1
                else:
                    converted += convert(path)
            except Refusal:
                raise
            except Exception as error:  # of h5py or numpy: a valid seal may cover what they do not read
                reason = " ".join(str(error).split()) or type(error).__name__
                raise Refusal(f"{path}: expected the schema's content: {reason}") from None
        progress("")
        if args.compare:
            print(f"{len(args.files)} files compared, {differences} differ")
        else:
            print(f"{converted} of {len(args.files)} files rewritten in schema {SCHEMA_VERSION}")
        return 1 if differences else 0
    except Refusal as refusal:
        progress("")
        print(f"{NAME}: {refusal}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
