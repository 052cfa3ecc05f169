"""``python -m cf_ops serve`` with Dynamo, on loopback with the CPU backend, by the openai client and raw sockets.

Some numbers are small ones. CF_SERVE_FULL=1 takes those of a release: 64 slots, 200 requests with seeds, 10,000 requests
for the memory. It runs for several minutes.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import importlib.util
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cf_ops

for package, command in (("dynamo.frontend", "pip install --no-deps ai-dynamo"), ("openai", "pip install openai")):
    try:
        found = importlib.util.find_spec(package) is not None
    except ImportError:
        found = False
    if not found:
        pytest.skip(f"{package} is missing: {command}", allow_module_level=True)

import openai  # type: ignore[import-not-found, unused-ignore]

FULL = os.environ.get("CF_SERVE_FULL") == "1"
IDS = {"nvext": {"extra_fields": ["completion_token_ids"]}}  # ask the front end for the ids
PROMPT = "def __len__(self):"
SLOTS = 64 if FULL else 4


def free_port(first: int = 0) -> int:
    """A port that nobody listens on, from `first` on."""
    while True:
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", first))
                return int(free.getsockname()[1])
            except OSError:
                first += 1


class Server:
    """A server of this repository's small model, on a port of its own."""

    def __init__(self, model: str, *options: object) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "cf_ops", "serve", "--model", model, "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, *map(str, options)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=60)
        self.name = os.path.basename(model)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "is served at" in line, self.process.communicate()[1]
        self.pids = [int(pid) for pid in re.findall(r"pid (\d+): (?:the )?worker", line)]
        self.all_pids = [self.process.pid, *map(int, re.findall(r"pid (\d+):", line))]

    def complete(self, prompt: Any = PROMPT, **options: Any) -> Any:
        return self.client.completions.create(model=self.name, prompt=prompt, **options)

    def ids(self, prompt: Any, **options: Any) -> list[int]:
        answer = self.complete(prompt, extra_body=IDS | options.pop("extra_body", {}), **options)
        ids: list[int] = answer.nvext["completion_token_ids"]
        return ids

    def post(self, body: bytes, path: str = "/v1/completions") -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, {"message": text.decode()}

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        try:
            self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        return self.process.returncode


@pytest.fixture(scope="module")
def directory(root: pathlib.Path) -> str:
    return str(root / "data" / "checkpoints" / "stdlib-4m")


@pytest.fixture(scope="module")
def model(directory: str) -> cf_ops.Model:
    return cf_ops.load(directory)


@pytest.fixture(scope="module")
def server(directory: str) -> Iterator[Server]:
    metrics = free_port(20_000)  # Dynamo takes a port of 15 bits
    server = Server(directory, "--slots", SLOTS, "--queue", SLOTS, "--metrics-port", metrics, "--body-limit", 1)
    server.metrics_port = metrics  # type: ignore[attr-defined]
    yield server
    assert server.end(signal.SIGINT) == 0


@pytest.fixture(scope="module")
def replicas(directory: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two workers, of a copy of the model that has a chat template."""
    chat = tmp_path_factory.mktemp("serve") / "stdlib-chat"
    shutil.copytree(directory, chat)
    template = "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}# answer:"
    (chat / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")
    server = Server(str(chat), "--slots", SLOTS, "--threads", 1, "--workers", 2)
    yield server
    assert server.end() == 0


def numbers(server: Server) -> dict[str, float]:
    """The worker's own numbers, without labels."""
    connection = http.client.HTTPConnection("127.0.0.1", server.metrics_port, timeout=60)  # type: ignore[attr-defined]
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith("cf_ops_")}


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def soon(is_so: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


# --- what is answered -------------------------------------------------------------------------------------------------


def test_the_ids_are_the_librarys(server: Server, model: cf_ops.Model) -> None:
    ids = model.encode(PROMPT)
    for options in (
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9, "seed": 5},
        {"temperature": 1.1, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.2, "seed": 2**63 - 1},
    ):
        expected = list(model.generate(ids, max_new_tokens=12, **options))  # type: ignore[arg-type]
        extra = {name: options.pop(name) for name in ("top_k", "min_p", "repetition_penalty") if name in options}
        for prompt in (PROMPT, ids):
            assert server.ids(prompt, max_tokens=12, extra_body=extra, **options) == expected


