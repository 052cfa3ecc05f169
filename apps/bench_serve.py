#!/usr/bin/env python3
"""Times the server, python -m cf_ops serve, on a GPU:
  decoder  the package's decoder alone: so many sequences at once, and another one wherever one ends
  http     the same load by clients that stream completions from the server on loopback, each one request after the other
  kill     the clients go on, and the worker is killed: how long requests take to end, and until one is answered again

Prompts are random ids of random lengths, seeded: both have the same ones. The time to the first id is the client's, from
before it connects. The model has a preset's sizes and random float16 weights, and a tokenizer with a word for each id;
it is written below --folder and removed at the end. Prints a line for each part, and with --json writes them. Needs the
package cf_ops with its extra `serve` and the CUDA backend but for --device cpu.
"""

import json
import multiprocessing
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, os.pardir, "golden", "tools"))

import console

NAME = os.path.basename(__file__)
console.require_numpy(NAME)

import bench_research
import golden_file
import model_config
from console import Refusal

PARTS = ("decoder", "http", "kill")
MOST_PROMPT = 256


def prompt_of(number, vocab_size):
    """The ids of a request's prompt."""
    chosen = random.Random(number)
    return [chosen.randrange(1, vocab_size) for _ in range(chosen.randrange(16, MOST_PROMPT + 1))]


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def summary(first_ids_s, ids, taken_s):
    return {
        "requests": len(first_ids_s),
        "ids_per_s": ids / taken_s,
        "ttft_ms_p50": 1e3 * percentile(first_ids_s, 0.5),
        "ttft_ms_p99": 1e3 * percentile(first_ids_s, 0.99),
    }


