"""What a server's worker is made of, without Dynamo: requests, and the thread that steps the decoder."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import cf_ops
from cf_ops.serve import _processes as processes
from cf_ops.serve._batcher import Batcher, Fault, Full, Job, Piece
from cf_ops.serve._request import Refused, read_request

# --- requests ---------------------------------------------------------------------------------------------------------


def request(ids: int = 3, **groups: Any) -> dict[str, Any]:
    return {"token_ids": list(range(1, ids + 1)), **groups}


def test_openais_defaults() -> None:
    asked = read_request(request(), 16)
    (options,) = asked.options
    assert asked.prompt == [1, 2, 3]
    assert options.pop("seed") != read_request(request(), 16).options[0]["seed"]
    assert options == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop": [],
        "max_new_tokens": 14,
        "min_new_tokens": 0,
        "logit_bias": [],
        "logprobs": None,
        "id": 0,
    }


def test_choices_have_numbers_of_their_own_and_one_seed() -> None:
    options = read_request(request(sampling_options={"n": 3, "seed": -1, "temperature": 0.5}), 16).options
    assert [o["id"] for o in options] == [0, 1, 2]
    assert {o["seed"] for o in options} == {2**64 - 1}


def test_numbers_are_what_the_client_wrote() -> None:
    sampling = {"temperature": 0.699999988079071, "top_p": 0.8999999761581421, "top_k": -1}  # float32's 0.7 and 0.9
    (options,) = read_request(request(sampling_options=sampling), 16).options
    assert (options["temperature"], options["top_p"], options["top_k"]) == (0.7, 0.9, 0)


def test_the_most_likely_id_is_never_cut_off() -> None:
    (options,) = read_request(request(sampling_options={"temperature": 0, "top_p": 0.5, "top_k": 3}), 16).options
    assert options["temperature"] == 0 and not {"top_p", "top_k", "min_p"} & options.keys()


def test_all_stop_ids_count() -> None:
    stop = {"stop_token_ids": [7], "stop_token_ids_hidden": [0, 7], "stop_token_ids_visible": None, "max_tokens": 2}
    (options,) = read_request(request(stop_conditions=stop), 16).options
    assert options["stop"] == [0, 7] and options["max_new_tokens"] == 2


def test_what_changes_logits_is_passed_on() -> None:
    asked = read_request(
        request(
            sampling_options={"presence_penalty": 0.30000001192092896, "frequency_penalty": -1.5},
            stop_conditions={"min_tokens": 2},
            output_options={"logprobs": 3},
            annotations=["other", 'logit_bias:{"5": -100, "7": 0.5}'],
        ),
        16,
    )
    (options,) = asked.options
    assert not asked.echo and read_request(request(output_options={"prompt_logprobs": 1}), 16).echo
    assert (options["presence_penalty"], options["frequency_penalty"]) == (0.3, -1.5)
    assert (options["min_new_tokens"], options["logprobs"]) == (2, 3)
    assert options["logit_bias"] == [(5, -100.0), (7, 0.5)]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"stop_conditions": {"max_tokens": 15}}, "max_tokens: expected at most 14 beside a prompt of 3 ids"),
        ({"stop_conditions": {"min_tokens": 3, "max_tokens": 2}}, "min_tokens: expected at most 2.*got 3"),
        ({"annotations": ["logit_bias:[1]"]}, "annotations: expected logit_bias:"),
        ({"stop_conditions": {"max_thinking_tokens": 1}}, "max_thinking_tokens: expected none"),
        ({"sampling_options": {"best_of": 2}}, "best_of: expected 1.*got 2"),
        ({"sampling_options": {"guided_decoding": {"json": {}}}}, "guided_decoding: expected none"),
        ({"extra_args": {"sampling_options": {"allowed_token_ids": [5]}}}, "allowed_token_ids: expected none"),
        ({"sampling_options": {"n": 129}}, "n: expected 1 to 128, got 129"),
        (
            {"output_options": {"prompt_logprobs": 1}, "stop_conditions": {"stop": ["x"]}},
            "echo: expected it without texts of stop",
        ),
        ({"ids": 17}, "prompt: expected at most 16 ids, the entries of a sequence, got 17"),
    ],
)
def test_what_is_not_computed_is_refused(groups: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        read_request(request(**groups), 16)


def test_choices_are_no_more_than_a_worker_takes() -> None:
    """429 would say that they may come later."""
    asked = request(sampling_options={"n": 9})
    assert len(read_request(asked, 16, 9).options) == 9
    with pytest.raises(Refused, match="n: expected 1 to 8, got 9"):
        read_request(asked, 16, 8)


# --- the batcher ------------------------------------------------------------------------------------------------------


class Counted:
    """The numbers that a batcher gives to Prometheus."""

    def __init__(self) -> None:
        self.loads: list[tuple[int, int]] = []
        self.free_pages: list[int] = []
        self.made = self.first_ids = self.sequences = 0

    def load(self, running: int, waiting: int) -> None:
        self.loads.append((running, waiting))

    def pages(self, free: int) -> None:
        self.free_pages.append(free)

    def first_id(self, seconds: float) -> None:
        assert seconds > 0
        self.first_ids += 1

    def ended(self, ids: int, seconds: float) -> None:
        self.sequences += 1

    def ids(self, count: int) -> None:
        self.made += count


class Stepped:
    """A decoder whose steps the test lets happen; sequence s makes the ids 10 s, 10 s + 1 ..."""

    def __init__(self, fault: str | None = None) -> None:
        self.allowed = threading.Semaphore(0)
        self.fault = fault
        self.left: dict[int, int] = {}
        self.made: dict[int, int] = {}
        self.dropped: list[int] = []
        self.free_pages = None
        self.closed = False

    def add(self, prompt: Any, max_new_tokens: int, logprobs: int | None = None) -> int:
        if not prompt:
            raise ValueError("prompt: expected at least one id, got none")
        sequence = len(self.made)
        self.left[sequence], self.made[sequence] = max_new_tokens, 0
        return sequence

    def decode(self, steps: int = 1) -> list[tuple[int, int]]:
        self.allowed.acquire()
        if self.fault is not None:
            raise cf_ops.CfError(self.fault)
        emitted = []
        for sequence in (s for s, left in self.left.items() if left):
            emitted.append((sequence, 10 * sequence + self.made[sequence]))
            self.left[sequence] -= 1
            self.made[sequence] += 1
        return emitted

    def ended(self) -> list[int]:
        return [sequence for sequence, left in self.left.items() if not left]

    def finish(self, sequence: int) -> str:
        return "length"

    def status(self, sequence: int) -> str | None:
        return None

    def logprobs(self, sequence: int, first: int = 0) -> list[tuple[float, list[tuple[int, float]]]]:
        return [(-float(number), [(sequence, -0.5)]) for number in range(first, self.made[sequence])]

    def drop(self, sequence: int) -> None:
        del self.left[sequence]
        self.dropped.append(sequence)

    def close(self) -> None:
        self.closed = True


def job(prompt: list[int], count: int, choice: int = 0, pieces: asyncio.Queue[Piece] | None = None) -> Job:
    return Job(choice, prompt, {"max_new_tokens": count}, asyncio.Queue() if pieces is None else pieces)


async def ids_of(job: Job) -> list[int]:
    ids: list[int] = []
    while True:
        piece = await asyncio.wait_for(job.pieces.get(), 10)
        ids += piece.ids
        if piece.finish is not None:
            return ids


def run(work: Callable[[Batcher, Stepped, Counted, list[str]], Awaitable[None]], fault: str | None = None) -> None:
    """Runs work(batcher, its decoder, its numbers, the faults that it reported): two slots, and two may wait."""

    async def main() -> None:
        decoder, counted, faults = Stepped(fault), Counted(), list[str]()
        batcher = Batcher(decoder, 2, 2, counted, faults.append)
        try:
            await work(batcher, decoder, counted, faults)
        finally:
            decoder.allowed.release(100)
            batcher.close()
        assert decoder.closed

    asyncio.run(main())


def test_each_id_goes_to_its_request() -> None:
    async def work(batcher: Batcher, decoder: Stepped, counted: Counted, faults: list[str]) -> None:
        first, second = job([1], 3), job([2], 2)
        batcher.submit([first])
        batcher.submit([second])
        decoder.allowed.release(10)
        assert await ids_of(first) == [0, 1, 2]
        assert await ids_of(second) == [10, 11]
        assert (counted.made, counted.first_ids, counted.sequences) == (5, 2, 2)
        assert counted.loads[-1] == (0, 0)

    run(work)


def test_choices_of_a_request_come_in_one_queue() -> None:
    async def work(batcher: Batcher, decoder: Stepped, counted: Counted, faults: list[str]) -> None:
        pieces: asyncio.Queue[Piece] = asyncio.Queue()
        batcher.submit([job([1], 1, choice, pieces) for choice in (0, 1)])
        decoder.allowed.release(10)
        got = [await asyncio.wait_for(pieces.get(), 10) for _ in range(2)]
        assert [(p.choice, p.ids, p.finish) for p in got] == [(0, [0], "length"), (1, [10], "length")]

    run(work)


def test_each_id_has_its_log_probability() -> None:
    async def work(batcher: Batcher, decoder: Stepped, counted: Counted, faults: list[str]) -> None:
        asking, other = job([1], 3), job([2], 3)
        asking.options["logprobs"] = 1
        batcher.submit([asking])
        batcher.submit([other])
        decoder.allowed.release(10)
        got = [await asyncio.wait_for(asking.pieces.get(), 10) for _ in range(3)]
        assert [p.logprobs for p in got] == [[(-0.0, [(0, -0.5)])], [(-1.0, [(0, -0.5)])], [(-2.0, [(0, -0.5)])]]
        assert (await other.pieces.get()).logprobs is None

    run(work)


def test_pieces_are_joined() -> None:
    first, last = Piece(2, [1], logprobs=[(-1.0, [])]), Piece(2, [5, 6], "stop", None, [(-2.0, []), (-3.0, [])])
    assert first.then(last) == Piece(2, [1, 5, 6], "stop", None, [(-1.0, []), (-2.0, []), (-3.0, [])])
    assert Piece(0, [1]).then(Piece(0, [])) == Piece(0, [1])


def test_a_cancelled_sequence_is_dropped_before_the_next_step() -> None:
    async def work(batcher: Batcher, decoder: Stepped, counted: Counted, faults: list[str]) -> None:
        leaving, staying = job([1], 100), job([2], 3)
        batcher.submit([leaving])
        batcher.submit([staying])
        decoder.allowed.release()
        await leaving.pieces.get()
        batcher.cancel([leaving])
        made = decoder.made[0]
        decoder.allowed.release(10)
        assert await ids_of(staying) == [10, 11, 12]
        assert decoder.dropped == [0, 1]
        assert decoder.made[0] <= made + 1  # a step may have been under way
        batcher.cancel([leaving, staying])  # both have ended: nothing happens

    run(work)


def test_more_than_may_wait_are_refused() -> None:
    async def work(batcher: Batcher, decoder: Stepped, counted: Counted, faults: list[str]) -> None:
        running = [job([1], 1) for _ in range(3)]
        for each in running:
            batcher.submit([each])
        assert counted.loads[-1] == (2, 1)
        with pytest.raises(Full, match="at most 4 sequences, of which 2 run and the others wait, got 2 more beside 3"):
            batcher.submit([job([1], 1), job([1], 1)])
        last = job([1], 1)
        batcher.submit([last])
        decoder.allowed.release(10)
        for each in [*running, last]:
            assert len(await ids_of(each)) == 1

    run(work)


def test_what_the_decoder_refuses_is_the_requests_alone() -> None:
    async def work(batcher: Batcher, decoder: Stepped, counted: Counted, faults: list[str]) -> None:
        bad, good = job([], 1), job([1], 1)
        batcher.submit([bad])
        batcher.submit([good])
        decoder.allowed.release(10)
        piece = await bad.pieces.get()
        assert (piece.finish, piece.error) == ("refused", "prompt: expected at least one id, got none")
        assert await ids_of(good) == [0]

    run(work)


def test_a_fault_of_the_device_ends_all() -> None:
    async def work(batcher: Batcher, decoder: Stepped, counted: Counted, faults: list[str]) -> None:
        one = job([1], 1)
        batcher.submit([one])
        decoder.allowed.release()
        piece = await one.pieces.get()
        assert piece.finish == "failed" and "the GPU fell off the bus" in (piece.error or "")
        assert len(faults) == 1
        with pytest.raises(Fault, match="the GPU fell off the bus"):
            batcher.submit([job([1], 1)])

    run(work, fault="the GPU fell off the bus")


def test_a_model_beside_neighbours(checkpoints: Any) -> None:
    """The library's own decoder: the ids are those of generate(), however many run beside."""
    model = cf_ops.load(checkpoints / "neox-d80")
    prompts = [[index + 1, 2 * index + 3] for index in range(5)]
    options = {"temperature": 0.9, "seed": 7, "id": 0, "max_new_tokens": 6}
    alone = [list(model.generate(p, max_new_tokens=6, temperature=0.9, seed=7, stop=[])) for p in prompts]

    async def main() -> None:
        batcher = Batcher(model.decoder(2, 16), 2, 16, Counted(), lambda fault: None)
        jobs = [Job(0, prompt, options, asyncio.Queue()) for prompt in prompts]
        for each in jobs:
            batcher.submit([each])
        assert [await ids_of(each) for each in jobs] == alone
        batcher.close()

    asyncio.run(main())


