#!/usr/bin/env python3
"""Which room may include which. A room is a folder, or a file by its name without an extension; a file belongs to the
longest room that its path starts with. ROOMS is the one list of the arrows."""

import os
import re
import tempfile
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir)

# room: the rooms that its files may include beside their own. "core/*" is core and every room below it.
OP_FAMILY = ["core/*", "cuda/tuning", "cuda/runtime", "cuda/device", "cuda/ops"]
PRODUCT = [*OP_FAMILY, "cuda/ops/linear/output", "cuda/ops/linear/pack"]
ROOMS = {
    "core": [],
    "core/ops": ["core"],
    # What a family of models is.
    "core/families": ["core", "core/ops"],
    "core/model": ["core", "core/ops", "core/families"],
    # Processes that share a model: where they meet, and what they exchange.
    "core/ranks": ["core"],
    # The op that is the walk of a layer, and the list that has it too.
    "core/ops/decode_layer": ["core", "core/ops", "core/families", "core/model"],
    "core/ops/all": ["core/ops", "core/ops/decode_layer"],
    # Calls of each op for tests and benchmarks.
    "core/model/examples": ["core", "core/ops", "core/ops/all", "core/model"],
    # The walk as a list of calls.
    "core/model/program": ["core", "core/ops", "core/ops/all", "core/ops/decode_layer", "core/model"],
    "core/model/passes": ["core", "core/ops", "core/ops/all", "core/model", "core/model/program"],
    # Tensors of a model by their names.
    "core/procedural": ["core", "core/ops", "core/families", "core/model"],
    "cpu_ref": ["core/*", "cpu_ref/simd"],
    "cpu_ref/simd": ["core/*"],
    "cpu_ref/ops": ["core/*", "cpu_ref", "cpu_ref/simd"],
    # A whole model, which runs ops.
    "cpu_ref/model": ["core/*", "cpu_ref", "cpu_ref/ops"],
    "cuda/tuning": ["core/*"],
    "cuda/runtime": ["core/*", "cuda/tuning"],
    "cuda/device": ["core/*"],
    # What ranks that share a model know of each other.
    "cuda/comm": ["core/*", "cuda/runtime", "cuda/device"],
    "cuda/ops": ["core/*", "cuda/runtime"],
    # The list of all kernels.
    "cuda/ops/kernels": [*OP_FAMILY, "cuda/ops/ranks", "cuda/ops/attention", "cuda/ops/embedding", "cuda/ops/linear/*", "cuda/ops/norm",
                         "cuda/ops/rope", "cuda/ops/sample", "cuda/ops/ln_qkv", "cuda/ops/rms_linear"],
    "cuda/ops/no_kernels": [*OP_FAMILY, "cuda/ops/kernels"],
    "cuda/ops/attention": OP_FAMILY,
    "cuda/ops/embedding": OP_FAMILY,
    # What is done with a product's sums; a room a kernel of linear; and the choice among them.
    "cuda/ops/linear/output": OP_FAMILY,
    "cuda/ops/linear/pack": OP_FAMILY,
    "cuda/ops/linear/gemv": PRODUCT,
    "cuda/ops/linear/fp8": [*PRODUCT, "cuda/ops/linear/gemv"],
    "cuda/ops/linear/packed": PRODUCT,
    "cuda/ops/linear/cublaslt": [*PRODUCT, "cuda/ops/linear/packed"],
    "cuda/ops/linear/wgmma": [*PRODUCT, "cuda/ops/linear/packed"],
    "cuda/ops/linear/tiles": [*PRODUCT, "cuda/ops/linear/wgmma"],
    "cuda/ops/linear": [*OP_FAMILY, "cuda/ops/linear/*"],
    "cuda/ops/norm": OP_FAMILY,
    "cuda/ops/ranks": [*OP_FAMILY, "cuda/ops/sample", "cuda/comm"],
    "cuda/ops/rope": OP_FAMILY,
    "cuda/ops/sample": OP_FAMILY,
    "cuda/ops/ln_qkv": [*OP_FAMILY, "cuda/ops/linear/*", "cuda/ops/norm"],
    "cuda/ops/rms_linear": [*OP_FAMILY, "cuda/ops/linear/*", "cuda/ops/norm"],
    "cuda/persistent": ["core/*", "cuda/ops/*", "cuda/comm", "cuda/runtime", "cuda/device"],
    "cuda/step": ["core/*", "cuda/persistent", "cuda/ops/*", "cuda/runtime", "cuda/device"],
    "cuda/model": ["core/*", "cuda/step", "cuda/persistent", "cuda/ops/*", "cuda/runtime", "cuda/device"],
    # What users hold.
    "cuda/serve": ["core/*", "cuda/model", "cuda/step", "cuda/persistent", "cuda/ops/*", "cuda/comm", "cuda/runtime", "cuda/device"],
    # What the calls of ClusterFusion's port need and no model does.
    "cuda/port": ["core/*", "cuda/step", "cuda/ops/*", "cuda/runtime", "cuda/device"],
    # cuda.hpp
    "cuda": ["core/*", "cuda/*"],
    "golden/checkpoint": ["core/*"],
    "golden/file": ["core/*", "golden/checkpoint"],
    "apps/cli": ["core/*", "golden/*"],
    "apps/verify": ["core/*", "cpu_ref/*", "cuda/*", "golden/*", "apps/cli"],
    "apps/bench": ["core/*", "cpu_ref/*", "cuda/*", "golden/*", "apps/cli", "apps/verify"],
    # The commands of cf-model.
    "apps/model": ["core/*", "cpu_ref/*", "cuda/*", "golden/*", "apps/cli", "apps/verify", "apps/bench"],
    # A project of its own, which sees an installation's <cf/...> alone.
    "apps/example": [],
    "apps": ["core/*", "cpu_ref/*", "cuda/*", "golden/*", "apps/*"],
    "python": ["core/*", "cpu_ref/*", "cuda/*", "golden/*"],
    "tests": ["*"],
}

