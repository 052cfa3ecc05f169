"""Loads the compiled part, and OpenMP with it, so that threads spin for microseconds while they wait for each other.

They sleep then. By default they spin for milliseconds: on a machine with other work a waiting thread then takes the time that the one it
waits for needs. OpenMP reads the environment once, when it is loaded. Where that says how threads wait, nothing changes.
Where another package, such as torch, has loaded OpenMP before, threads spin for microseconds, torch's too.
"""

import os
import re

_LOADED = re.compile(r"/libgomp\.so\.1(\.0\.0)?$", re.M)


def _is_loaded() -> bool:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            return _LOADED.search(maps.read()) is not None
    except OSError:
        return False


# The second and third are those of GCC's and of LLVM's OpenMP.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & set(os.environ):
    _was_loaded = _is_loaded()
    os.environ["GOMP_SPINCOUNT"] = "1000"
    try:
        from cf_ops import _core
    finally:
        del os.environ["GOMP_SPINCOUNT"]
    if _was_loaded:
        _core.shorten_spins()