def test_an_answer_has_text_finish_and_usage(server: Server, model: cf_ops.Model) -> None:
    answer = server.complete(max_tokens=12, temperature=0)
    (choice,) = answer.choices
    assert choice.text == "".join(model.generate(PROMPT, max_new_tokens=12))
    assert choice.finish_reason == "length"
    assert answer.model == server.name
    prompt = len(model.encode(PROMPT))
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, 12, prompt + 12)
    assert [m.id for m in server.client.models.list()] == [server.name]


def test_a_stream_is_the_same_text(server: Server) -> None:
    whole = server.complete(max_tokens=24, temperature=0.8, seed=3).choices[0].text
    chunks = list(
        server.complete(max_tokens=24, temperature=0.8, seed=3, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 24 and not chunks[-1].choices
    assert len(chunks) > 3


def test_lists_of_prompts(server: Server) -> None:
    prompts = [PROMPT, "import os\n", "class A:"]
    together = server.complete(prompts, max_tokens=6, temperature=0.9, seed=4).choices
    assert [c.index for c in together] == [0, 1, 2]
    assert [c.text for c in together] == [
        server.complete(p, max_tokens=6, temperature=0.9, seed=4).choices[0].text for p in prompts
    ]


def test_choices_are_those_of_a_batch(server: Server, model: cf_ops.Model) -> None:
    expected = model.generate_batch([PROMPT] * 3, max_new_tokens=10, temperature=1, seed=9)
    answer = server.complete(max_tokens=10, seed=9, n=3)
    assert {c.index: c.text for c in answer.choices} == {i: result.text for i, result in enumerate(expected)}
    assert answer.usage.completion_tokens == 30


def test_choices_are_streamed_side_by_side(server: Server, model: cf_ops.Model) -> None:
    expected = [r.text for r in model.generate_batch([PROMPT] * 3, max_new_tokens=10, temperature=1, seed=9)]
    texts = ["", "", ""]
    for chunk in server.complete(max_tokens=10, seed=9, n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


def test_texts_that_end_a_text(server: Server, model: cf_ops.Model) -> None:
    def stopped(prompt: str, stop: list[str], **options: Any) -> Any:
        return server.complete(prompt, max_tokens=24, temperature=0, stop=stop, **options).choices[0]

    whole = "".join(model.generate(PROMPT, max_new_tokens=24))
    pieces = list(model.generate(PROMPT, max_new_tokens=24))
    border = len("".join(pieces[:6]))
    across = whole[border - 2 : border + 2]  # begins in one token and ends in another
    assert whole.find(across) == border - 2
    choice = stopped(PROMPT, ["never there", across])
    assert (choice.text, choice.finish_reason) == (whole[: border - 2], "stop")
    streamed = server.complete(max_tokens=24, temperature=0, stop=[across], stream=True)
    assert "".join(c.choices[0].text for c in streamed) == whole[: border - 2]
    # Each of these characters is two tokens, a byte each.
    bytes_prompt = "# Łódź Łódź Łódź Łódź"
    assert "".join(model.generate(bytes_prompt, max_new_tokens=8)) == "öööö"
    assert stopped(bytes_prompt, ["ö"]).text == ""
    assert stopped(bytes_prompt, ["x", "ööö"]).text == ""
    assert stopped(bytes_prompt, ["öx"]).text == "ö" * 12
    for stop, text in ((["öö"], ""), (["öx"], "ö" * 12)):
        streamed = server.complete(bytes_prompt, max_tokens=24, temperature=0, stop=stop, stream=True)
        assert "".join(c.choices[0].text for c in streamed if c.choices) == text


def test_ids_that_end_a_text(server: Server, model: cf_ops.Model) -> None:
    ids = list(model.generate(model.encode(PROMPT), max_new_tokens=12))
    text = model.tokenizer.decode(ids[:5])
    choice = server.complete(max_tokens=12, temperature=0, extra_body={"stop_token_ids": [ids[5]]}).choices[0]
    assert (choice.text, choice.finish_reason) == (text, "stop")
    options = {"ignore_eos": True, "min_tokens": 12}
    assert len(server.ids(PROMPT, max_tokens=12, temperature=0, extra_body=options)) == 12


def test_log_probabilities(server: Server, model: cf_ops.Model) -> None:
    """They are those of Model.score, to the rounding of float32."""
    ids = model.encode(PROMPT)
    answer = server.complete(max_tokens=6, temperature=0.8, seed=2, logprobs=3, extra_body=IDS)
    new: list[int] = answer.nvext["completion_token_ids"]
    (scored,) = model.score([ids + new], first=len(ids), top=3)
    got = answer.choices[0].logprobs
    np.testing.assert_allclose(got.token_logprobs, scored.log_probs, rtol=0, atol=2e-5)
    for expected, top in zip(scored.top_log_probs, got.top_logprobs):
        np.testing.assert_allclose(sorted(top.values())[-3:], sorted(expected), rtol=0, atol=2e-5)
    plain = server.complete(max_tokens=6, temperature=0.8, seed=2)
    assert plain.choices[0].text == answer.choices[0].text and plain.choices[0].logprobs is None


def test_what_changes_the_logits(server: Server, model: cf_ops.Model) -> None:
    ids = model.encode(PROMPT)
    greedy = list(model.generate(ids, max_new_tokens=24))
    for options, same in (
        ({"presence_penalty": 2.0}, {"presence_penalty": 2.0}),
        ({"frequency_penalty": 2.0}, {"frequency_penalty": 2.0}),
        ({"nvext": {"annotations": [f'logit_bias:{{"{greedy[2]}": -100}}']}}, {"logit_bias": {greedy[2]: -100}}),
        ({"stop_token_ids": [greedy[2]], "min_tokens": 6}, {"stop": [greedy[2]], "min_new_tokens": 6}),
    ):
        nvext = {**IDS["nvext"], **options.pop("nvext", {})}  # type: ignore[dict-item]
        got = server.ids(PROMPT, max_tokens=24, temperature=0, extra_body=options | {"nvext": nvext})
        assert got == list(model.generate(ids, max_new_tokens=24, **same))  # type: ignore[call-overload]
        assert got != greedy


def test_health_and_metrics(server: Server) -> None:
    """Of the worker and of the front end; a request's ids and times are counted."""
    for port in (server.metrics_port, server.port):  # type: ignore[attr-defined]
        for path in ("/health", "/live", "/metrics"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", path)
            assert connection.getresponse().status == 200, path
            connection.close()
    before = numbers(server)
    assert before["cf_ops_slots"] == SLOTS and before["cf_ops_queue_length"] == 0
    assert server.complete(max_tokens=7, n=2, extra_body={"ignore_eos": True}).usage.completion_tokens == 14
    after = numbers(server)
    for name, more in (("ids_total", 14), ("ttft_seconds_count", 2), ("tpot_seconds_count", 2)):
        assert after[f"cf_ops_{name}"] - before[f"cf_ops_{name}"] == more
    assert after["cf_ops_ttft_seconds_sum"] > before["cf_ops_ttft_seconds_sum"]
    assert after["cf_ops_tpot_seconds_sum"] > before["cf_ops_tpot_seconds_sum"]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 600}, "max_tokens: expected at most 507 beside a prompt of 6 ids in 512 entries, got 600"),
        ({"prompt": [1] * 513}, "prompt: expected at most 512 ids"),
        ({"extra_body": {"min_tokens": 5}}, "min_tokens: expected at most 4"),
        (
            {"extra_body": {"nvext": {"annotations": ['logit_bias:{"5000": 1}']}}},
            "logit_bias: expected ids of 0 to 2047",
        ),
        ({"echo": True, "stop": ["x"]}, "echo: expected it without texts of stop"),
        ({"best_of": 2}, "best_of: expected 1"),
        ({"n": 2 * SLOTS + 1}, f"n: expected 1 to {2 * SLOTS}" if SLOTS < 64 else "n must be between 1 and 128"),
        ({"extra_body": {"stop_token_ids": [5000]}}, "stop[1]: expected an id of 0 to 2047, got 5000"),
        ({"logprobs": 6}, "ogprobs must be between 0 and 5, got 6"),
        ({"temperature": 3}, "emperature must be between 0 and 2, got 3"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [5000]}, ""),
        ({"extra_body": {"unheard_of": 1}}, "unheard_of"),
        ({"extra_body": {"bad_words_token_ids": [[5]]}}, "bad_words_token_ids: expected none"),
    ],
)
def test_a_refusal_says_what_was_expected(server: Server, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.complete(**{"prompt": PROMPT, "max_tokens": 4} | options)
    assert message in caught.value.body["message"]
    assert "\n" not in caught.value.body["message"]


def test_an_echo_has_the_prompt_and_its_logprobs(server: Server, root: pathlib.Path) -> None:
    model = cf_ops.load(root / "data" / "checkpoints" / "stdlib-4m")
    ids = model.encode(PROMPT)
    (scored,) = model.score([ids], top=2)
    plain = server.complete(PROMPT, max_tokens=3, temperature=0, logprobs=2).choices[0]
    for n in (1, 2):
        drawn = {"temperature": 0.9, "seed": 1} if n > 1 else {"temperature": 0}  # as the front end asks for
        made = server.complete(PROMPT, max_tokens=3, logprobs=2, echo=True, n=n, **drawn)
        assert made.usage is not None and made.usage.completion_tokens == (len(ids) + 3) * n
        for choice in made.choices:
            assert choice.text.startswith(PROMPT) and choice.logprobs is not None
            assert n > 1 or choice.text == PROMPT + plain.text
            logprobs = choice.logprobs.token_logprobs
            assert len(logprobs) == len(ids) + 3 and logprobs[0] == 0
            np.testing.assert_allclose(logprobs[1 : len(ids)], scored.log_probs, rtol=0, atol=1e-5)
            assert n > 1 or logprobs[len(ids) :] == plain.logprobs.token_logprobs
            likeliest = [list(top.values()) for top in choice.logprobs.top_logprobs[1 : len(ids)]]
            for values, expected in zip(likeliest, scored.top_log_probs):
                np.testing.assert_allclose(sorted(values)[-1], max(expected), rtol=0, atol=1e-5)
    assert server.complete(PROMPT, max_tokens=3, temperature=0, echo=True).choices[0].text == PROMPT + plain.text
    assert server.complete([5], max_tokens=1, temperature=0, echo=True, logprobs=0).choices[0].logprobs is not None


def test_another_model_is_not_found(server: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        server.client.completions.create(model="another", prompt=PROMPT)


def test_a_body_that_is_no_request(server: Server) -> None:
    for body in (b"", b"{", b"[]", b'{"model": 3}', b"\xff\xfe", b'{"model": "stdlib-4m"}'):
        status, answer = server.post(body)
        assert status in (400, 415, 422), body
        assert answer["message"], body


def test_a_body_that_is_too_large(server: Server) -> None:
    body = b'{"model": "stdlib-4m", "prompt": "' + b"x" * (100 << 20) + b'"}'
    try:
        status, _ = server.post(body)
        assert status == 413
    except (BrokenPipeError, ConnectionResetError):  # the server does not read on
        pass
    assert server.complete(max_tokens=1).choices


@pytest.mark.parametrize("echo", [False, True])
def test_more_requests_than_may_wait(echo: bool, server: Server) -> None:
    """So many run, as many wait, and the others are refused with 429; all that were taken end well. An echo waits as
    others do."""
    options: dict[str, Any] = {"extra_body": {"ignore_eos": True}} | ({"echo": True, "logprobs": 1} if echo else {})

    def one(number: int) -> str:
        try:
            return str(len(server.ids(PROMPT, max_tokens=100, seed=number, **options)))
        except openai.RateLimitError:
            return "refused"

    with concurrent.futures.ThreadPoolExecutor(4 * SLOTS) as pool:
        asked = [pool.submit(one, number) for number in range(4 * SLOTS)]
        assert soon(lambda: numbers(server)["cf_ops_queue_length"] > 0)
        results = [future.result() for future in asked]
    assert 1 <= results.count("refused") <= 2 * SLOTS
    assert set(results) == {"106" if echo else "100", "refused"}


# --- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slots(stream: bool, choices: int, server: Server) -> None:
    before = numbers(server)["cf_ops_ids_total"]
    asked = request_bytes(server, max_tokens=500, seed=1, n=choices, stream=stream, ignore_eos=True)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(asked)
        assert soon(lambda: numbers(server)["cf_ops_ids_total"] > before)
        assert numbers(server)["cf_ops_slots_used"] == choices
    assert soon(lambda: numbers(server)["cf_ops_slots_used"] == 0, 5)
    assert numbers(server)["cf_ops_ids_total"] - before < 500 * choices


def request_bytes(server: Server, **options: Any) -> bytes:
    body = json.dumps({"model": server.name, "prompt": PROMPT, **options}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def test_connections_that_are_opened_and_dropped(server: Server) -> None:
    whole = request_bytes(server, max_tokens=20, stream=True)
    rng = random.Random(1)
    for number in range(10_000):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            if number % 3:
                connection.sendall(whole[: rng.randrange(len(whole) + 1)])
    assert soon(lambda: numbers(server)["cf_ops_slots_used"] == 0)
    assert server.complete(max_tokens=3, temperature=0).usage.completion_tokens == 3


def read_all(connection: socket.socket, slowly: bool = False) -> bytes:
    data = b""
    while piece := connection.recv(64 if slowly else 65536):
        data += piece
        if data.endswith(b"data: [DONE]\n\n") or b"[DONE]" in data[-40:]:
            return data
        if slowly:
            time.sleep(0.002)
    return data


def test_a_slow_reader_and_a_half_closed_socket(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(request_bytes(server, max_tokens=60, stream=True, seed=1))
        time.sleep(0.2)
        fast = server.complete(max_tokens=5, temperature=0).usage.completion_tokens  # nobody waits for the slow one
        assert fast == 5
        assert b"[DONE]" in read_all(connection, slowly=True)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(request_bytes(server, max_tokens=5, stream=True, seed=1))
        connection.shutdown(socket.SHUT_WR)
        read_all(connection)  # an answer or none: the server may take it for a client that has left
    assert soon(lambda: numbers(server)["cf_ops_slots_used"] == 0)


def test_a_client_that_never_reads(server: Server) -> None:
    """It holds nobody up, and its slots are free when it leaves."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        asked = request_bytes(server, max_tokens=500, stream=True, logprobs=5, ignore_eos=True, n=SLOTS - 1)
        connection.sendall(asked)
        assert server.complete(max_tokens=5, temperature=0).usage.completion_tokens == 5
    assert soon(lambda: numbers(server)["cf_ops_slots_used"] == 0)


@pytest.mark.parametrize(
    "sent",
    [
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",  # TLS
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nX-Y: " + b"a" * 1_000_000 + b"\r\n\r\n",
        b"PUT /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_what_is_no_request_of_http(sent: bytes, server: Server) -> None:
    """It is refused, or the connection ends; the server goes on."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(4096)
        except TimeoutError:
            raise
        except OSError:  # it has closed the connection
            answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4") or answer.startswith(b"HTTP/1.0 4")
    assert server.complete(max_tokens=1).choices


def resident(pid: int) -> float:
    """The MB of memory that a process has."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def test_memory_does_not_grow(server: Server) -> None:
    """That of the front end and of the worker, from the first tenth of the requests on. The prompts have few words: the
    front end's tokenizer keeps up to 10,000."""
    sizes: dict[int, list[float]] = {}
    asked = 0
    for count in (1_000, 5_000, 10_000) if FULL else (30, 150, 300):
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            places = range(asked, count)
            list(pool.map(lambda number: server.complete(f"x = {number % 30}", max_tokens=2, seed=number), places))
        asked = count
        sizes[count] = [resident(pid) for pid in server.all_pids[1:]]
    print("MB of the front end and of the worker by requests:", sizes)
    first, *later = sizes.values()
    assert len(first) == 2
    assert all(size - before < 4 for of_all in later for size, before in zip(of_all, first)), sizes


# --- the same seed, the same ids --------------------------------------------------------------------------------------


def asks() -> list[dict[str, Any]]:
    """Requests with seeds, of several lengths and settings."""
    rng = random.Random(7)
    texts = ["def f(", "import os\n", "class Stack:\n    def push(self", "# a comment", "x = [", "return "]
    return [
        {
            "prompt": rng.choice(texts) * rng.randrange(1, 4),
            "max_tokens": rng.randrange(4, 24),
            "temperature": rng.choice([0.5, 1.0, 1.3]),
            "top_p": rng.choice([1.0, 0.9]),
            "seed": number,
        }
        for number in range(200 if FULL else 24)
    ]


def answers(server: Server, requests: list[dict[str, Any]], at_once: int, order: int) -> list[list[int]]:
    """The ids of the requests, which go out in a random order."""
    places = list(range(len(requests)))
    random.Random(order).shuffle(places)
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        ids = dict(zip(places, pool.map(lambda place: server.ids(**requests[place]), places)))
    return [ids[place] for place in range(len(requests))]


@pytest.fixture(scope="module")
def alone(server: Server) -> list[list[int]]:
    """The ids of each request, with no other beside it."""
    return answers(server, asks(), 1, 0)


def test_the_same_seed_gives_the_same_ids_beside_neighbours(server: Server, alone: list[list[int]]) -> None:
    assert answers(server, asks(), SLOTS, 1) == alone
    assert len({str(ids) for ids in alone}) > len(alone) // 2


def test_the_same_seed_gives_the_same_ids_on_replicas(replicas: Server, alone: list[list[int]]) -> None:
    assert len(replicas.pids) == 2
    assert soon(lambda: is_alive(replicas))
    assert answers(replicas, asks(), SLOTS, 2) == alone


def test_a_pool_of_pages_and_pieces_of_prompts_give_the_same_ids(directory: str, alone: list[list[int]]) -> None:
    server = Server(directory, "--slots", SLOTS, "--pages", 12, "--share-prefixes", "--step-tokens", 32)
    try:
        assert answers(server, asks(), SLOTS, 3) == alone
    finally:
        assert server.end() == 0


def test_a_worker_that_is_killed_under_load(directory: str, alone: list[list[int]]) -> None:
    """Every request ends with ids or an error within seconds, the next ones run, and the same seeds give the same ids.
    Then SIGTERM lets what runs end."""
    server = Server(directory, "--slots", SLOTS)

    def one(number: int) -> float:
        try:
            assert server.complete(max_tokens=300, seed=number, extra_body={"ignore_eos": True}).usage
        except openai.APIStatusError as error:
            assert error.status_code == 503
        return time.monotonic()

    try:
        with concurrent.futures.ThreadPoolExecutor(2 * SLOTS) as pool:
            running = [pool.submit(one, number) for number in range(2 * SLOTS)]
            time.sleep(0.3)
            killed = time.monotonic()
            os.kill(server.pids[0], signal.SIGKILL)
            assert max(future.result() for future in running) - killed < 5
        assert soon(lambda: is_alive(server), 40)
        assert answers(server, asks(), SLOTS, 3) == alone

        options: dict[str, Any] = {"max_tokens": 500, "stream": True, "extra_body": {"ignore_eos": True}}
        streams = [iter(server.complete(seed=number, **options)) for number in range(SLOTS)]
        for stream in streams:
            next(stream)
        server.process.send_signal(signal.SIGTERM)
        statuses = [200]
        while statuses[-1] == 200:
            statuses.append(server.post(b'{"model": "stdlib-4m", "prompt": "a", "max_tokens": 1}')[0])
        assert statuses[-1] == 503  # while what runs goes on
        for stream in streams:
            assert [chunk.choices[0].finish_reason for chunk in stream if chunk.choices][-1] == "length"
        assert server.process.wait(timeout=60) == 0
        assert not os.path.exists(f"/proc/{server.pids[0]}")
    finally:
        server.process.kill()


def test_what_runs_ends_with_an_error_where_the_drain_is_over(directory: str) -> None:
    server = Server(directory, "--slots", SLOTS, "--drain", 0)
    stream = iter(server.complete(max_tokens=500, stream=True, n=SLOTS, extra_body={"ignore_eos": True}))
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError):
        list(stream)
    assert server.process.wait(timeout=60) == 0
    assert not any(map(is_running, server.all_pids))


def is_alive(server: Server) -> bool:
    try:
        return bool(server.complete(max_tokens=1).choices)
    except openai.OpenAIError:
        return False


# --- the processes ----------------------------------------------------------------------------------------------------


def refused(*words: object) -> str:
    command = [sys.executable, "-m", "cf_ops", "serve", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_what_cannot_be_served_is_one_line(directory: str, checkpoints: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert "no such directory" in refused("--model", "nowhere")
    assert "tokenizer.json: no such file" in refused("--model", checkpoints / "neox-d80")
    assert "--workers: expected" in refused("--model", directory, "--gpus", 1, "--workers", 2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = refused("--model", directory, "--port", taken.getsockname()[1])
        assert re.search(r"--host 127.0.0.1 --port \d+: Address already in use", line)
    damaged = tmp_path / "damaged"
    shutil.copytree(directory, damaged)
    with open(damaged / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    assert "model.safetensors" in refused("--model", damaged, "--port", free_port())


def test_nobody_listens_beyond_this_machine(replicas: Server) -> None:
    found = []
    for pid in replicas.all_pids:
        names = []
        for number in os.listdir(f"/proc/{pid}/fd"):
            try:
                names.append(os.readlink(f"/proc/{pid}/fd/{number}"))
            except FileNotFoundError:
                continue
        for table in ("tcp", "tcp6"):
            with open(f"/proc/{pid}/net/{table}", encoding="ascii") as file:
                rows = [line.split() for line in file][1:]
            found += [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in names]
    assert f"0100007F:{replicas.port:04X}" in found and len(found) >= 3  # the API, and each worker
    assert {address.partition(":")[0] for address in found} == {"0100007F"}  # 127.0.0.1


def test_no_process_outlives_the_one_that_started_it(directory: str) -> None:
    server = Server(directory)
    assert len(server.all_pids) == 3 and all(map(is_running, server.all_pids))
    server.end(signal.SIGKILL)
    assert soon(lambda: not any(map(is_running, server.all_pids)))


def test_the_workers_of_the_page_serve_by_hand(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The commands of "Two workers on one machine". Where one worker ends, the other one answers."""
    text = (root / "python" / "SERVING.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```\n(export DYN_FILE_KV.*?)^```", text, re.M | re.S)
    lines = [shlex.split(line) for line in block.splitlines()]
    exports = dict(word.split("=", 1) for words in lines if words[0] == "export" for word in words[1:])
    port = free_port()
    environment = os.environ | exports | {"DYN_FILE_KV": str(tmp_path), "DYN_LOG": "error"}
    commands = [words for words in lines if words[0] == "python3"]
    assert [words[2] for words in commands] == ["dynamo.frontend", "cf_ops.dynamo", "cf_ops.dynamo"]
    processes = []
    try:
        for words in commands:
            words = [sys.executable, *(str(port) if word == "8000" else word for word in words[1:])]
            options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            processes.append(subprocess.Popen(words, cwd=root, env=environment, **options))
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)

        def answers() -> bool:
            try:
                return bool(client.completions.create(model="stdlib-4m", prompt=PROMPT, max_tokens=2).choices)
            except openai.OpenAIError:
                return False

        def workers() -> int:
            return sum(len(files) for folder, _, files in os.walk(tmp_path / "v1" / "instances"))

        assert soon(lambda: workers() == 2 and answers(), 60)
        assert [answers() for _ in range(4)] == [True] * 4  # each has its turn
        processes[1].send_signal(signal.SIGTERM)
        assert processes[1].wait(timeout=60) == 0
        assert soon(answers) and workers() == 1
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_chat_where_there_is_a_template(replicas: Server) -> None:
    messages: Any = [{"role": "user", "content": "write a loop"}]
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.7, "seed": 3}
    expected = replicas.complete("# user: write a loop\n# answer:", **options).choices[0].text
    chat = replicas.client.chat.completions.create
    answer = chat(model=replicas.name, messages=messages, **options)
    assert answer.choices[0].message.content == expected
    streamed = chat(model=replicas.name, messages=messages, stream=True, **options)
    assert "".join(c.choices[0].delta.content or "" for c in streamed if c.choices) == expected
    completion = replicas.complete("# user: write a loop\n# answer:", logprobs=2, **options).choices[0].logprobs
    answer = chat(model=replicas.name, messages=messages, logprobs=True, top_logprobs=2, **options)
    tokens = answer.choices[0].logprobs.content
    assert [t.logprob for t in tokens] == pytest.approx(completion.token_logprobs, rel=1e-6)
    for token, top in zip(tokens, completion.top_logprobs):
        likeliest = sorted(p.logprob for p in token.top_logprobs)[-2:]
        assert likeliest == pytest.approx(sorted(top.values())[-2:], rel=1e-6)
    stop = expected[4:6]
    answer = chat(model=replicas.name, messages=messages, stop=[stop], **options)
    assert (answer.choices[0].message.content or "") == expected[: expected.find(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_chat_without_a_template_is_not_there(server: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        server.client.chat.completions.create(model=server.name, messages=[{"role": "user", "content": "hi"}])


def test_the_page_runs(server: Server, root: pathlib.Path) -> None:
    """The commands and the Python of the page, at the port of this server, which its first command would start too."""
    text = (root / "python" / "SERVING.md").read_text(encoding="utf-8")
    command, curl = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
    (python,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert command == "python3 -m cf_ops serve --model data/checkpoints/stdlib-4m\n"
    assert ":8000/" in curl and ":8000/" in python
    here = f":{server.port}/"
    done = subprocess.run(
        curl.replace(":8000/", here), shell=True, capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 16
    exec(compile(python.replace(":8000/", here), "SERVING.md", "exec"), {})


def test_the_bench_runs_beside_the_decoder_and_behind_a_kill(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(root / "apps" / "bench_serve.py"), "--preset", "pythia-14m", "--device", "cpu"]
    command += ["--clients", "2", "--new-tokens", "8", "--seconds", "1", "--seconds-behind-kill", "3"]
    command += ["--folder", str(tmp_path), "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert found["http"]["failed"] == 0 and found["http"]["ids_per_s"] > 0 and found["decoder"]["ids_per_s"] > 0
    assert len(found["ttft_ms_more"]) == 2
    # The clients go on until one is answered again, however busy the machine is.
    assert found["kill"]["next_answer_s"] > 0 and found["kill"]["answered_behind_it"] > 0
