"""Times of a GPU's work, in microseconds, and how a measurement ends that fails or takes too long."""

import contextlib
import signal

import numpy as np


def spread(times_us, per=1):
    """Median and percentiles of a series in microseconds, each divided by `per`."""
    p10, median, p99 = (float(x) / per for x in np.percentile(times_us, (10, 50, 99)))
    return {"median_us": median, "p10_us": p10, "p99_us": p99}


def one_line(error):
    """An exception's kind and its first line. One that a time limit has led to is that limit's: a compiler wraps it."""
    cause = error
    while cause is not None and not isinstance(cause, TimeoutError):
        cause = cause.__cause__ or getattr(cause, "inner_exception", None)
    error = error if cause is None else cause
    text = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A first line that ends in a colon says nothing by itself.
    first = " ".join(text[:2]) if text and text[0].endswith(":") else text[0] if text else "no message"
    return f"{type(error).__name__}: {first}"[:300]


@contextlib.contextmanager
def time_limit(seconds):
    """Raises TimeoutError within the block when the block takes longer."""

    def stop(*_):
        raise TimeoutError(f"stopped after {seconds} s")

    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


class Timer:
    """Times work on the current stream with events: `runs` times after `warmup`."""

    def __init__(self, runs, warmup):
        self.runs, self.warmup = runs, warmup

    def eager(self, step, before=lambda: None):
        """The series of step's times. `before` runs before each step and is not timed."""
        import torch

        series = []
        for _ in range(self.warmup + self.runs):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before()
            begin.record()
            step()
            end.record()
            end.synchronize()
            series.append(begin.elapsed_time(end) * 1e3)
        return series[self.warmup :]

    def graph(self, step, before=lambda: None):
        """The same for replays of a graph that holds one step."""
        return self.eager(captured(step, before).replay, before)


def captured(step, before=lambda: None):
    """A CUDA graph of one step. The step first runs on a side stream, as torch asks."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            before()
            step()
    torch.cuda.current_stream().wait_stream(side)
    before()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def sets_beyond_l2(set_bytes):
    """How many sets of tensors hold four times the L2, as cf-op takes them."""
    import torch

    return min(1024, 4 * torch.cuda.get_device_properties(0).L2_cache_size // set_bytes + 1)
