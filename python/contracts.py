#!/usr/bin/env python3
"""Writes what the ops' contracts say of themselves as JSON, which the package makes its docstrings from.

For each op: ``comment``, the ``///`` comment above the op's struct, and ``arguments``, the members of its Args that
have a trailing comment, as [names, comment]. A struct of tensors without a comment stands for its own members.

    contracts.py ROOT OUT
"""

import json
import re
import sys
from pathlib import Path

STRUCT = re.compile(r"^(?P<indent> *)struct (?P<name>\w+)[^;]*{$")
MEMBER = re.compile(r"^ +(?P<type>[\w:]+(?:<[^>]*>)?) (?P<names>\w+(?:{}| =|,)[^;]*);(?: +// *(?P<comment>.*))?$")
NAME = re.compile(r'static constexpr std::string_view name = "(\w+)";')
# Whose structs of tensors an op's Args may hold.
GROUPS = ("core/model/layer.hpp",)


def comment_above(lines: list[str], index: int) -> str:
    """The ``///`` comment that ends above a line."""
    first = index
    while first > 0 and lines[first - 1].lstrip().startswith("///"):
        first -= 1
    return "\n".join(re.sub(r"^ */// ?", "", line) for line in lines[first:index])


def block(lines: list[str], index: int, indent: str) -> list[str]:
    """The lines of a struct that begins at a line."""
    end = lines.index(f"{indent}}};", index)
    return lines[index + 1 : end]


def members(lines: list[str]) -> list[tuple[str, str, str]]:
    """The (type, names, comment) of a struct's members."""
    found = []
    for line in lines:
        match = MEMBER.match(line)
        if match:
            names = ", ".join(re.findall(r"(\w+)(?:{}| = [^,]+)(?:, |$)", match["names"]))
            found.append((match["type"], names, (match["comment"] or "").strip()))
    return found


def structs(lines: list[str]) -> dict[str, tuple[str, list[str]]]:
    """A struct's name -> the comment above it and its lines."""
    found = {}
    for index, line in enumerate(lines):
        match = STRUCT.match(line)
        if match:
            found[match["name"]] = comment_above(lines, index), block(lines, index, match["indent"])
    return found


def contracts(root: Path) -> dict[str, dict[str, object]]:
    groups = {}
    for path in GROUPS:
        groups |= structs((root / path).read_text(encoding="utf-8").splitlines())
    found = {}
    for path in sorted((root / "core/ops").glob("*.hpp")):
        for comment, lines in structs(path.read_text(encoding="utf-8").splitlines()).values():
            name = NAME.search("\n".join(lines))
            if not name:
                continue
            _, args = structs(lines)["Args"]
            arguments = []
            for kind, names, shape in members(args):
                group = groups.get(kind)
                parts = members(group[1]) if group and not shape else [(kind, names, shape)]
                arguments += [[part, text] for _, part, text in parts if text]
            found[name[1]] = {"comment": comment, "arguments": arguments}
    return found


def main() -> None:
    root, out = sys.argv[1:]
    Path(out).write_text(json.dumps(contracts(Path(root)), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