def write_model(folder, preset):
    """A checkpoint that can be served."""
    path = os.path.join(folder, preset)
    model = model_config.PYTHIA_PRESETS[preset]
    bench_research.write_checkpoint(path, model, 1)
    words = {f"w{id}": id for id in range(model.vocab_size)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    golden_file.write_json(os.path.join(path, "tokenizer.json"), tokenizer)
    return path


def time_decoder(args, path):
    """The load through the decoder alone."""
    import cf_ops

    options = {} if args.device == "cpu" else {"slots": args.clients, "capacity": args.capacity}
    with cf_ops.load(path, device=args.device, **options) as model:
        vocab_size = model.config["vocab_size"]
        decoder = model.decoder(args.clients, args.capacity)
        begun, first_ids, left, count, number = {}, [], {}, 0, 0

        def add():
            nonlocal number
            sequence = decoder.add(prompt_of(number, vocab_size), max_new_tokens=args.new_tokens)
            begun[sequence], left[sequence] = time.perf_counter(), args.new_tokens
            number += 1

        for warm in (True, False):
            start = time.perf_counter()
            end = start + (min(2, args.seconds) if warm else args.seconds)
            first_ids, count = [], 0
            while (now := time.perf_counter()) < end:
                while len(left) < args.clients:
                    add()
                made = decoder.decode(1)
                now = time.perf_counter()
                for sequence, _ in made:
                    count += 1
                    if left[sequence] == args.new_tokens:
                        first_ids.append(now - begun[sequence])
                    left[sequence] -= 1
                    if left[sequence] == 0:
                        del left[sequence]
                        decoder.drop(sequence)
        decoder.close()
    return summary(first_ids, count, now - start)


def request(port, name, ids, new_tokens):
    """Streams a completion; returns the seconds to the first chunk and to the end, and the ids; the ids are None where
    the request ended with an error."""
    body = json.dumps(
        {
            "model": name,
            "prompt": ids,
            "max_tokens": new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ).encode()
    begun, first, text = time.perf_counter(), None, b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            while part := connection.recv(1 << 16):
                if first is None and b"data: {" in part:
                    first = time.perf_counter() - begun
                text = (text + part)[-4096:]
    except OSError:
        pass
    taken = time.perf_counter() - begun
    made = None
    if b"[DONE]" in text and b'"completion_tokens":' in text:
        made = int(text.rpartition(b'"completion_tokens":')[2].split(b",")[0].strip(b" }"))
    return first, taken, made


def client(port, name, vocab_size, new_tokens, first, step, ready, end, answered, results):
    """Makes requests until `end`; puts (when it began, the first chunk, its end, ids) of each. `answered` is when the
    latest of all clients' answered requests began."""
    number, made = first, []
    ready.wait()
    while time.time() < end.value:
        begun = time.time()
        made.append((begun, *request(port, name, prompt_of(number, vocab_size), new_tokens)))
        if made[-1][3] is None:
            time.sleep(0.05)
        else:
            with answered.get_lock():
                answered.value = max(answered.value, begun)
        number += step
    results.put(made)


def clients(args, port, name, vocab_size, seconds, meanwhile=lambda answered: None):
    """The results of all clients' requests, which begin within so many seconds, or until `meanwhile` returns where that
    takes longer."""
    ready, results = multiprocessing.Barrier(args.clients + 1), multiprocessing.Queue()
    end, answered = multiprocessing.Value("d", float("inf")), multiprocessing.Value("d", 0.0)
    # A process a client: none waits for another one's interpreter.
    running = [
        multiprocessing.Process(
            target=client,
            args=(port, name, vocab_size, args.new_tokens, i, args.clients, ready, end, answered, results),
        )
        for i in range(args.clients)
    ]
    for process in running:
        process.start()
    ready.wait()
    begun = time.time()
    try:
        meanwhile(answered)
    finally:
        end.value = max(begun + seconds, time.time())
    made = [one for _ in running for one in results.get(timeout=seconds + 200)]
    for process in running:
        process.join()
    return made


class Server:
    """A server that runs until the block's end."""

    def __init__(self, args, path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.name = os.path.basename(path)
        command = [sys.executable, "-m", "cf_ops", "serve", "--model", path, "--port", str(self.port)]
        command += ["--slots", str(args.clients), "--capacity", str(args.capacity)]
        command += [] if args.device == "cpu" else ["--gpus", "1"]
        self.process = subprocess.Popen(command)

    def __enter__(self):
        self.await_answer(180)
        return self

    def await_answer(self, seconds):
        end = time.monotonic() + seconds
        while request(self.port, self.name, [1, 2, 3], 1)[2] is None:
            if self.process.poll() is not None:
                raise Refusal(f"the server has ended with {self.process.returncode}")
            if time.monotonic() > end:
                raise Refusal(f"the server has not answered within {seconds} s")
            time.sleep(0.05)

    def kill_worker(self):
        """Kills the worker, as a crash would."""
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    words = file.read().split(b"\0")
                with open(f"/proc/{pid}/stat", encoding="ascii") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if b"cf_ops.dynamo" in words and parent == self.process.pid:
                os.kill(pid, signal.SIGKILL)
                return
        raise Refusal("the server has no worker")

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def time_http(args, server, vocab_size):
    clients(args, server.port, server.name, vocab_size, min(2, args.seconds))
    made = clients(args, server.port, server.name, vocab_size, args.seconds)
    taken = max(start + seconds for start, _, seconds, _ in made) - min(start for start, *_ in made)
    failed = sum(ids is None for *_, ids in made)
    ended = [one for one in made if one[3] is not None]
    return summary([one[1] for one in ended], sum(one[3] for one in ended), taken) | {"failed": failed}


def time_kill(args, server, vocab_size):
    killed = []

    def kill(answered):
        time.sleep(2)
        killed.append(time.time())
        server.kill_worker()
        end = time.monotonic() + 180
        while answered.value <= killed[0]:
            if time.monotonic() > end:
                raise Refusal("no request has been answered within 180 s of the kill")
            time.sleep(0.05)

    made = clients(args, server.port, server.name, vocab_size, args.seconds_behind_kill, kill)
    at = killed[0]
    running = [start + taken - at for start, _, taken, _ in made if start < at < start + taken]
    answered = [start + taken for start, _, taken, ids in made if start > at and ids is not None]
    return {
        "requests_under_way": len(running),
        "all_ended_s": max(running, default=0),
        "with_errors": sum(ids is None for start, _, taken, ids in made if start < at < start + taken),
        "next_answer_s": min(answered) - at if answered else None,
        "answered_behind_it": len(answered),
    }


def main(argv):
    try:
        parser = console.Parser(prog=NAME, description=__doc__)
        parser.add_argument("--preset", default="pythia-2.8b", choices=list(model_config.PYTHIA_PRESETS), help="sizes")
        parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="what runs the model (cuda)")
        parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)} (all)")
        parser.add_argument("--clients", type=console.integer(1, 1024), default=64, help="at once (64)")
        parser.add_argument("--new-tokens", type=console.integer(1, 4096), default=128, help="of each request (128)")
        parser.add_argument("--seconds", type=console.integer(1, 3600), default=120, help="of each part (120)")
        parser.add_argument("--seconds-behind-kill", type=console.integer(3, 600), default=20,
                            help="that the clients go on at least; they wait for an answer (20)")  # fmt: skip
        parser.add_argument("--folder", help="where the checkpoint is written (the system's)")
        parser.add_argument("--json", help="a file for the figures")
        args = parser.parse_args(argv)
        args.capacity = MOST_PROMPT + args.new_tokens
        parts = args.parts.split(",")
        for part in parts:
            if part not in PARTS:
                raise Refusal(f"--parts must be of {', '.join(PARTS)}, got {part!r}")
        if args.json:
            golden_file.check_writable(args.json)
        import cf_ops

        if args.device == "cuda" and not cf_ops.cuda_available():
            raise Refusal("cf_ops finds no GPU; python -m cf_ops says what is missing")
        vocab_size = model_config.PYTHIA_PRESETS[args.preset].vocab_size
        report = {
            "program": NAME,
            "command": shlex.join([NAME, *argv]),
            "gpu": cf_ops._core.cuda_device()[0] if args.device == "cuda" else None,
            "version": cf_ops.__version__,
        }

        def tell(part, figures):
            report[part] = figures
            print(f"{part}: {json.dumps(figures)}", flush=True)

        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            path = write_model(folder, args.preset)
            if "decoder" in parts:
                tell("decoder", time_decoder(args, path))
            if {"http", "kill"} & {*parts}:
                with Server(args, path) as server:
                    if "http" in parts:
                        tell("http", time_http(args, server, vocab_size))
                    if "kill" in parts:
                        tell("kill", time_kill(args, server, vocab_size))
        if "decoder" in report and "http" in report:
            alone, http = report["decoder"], report["http"]
            tell("ids_per_s_over_decoder", http["ids_per_s"] / alone["ids_per_s"])
            tell("ttft_ms_more", [http[key] - alone[key] for key in ("ttft_ms_p50", "ttft_ms_p99")])
        if args.json:
            golden_file.write_json(args.json, report)
    except (Refusal, OSError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"{NAME}: {error}; the package cf_ops is needed", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
