#!/usr/bin/env python3
"""Links between the project's pages lead somewhere, a map of a folder names each of its files, and the recorded figures
of a GPU are of one run."""

import os
import re
import sys
import unittest

ROOT = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir))
sys.path.insert(0, os.path.join(ROOT, "apps"))

import bench_page

TRIALS = "data/bench/TRIALS.md"
MAPS = ("cuda/ops/linear", "cuda/persistent")
# The commits of records from before one run made all of them. They may stand together until a run replaces them all.
EARLIER = "8196172 819d395 8cf7f98 8f1ddd4 c5519b7".split()


def pages():
    """The paths of the project's Markdown files."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name != "build" and not name.startswith(".")]
        yield from (os.path.join(folder, name) for name in files if name.endswith(".md"))


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


class Pages(unittest.TestCase):
    def test_links_lead_somewhere(self):
        found = list(pages())
        self.assertIn(os.path.join(ROOT, "README.md"), found)
        for page in found:
            for path, anchor in re.findall(r"\]\(([^)\s:#]*)(?:#([^)\s]+))?\)", read(page)):
                target = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
                where = f"{os.path.relpath(page, ROOT)}: {path}#{anchor}"
                self.assertTrue(os.path.exists(target), where)
                if anchor:
                    self.assertIn(anchor, anchors(read(target)), where)

    def test_records_that_comments_cite_are_there(self):
        cited = 0
        for top in ("core", "cpu_ref", "cuda"):
            for folder, _, files in os.walk(os.path.join(ROOT, top)):
                for name in (name for name in files if re.search(r"\.(hpp|cpp|cuh|cu|py|md)$", name)):
                    path = os.path.join(folder, name)
                    text = re.sub(r"\s*\n\s*(//+)?\s*", " ", read(path))
                    for record in re.findall(r"\bdata/bench/([\w.-]+\.(?:json|svg|md))", text):
                        self.assertTrue(os.path.exists(os.path.join(ROOT, "data", "bench", record)), (path, record))
                        cited += 1
                    for section in re.findall(r"\bTRIALS\.md, ([\w-]+)", text):
                        self.assertIn(section, anchors(read(os.path.join(ROOT, TRIALS))), path)
                        cited += 1
        self.assertGreater(cited, 10)

    def test_a_map_names_each_file(self):
        for folder in MAPS:
            text = read(os.path.join(ROOT, folder, "README.md"))
            for below, _, names in os.walk(os.path.join(ROOT, folder)):
                for name in names:
                    path = os.path.relpath(os.path.join(below, name), os.path.join(ROOT, folder))
                    if path != "README.md":
                        self.assertRegex(text, rf"[`(]{re.escape(path)}[`)]", folder)
            named = re.findall(r"`([\w/]+\.(?:cpp|hpp|cu|cuh|def))`", text.partition("| file | what |")[2])
            self.assertEqual([n for n in named if not os.path.exists(os.path.join(ROOT, folder, n))], [], folder)

    def test_records_are_of_one_commit_and_one_gpu(self):
        figures = bench_page.Figures(os.path.join(ROOT, "data", "bench"))
        commits = {commit[:7] for _, commit in figures.runs().values()}
        if not commits <= set(EARLIER):
            bench_page.refuse_mixed(figures)
        self.assertGreater(len(figures.names), 50)

    def test_records_have_no_paths_of_the_machine_that_made_them(self):
        folder = os.path.join(ROOT, "data", "bench")
        for name in (name for name in os.listdir(folder) if name.endswith(".json")):
            path = re.search(r"[\s,\"](/(?:home|opt|root|tmp|usr|var|work)/\S{,40})", read(os.path.join(folder, name)))
            self.assertIsNone(path and path[1], name)

    def test_the_glossary_is_short(self):
        text = read(os.path.join(ROOT, "CONTRIBUTING.md"))
        rows = re.search(r"^\| word \| meaning \|\n\|---\|---\|\n((?:\|.*\n)+)", text, re.MULTILINE).group(1)
        self.assertLessEqual(len(rows.splitlines()), 25)

    def test_the_note_for_who_updates_is_short(self):
        text = read(os.path.join(ROOT, "CHANGELOG.md"))
        for note in re.findall(r"^The installed API changes\. From [\d.]+:\n\n((?:.+\n)+)", text, re.MULTILINE):
            self.assertLessEqual(len(note.splitlines()), 15)
        self.assertIn("The installed API changes. From", text)

    def test_anchors_are_those_of_headings(self):
        self.assertEqual(anchors("# A b\n```sh\n# no\n```\n## The layer's end, two\n"), {"a-b", "the-layers-end-two"})


if __name__ == "__main__":
    unittest.main()
