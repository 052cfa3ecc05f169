"""Several GPUs for one model: what ``devices`` takes, and a model on two."""

from __future__ import annotations

from typing import Any

import pytest

import cf_ops
from cf_ops import _core
from cf_ops._device import gpu_numbers


def has_gpus(count: int) -> bool:
    try:
        _core.check_cuda_device(count - 1)
    except (NotImplementedError, _core.CfError):
        return False
    return True


def test_devices_are_the_numbers_of_gpus() -> None:
    assert gpu_numbers("cpu", None) == []
    assert gpu_numbers("cpu", (3, 1)) == [3, 1]


@pytest.mark.parametrize(
    "device, devices, error, message",
    [
        ("cpu", "0,1", TypeError, r"devices: expected the numbers of GPUs, such as \[0, 1\], got '0,1'"),
        ("cpu", 2, TypeError, r"devices: expected the numbers of GPUs"),
        ("cpu", [0, 0.5], TypeError, r"devices: expected an integer, got 0.5"),
        ("cpu", [0, -1], ValueError, r"devices: expected 0 to 9999, got -1"),
        ("cpu", [], ValueError, r"devices: expected different GPUs, such as \[0, 1\], got \[\]"),
        ("cpu", [1, 1], ValueError, r"devices: expected different GPUs, such as \[0, 1\], got \[1, 1\]"),
        ("cuda:1", [0, 1], ValueError, r"device: expected none beside devices, got 'cuda:1'"),
    ],
)
def test_other_devices_are_refused(device: str, devices: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cf_ops.load("pythia-14m", device=device, devices=devices)


@pytest.mark.skipif(not has_gpus(2), reason="there are no two GPUs that this build has kernels for")
def test_two_gpus_make_the_logits_of_one() -> None:
    ids = [1, 2, 3, 4]
    with cf_ops.load("pythia-70m", device="cuda", impl="graph") as one:
        expected = one.logits(ids)
    with cf_ops.load("pythia-70m", devices=[0, 1], slots=4) as two:
        assert two.impl == "graph"
        assert abs(two.logits(ids) - expected).max() < 0.02 * abs(expected).max()
        first, again = (two.generate_batch([[1, 2, 3], [4, 5]], max_new_tokens=16) for _ in range(2))
        assert [r.ids for r in first] == [r.ids for r in again]
        assert all(len(r.ids) == 16 for r in first)
        with pytest.raises(NotImplementedError, match="expected no visitor of sites"):
            two.run(ids, taps=["layers.1.output"])