# The rooms that include a third party's headers; "/*" is as above.
THIRD_PARTY = {
    r"Eigen/": ["cpu_ref/*"],
    r"hdf5": ["golden/file", "tests"],
    r"nlohmann/": ["golden/checkpoint", "apps/*", "tests"],
    r"CLI/": ["apps/*"],
    r"fmt/": ["apps/*"],
    r"catch2/": ["tests"],
    r"(cuda|cooperative_groups|cublas|nvtx)": ["cuda/*", "apps/bench", "python", "tests"],
    r"(nanobind|pybind|Python)": ["python"],
}

SOURCE = re.compile(r"\.(hpp|cpp|cuh|cu|h|def|inc)$")
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')


def within(room, patterns):
    """Whether one of the patterns names the room."""
    return any(p in ("*", room) or (p.endswith("/*") and (room + "/").startswith(p[:-1])) for p in patterns)


def room_of(path):
    """The longest room that the path starts with; None where there is none. A folder other than tests' and python's
    has a room of its own."""
    stem = os.path.splitext(path)[0]
    found = [room for room in ROOMS if stem == room or path.startswith(room + "/")]
    room = max(found, key=len, default=None)
    free = room in ("tests", "python")
    return room if free or room in (stem, os.path.dirname(path)) else None


def sources(root):
    """The source files below the rooms' top folders, by their paths from the root."""
    for top in sorted({room.split("/")[0] for room in ROOMS}):
        for folder, _, names in os.walk(os.path.join(root, top)):
            for name in sorted(names):
                if SOURCE.search(name):
                    yield os.path.relpath(os.path.join(folder, name), root)


