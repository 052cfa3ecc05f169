"""Writes golden files, in the schema of golden_file.hpp, and other files that must be whole or absent."""

import contextlib
import os
import re
import struct
import tempfile

import h5py

import procedural
from neox import Refusal

SCHEMA_VERSION = 1
SEAL_BYTES = 512


def seal(path):
    """Fills in the user block: see golden_file.hpp."""
    with open(path, "r+b") as file:
        file.seek(SEAL_BYTES)
        body = file.read()
        file.seek(0)
        file.write(struct.pack("<8sQQ", b"cfgolden", len(body), procedural.checksum(body)))
        file.flush()
        os.fsync(file.fileno())


def check_writable(path):
    """Refuses a path that could not be written, before the work is done."""
    directory = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise Refusal(f"{path}: is a directory, expected a file")
    if not os.path.isdir(directory):
        raise Refusal(f"{directory}: no such directory")
    if not os.access(directory, os.W_OK):
        raise Refusal(f"{directory}: not writable")


@contextlib.contextmanager
def atomic(path):
    """Gives a temporary path beside `path` and renames it when the block ends well: a reader finds the old file, the
    new one or none. On any failure the temporary file is removed."""
    try:
        handle, temporary = tempfile.mkstemp(
            prefix=f".{os.path.basename(path)}.", suffix=".tmp", dir=os.path.dirname(path) or "."
        )
        os.close(handle)
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}") from None
    try:
        yield temporary
        os.chmod(temporary, 0o666 & ~current_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise Refusal(f"{path}: {reason(error)}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def reason(error):
    """What the system says of an OSError: HDF5 hides it in a text of several lines."""
    hidden = re.search("error message = '([^']*)'", str(error))
    return hidden.group(1) if hidden else (error.strerror or str(error)).partition("\n")[0]


def write_text(path, text):
    """Writes a text file atomically."""
    with atomic(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text)


def write_golden(path, attributes, groups, variants):
    """Writes a golden file atomically.

    groups: "inputs" and "weights" -> {name: (array, dtype name)}; variants: name -> (attributes, {tap: array}, dtype).
    """

    def put(group, name, array, dtype):
        group[name] = array
        if dtype == "bfloat16":
            group[name].attrs["dtype"] = dtype

    with atomic(path) as temporary:
        with h5py.File(temporary, "w", libver=("earliest", "v110"), userblock_size=SEAL_BYTES) as file:
            for name, value in attributes.items():
                file.attrs[name] = value
            for group_name, arrays in groups.items():
                group = file.create_group(group_name)
                for name, (array, dtype) in arrays.items():
                    put(group, name, array, dtype)
            for variant, (about, taps, dtype) in variants.items():
                group = file.create_group(f"taps/{variant}")
                group.attrs.update(about)
                for name, array in taps.items():
                    put(group, name, array, dtype)
        seal(temporary)


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_sealed(path):
    """A golden file whose seal holds, opened by h5py."""
    with open(path, "rb") as file:
        magic, length, checksum = struct.unpack("<8sQQ", file.read(24))
        file.seek(SEAL_BYTES)
        body = file.read()
    if magic != b"cfgolden" or length != len(body) or checksum != procedural.checksum(body):
        raise Refusal(f"{path}: the seal does not fit the content")
    return h5py.File(path, "r")