def test_pages_are_counted(checkpoints: Any) -> None:
    """What was cancelled or has ended gives its pages back."""
    model = cf_ops.load(checkpoints / "neox-d80", pages=12, page_entries=4)
    prompt = list(range(1, 10))

    async def main() -> None:
        counted = Counted()
        batcher = Batcher(model.decoder(2, 40), 2, 2, counted, lambda fault: None)
        assert counted.free_pages == [12]
        pieces: asyncio.Queue[Piece] = asyncio.Queue()
        jobs = [Job(i, prompt, {"max_new_tokens": 8 if i else 30, "id": i}, pieces) for i in range(2)]
        batcher.submit(jobs)
        while (await asyncio.wait_for(pieces.get(), 10)).finish is None:  # the second one's
            pass
        batcher.cancel(jobs)
        for _ in range(1000):
            if counted.free_pages[-1] == 12:
                break
            await asyncio.sleep(0.01)
        assert counted.free_pages[-1] == 12
        assert 0 <= min(counted.free_pages) <= 12 - 4  # the second one has had 16 entries
        batcher.close()

    asyncio.run(main())
    assert cf_ops.load(checkpoints / "neox-d80").decoder(1, 8).free_pages is None


# --- what is missing --------------------------------------------------------------------------------------------------


def test_a_worker_may_drain_for_as_long_as_it_was_told() -> None:
    """Dynamo ends a worker by force after its own limit."""
    for drain in (0, 60, 3600):
        limits = processes.drain_limits(drain)
        assert limits and all(name.startswith("DYN_") and int(value) > drain for name, value in limits.items())


@pytest.mark.parametrize("module", ["not_installed", "not_installed.part"])
def test_a_missing_package_is_named_with_the_command(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_MODULES", ("json", module))
    with pytest.raises(ImportError) as caught:
        processes.check_packages()
    command = f"pip install 'cf-ops[serve]' && pip install --no-deps ai-dynamo=={processes.DYNAMO}"
    assert str(caught.value).endswith(f"of which {module} is missing: {command}")