def faults(root):
    """One line for each include that ROOMS or THIRD_PARTY does not allow, and for each file without a room."""
    lines = []
    for path in sources(root):
        room = room_of(path)
        if room is None:
            lines.append(f"{path}: no room for {os.path.dirname(path)}, expected a line in ROOMS of {__file__}")
            continue
        with open(os.path.join(root, path), encoding="utf-8") as file:
            includes = [match.groups() for match in map(INCLUDE.match, file) if match]
        for quote, included in includes:
            if quote == "<":
                for prefix, rooms in THIRD_PARTY.items():
                    if re.match(prefix, included) and not within(room, rooms):
                        lines.append(f"{path} includes <{included}>: only {', '.join(rooms)} may")
                continue
            if not os.path.exists(os.path.join(root, included)):
                lines.append(f"{path} includes {included}: no such file, expected a path from the root")
                continue
            other = room_of(included)
            if other != room and not within(str(other), ROOMS[room]):
                lines.append(f"{path} includes {included}: {room} may include {', '.join([*ROOMS[room], room])}")
    return lines


def circle(rooms):
    """A circle of rooms that may include each other, as a list; empty where there is none."""
    done, path = set(), []

    def walk(room):
        if room in path:
            return path[path.index(room) :] + [room]
        if room in done:
            return []
        path.append(room)
        for other in rooms:
            if other != room and within(other, rooms[room]):
                if found := walk(other):
                    return found
        path.pop()
        done.add(room)
        return []

    return next((found for found in map(walk, rooms) if found), [])


class Includes(unittest.TestCase):
    def test_no_include_against_the_arrows(self):
        found = faults(ROOT)
        if found:
            self.fail("\n" + "\n".join(found))

    def test_the_tree_was_read(self):
        self.assertGreater(len(list(sources(ROOT))), 100)

    def test_no_circle_among_the_arrows(self):
        self.assertEqual(circle(ROOMS), [])
        self.assertEqual(circle({"a": ["b"], "b": ["c/*"], "c/d": ["a"]}), ["a", "b", "c/d", "a"])


class Finds(unittest.TestCase):
    """The checks themselves, on trees with one fault each."""

    def faults(self, files):
        with tempfile.TemporaryDirectory() as root:
            for path, text in files.items():
                os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
                with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                    file.write(text)
            return faults(root)

    def test_arrow_upward(self):
        found = self.faults({"cuda/device/x.cuh": '#include "cuda/ops/y.hpp"\n', "cuda/ops/y.hpp": ""})
        self.assertEqual(
            found, ["cuda/device/x.cuh includes cuda/ops/y.hpp: cuda/device may include core/*, cuda/device"]
        )

    def test_siblings(self):
        for a, b in (("cpu_ref", "golden/file"), ("golden/file", "cuda"), ("cuda/step", "cuda/model"),
                     ("cuda/persistent", "cuda/step"), ("cuda/ops/rope", "cuda/ops/norm")):  # fmt: skip
            found = self.faults({f"{a}/x.cpp": f'  #  include "{b}/y.hpp"\n', f"{b}/y.hpp": ""})
            self.assertEqual(len(found), 1, (a, b))

    def test_third_party(self):
        found = self.faults({"core/x.hpp": "#include <Eigen/Core>\n", "cpu_ref/ops/y.cpp": "#include <Eigen/Core>\n"})
        self.assertEqual(found, ["core/x.hpp includes <Eigen/Core>: only cpu_ref/* may"])

    def test_folder_without_a_room(self):
        found = self.faults({"cuda/new/x.cu": ""})
        self.assertEqual(len(found), 1)
        self.assertIn("no room for cuda/new", found[0])

    def test_relative_include(self):
        found = self.faults({"core/x.cpp": '#include "x.hpp"\n', "core/x.hpp": ""})
        self.assertEqual(found, ["core/x.cpp includes x.hpp: no such file, expected a path from the root"])

    def test_clean_tree(self):
        self.assertEqual(self.faults({"cuda/ops/rope/x.cu": '#include "core/y.hpp"\n', "core/y.hpp": ""}), [])


if __name__ == "__main__":
    unittest.main()
