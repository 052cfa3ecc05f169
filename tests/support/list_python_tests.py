"""list_python_tests.py FILE: one line "Class.test" for each unittest test of the file. CMake makes a CTest entry of
each line."""

import os
import sys
import unittest


def names(suite):
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from names(item)
        else:
            yield ".".join(item.id().split(".")[-2:])


folder, file = os.path.split(os.path.abspath(sys.argv[1]))
sys.path.insert(0, folder)
found = list(names(unittest.defaultTestLoader.loadTestsFromName(os.path.splitext(file)[0])))
if not found or any(name.startswith("_FailedTest.") for name in found):
    sys.exit(f"{sys.argv[1]}: no tests could be loaded from it")
print("\n".join(found))
