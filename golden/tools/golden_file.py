"""Golden files in the schemas of golden_file.hpp and model_golden.hpp, and atomic writes of files."""

import contextlib
import json
import os
import re
import shutil
import signal
import struct
import tempfile

import numpy as np

import procedural
from console import Refusal

SCHEMA, SCHEMA_VERSION = "cf-golden", 2
MODEL_SCHEMA, MODEL_SCHEMA_VERSION = "cf-golden-model", 1
SEAL_BYTES = 512
MAX_TEXT_BYTES = 65000  # an object header has no room for more
MOST_CPU_SECONDS = 0.25  # that the structure of a file may take; the largest takes a tenth


def seal(path):
    """Fills in the seal in the first 512 bytes (golden_file.hpp)."""
    with open(path, "r+b") as file:
        file.seek(SEAL_BYTES)
        body = file.read()
        file.seek(0)
        file.write(struct.pack("<8sQQ", b"cfgolden", len(body), procedural.checksum(body)))
        file.flush()
        os.fsync(file.fileno())


def check_writable(path):
    """Refuses a path that cannot be written. Programs call this before they compute."""
    directory = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise Refusal(f"{path}: is a directory, expected a file")
    if not os.path.isdir(directory):
        raise Refusal(f"{directory}: no such directory")
    if not os.access(directory, os.W_OK):
        raise Refusal(f"{directory}: not writable")


@contextlib.contextmanager
def atomic(path):
    """Gives a temporary path in the directory of `path`, and renames it to `path` after the block. A reader finds the
    old file, the new file or none. A file that is replaced keeps its mode. On a failure the temporary file is removed.
    """
    try:
        handle, temporary = tempfile.mkstemp(prefix=".cf-", suffix=".tmp", dir=os.path.dirname(path) or ".")
        os.close(handle)
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}") from None
    try:
        yield temporary
        kept = os.stat(path).st_mode & 0o7777 if os.path.isfile(path) else 0o666 & ~current_umask()
        os.chmod(temporary, kept)
        os.replace(temporary, path)
    except OSError as error:
        raise Refusal(f"{path}: {reason(error)}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


@contextlib.contextmanager
def new_directory(path):
    """Gives a temporary directory beside `path`, which must not be there, and renames it to `path` after the block. On
    a failure the temporary directory is removed."""
    path = os.path.abspath(path)
    if os.path.lexists(path):
        raise Refusal(f"{path}: is there already")
    check_writable(path)
    temporary = tempfile.mkdtemp(prefix=f".{os.path.basename(path)}.", suffix=".tmp", dir=os.path.dirname(path))
    try:
        yield temporary
        os.chmod(temporary, 0o777 & ~current_umask())
        os.rename(temporary, path)
    except OSError as error:
        raise Refusal(f"{path}: {reason(error)}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def reason(error):
    """The system's message of an OSError. HDF5 puts it into a text of several lines."""
    hidden = re.search("error message = '([^']*)'", str(error))
    return hidden.group(1) if hidden else (error.strerror or str(error)).partition("\n")[0]


def write_text(path, text):
    """Writes a text file atomically."""
    with atomic(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text)


def write_json(path, content):
    """Writes a JSON file, for a directory that is not at its final name yet."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")


def write_golden(path, attributes, groups, variants, about=None):
    """Writes a golden file atomically.

    groups: a group, "" for the root -> {name: (array, dtype name)}; variants: name -> (attributes, {tap: array}, dtype
    name); about: the path of an object that is not a variant's -> its attributes.
    """
    import h5py

    def put_attributes(target, values):
        for name, value in values.items():
            if isinstance(value, str):
                data = value.encode()
                if len(data) > MAX_TEXT_BYTES or b"\0" in data:
                    raise Refusal(
                        f"{path}: attribute '{name}': expected at most {MAX_TEXT_BYTES} bytes without zero bytes, "
                        f"got {len(data)} bytes"
                    )
                # A fixed length: libhdf5 crashes on damaged strings of variable length. HDF5 has no empty type.
                value = np.array(data, h5py.string_dtype("utf-8", max(len(data), 1)))
            target.attrs[name] = value

    def put(group, name, array, dtype):
        group[name] = array
        if dtype == "bfloat16":
            put_attributes(group[name], {"dtype": dtype})

    with atomic(path) as temporary:
        with h5py.File(temporary, "w", libver=("earliest", "v110"), userblock_size=SEAL_BYTES) as file:
            put_attributes(file, attributes)
            for group_name, arrays in groups.items():
                group = file.require_group(group_name or "/")
                for name, (array, dtype) in arrays.items():
                    put(group, name, array, dtype)
            for variant, (attributes_of_group, taps, dtype) in variants.items():
                group = file.create_group(f"taps/{variant}")
                put_attributes(group, attributes_of_group)
                for name, array in taps.items():
                    put(group, name, array, dtype)
            for name, values in (about or {}).items():
                put_attributes(file[name], values)
        seal(temporary)


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_sealed(path):
    """A golden file of any schema version, opened by h5py after a check of its seal and its structure."""
    import h5py

    try:
        size = os.path.getsize(path)
        if not os.path.isfile(path):
            raise Refusal(f"{path}: expected a regular file")
        with open(path, "rb") as file:
            magic, length, checksum = struct.unpack("<8sQQ", file.read(24).ljust(24, b"\0"))
        if magic != b"cfgolden":
            raise Refusal(f"{path}: no golden file: expected 'cfgolden' at its start")
        is_whole = length == size - SEAL_BYTES and length > 0
        if not is_whole or checksum != procedural.checksum(np.memmap(path, np.uint8, "r", SEAL_BYTES)):
            raise Refusal(f"{path}: damaged: the seal does not fit the content")
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}") from None
    # A valid seal is no promise, and on some content libhdf5 crashes or never ends. A process of its own tries it.
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, MOST_CPU_SECONDS)
            with h5py.File(path, "r") as file:
                os._exit(0 if is_sound(file, size) else 1)
        finally:
            os._exit(1)
    if os.waitpid(child, 0)[1] != 0:
        raise Refusal(f"{path}: expected the HDF5 of golden files; 'cf-golden info' says what is wrong")
    return h5py.File(path, "r")


def is_sound(file, size):
    """Whether an open file of so many bytes has hard links to groups and contiguous datasets alone, and one text or
    number an attribute, and asks for no more memory than its own bytes, whatever its objects share."""
    import h5py

    left = size
    objects = [file]
    while objects:
        target = objects.pop()
        for name in target.attrs:
            if target.attrs.get_id(name).shape != ():
                return False
            value = target.attrs[name]
            left -= len(value) if isinstance(value, (bytes, str)) else value.nbytes
        if isinstance(target, h5py.Dataset):
            layout = target.id.get_create_plist()
            if layout.get_layout() != h5py.h5d.CONTIGUOUS or layout.get_external_count():
                return False
            left -= target.nbytes
        else:
            left -= len(target)
            if not all(isinstance(target.get(name, getlink=True), h5py.HardLink) for name in target):
                return False
            objects += [target[name] for name in target]
        if left < 0:
            return False
    return True


def attributes_of(target):
    """The attributes of a file, group or dataset. Strings are str, of whatever length they are stored."""
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in target.attrs.items()}
