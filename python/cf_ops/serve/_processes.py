"""The processes of a server: a front end and workers, started, watched and ended together."""

from __future__ import annotations

import argparse
import ctypes
import glob
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from typing import IO, Any

from cf_ops.cli import _program as program
from cf_ops.model import CAPACITY

DYNAMO = "1.6.1"  # the version that is tested
_MODULES = ("dynamo.frontend", "dynamo.common.backend", "prometheus_client", "msgspec", "uvloop", "transformers", "zmq")
_LOOPBACK = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_SYSTEM_HOST", "DYN_EVENT_PLANE_HOST")
_MOST_RESTARTS, _RESTART_WINDOW = 5, 60.0  # so many restarts in so many seconds
_END = 10.0  # seconds that a process may take to end when it has nothing to do
_SETTLE = 0.1  # seconds between two looks at the processes


def declare_worker(parser: argparse.ArgumentParser) -> None:
    """Declares the options of a worker."""
    program.add_model(parser, json=False)
    parser.add_argument("--slots", type=program.integer(1, 1024), default=16, help="sequences that run at once (16)")
    parser.add_argument(
        "--capacity",
        type=program.integer(1, 1 << 24),
        metavar="N",
        help=f"ids that a prompt and its continuation may have together (the model's positions, {CAPACITY} at most)",
    )
    parser.add_argument(
        "--queue",
        type=program.integer(0, 1 << 20),
        default=256,
        metavar="N",
        help="sequences that may wait for a slot (256); more are refused with HTTP 429",
    )
    parser.add_argument(
        "--drain",
        type=program.integer(0, 86400),
        default=60,
        metavar="SECONDS",
        help="what runs may take so long to end after SIGTERM (60)",
    )
    program.add_serving(parser)
    parser.add_argument(
        "--echo", action="store_true", help="on a GPU: one slot more, for log-probabilities of prompts (echo)"
    )
    parser.add_argument("--name", help="what clients call the model; the folder's name when left out")


def check_packages() -> None:
    """Raises ImportError with the command that installs what is missing."""
    for module in _MODULES:
        try:
            missing = importlib.util.find_spec(module) is None
        except ImportError:  # of a package above it
            missing = True
        if missing:
            raise ImportError(
                f"serving needs NVIDIA Dynamo {DYNAMO}, of which {module} is missing: pip install 'cf-ops[serve]' && "
                f"pip install --no-deps ai-dynamo=={DYNAMO}"
            )


def check_model(directory: str) -> None:
    """Refuses a model that a front end has no tokenizer for, such as a preset."""
    if not os.path.isdir(directory):
        raise FileNotFoundError(f"{directory}: no such directory, expected a checkpoint's")
    path = os.path.join(directory, "tokenizer.json")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such file, expected the tokenizer of a checkpoint that is served")


def default_capacity(directory: str) -> int:
    """The entries of a sequence where nothing is said: CAPACITY, or the model's positions where these are fewer."""
    try:
        with open(os.path.join(directory, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        positions = config.get("max_position_embeddings") or config.get("n_positions") or CAPACITY  # the second: GPT-2
        return min(CAPACITY, int(positions))
    except (OSError, ValueError, TypeError, AttributeError):  # the model's reader says what is wrong
        return CAPACITY


def drain_limits(drain: int) -> dict[str, str]:
    """The variables of Dynamo's that let a worker drain for so many seconds: by itself it ends after 30."""
    names = ("DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS")
    return {name: str(drain + int(_END)) for name in names}


def served_name(args: argparse.Namespace, directory: str) -> str:
    """What clients call the model: --name, the hub's name, or the folder's."""
    return args.name or (args.model if args.revision else os.path.basename(os.path.realpath(directory)))


def check_port(host: str, port: int) -> None:
    """Refuses an address that cannot be listened on, such as a port that is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the front end does
            listener.bind(address)
    except OSError as error:
        raise OSError(f"--host {host} --port {port}: {error.strerror or error}") from None


def forget_unreachable(folder: str) -> None:
    """Removes the workers that nobody listens for from Dynamo's discovery by files. Dynamo itself would send them
    requests for ten seconds more, which fail."""
    for path in glob.glob(os.path.join(glob.escape(folder), "v1", "instances", "*")):
        try:
            with open(path, encoding="utf-8") as file:
                address = json.load(file)["transport"]["tcp"].partition("/")[0]
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=1).close()
        except ConnectionRefusedError:
            os.unlink(path)
        except (OSError, ValueError, KeyError, TypeError):  # another layout: ten seconds, then
            continue


class Child:
    """A process that ends when this one does. log: a file for what it prints; this process's streams where None."""

    def __init__(
        self, label: str, module: str, arguments: list[str], environment: dict[str, str], log: IO[bytes] | None = None
    ) -> None:
        self.label = label
        self._log = log
        self._command = [sys.executable, "-m", module, *arguments]
        self._environment = environment
        self._restarts: list[float] = []
        self.start()

    def start(self) -> None:
        # A session of its own: Ctrl-C at a terminal comes to this process alone, which ends the others in their order.
        self.process = subprocess.Popen(
            self._command,
            env=os.environ | self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self.process.poll()

    def may_restart(self) -> bool:
        """Whether it may be started anew: a few times a minute."""
        now = time.monotonic()
        self._restarts = [t for t in self._restarts if now - t < _RESTART_WINDOW] + [now]
        return len(self._restarts) <= _MOST_RESTARTS

    def signal(self, number: int) -> None:
        if self.code is None:
            self.process.send_signal(number)

    def how_it_ended(self) -> str:
        code = self.process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def _end_with_parent() -> None:
    """In a child before its program starts: SIGTERM comes when the parent has ended, however that came."""
    set_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGTERM)


class Server:
    """A front end and workers. run() returns when a signal or a fault has ended all of them."""

    def __init__(self, args: argparse.Namespace, name: str, devices: list[str]) -> None:
        self._args, self._name, self._devices = args, name, devices
        self._ending = 0  # the number of signals that asked for the end

    def run(self) -> int:
        # The front end prints a line of a kilobyte for each request, which nothing turns off.
        log = open(self._args.log or os.devnull, "ab")
        folder = tempfile.mkdtemp(prefix="cf_ops-serve-")
        handlers = {number: signal.signal(number, self._end) for number in (signal.SIGTERM, signal.SIGINT)}
        children: list[Child] = []
        try:
            return self._run(folder, children, log)
        finally:
            for child in children:
                child.signal(signal.SIGKILL)
                child.process.wait()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            shutil.rmtree(folder, ignore_errors=True)
            log.close()

    def _run(self, folder: str, children: list[Child], log: IO[bytes]) -> int:
        args = self._args
        environment = {
            "DYN_FILE_KV": folder,  # where the processes find each other
            "DYN_SELF_HOST_METADATA": "0",  # else a worker's own port is part of what all must have in common
            "DYN_LOG": os.environ.get("DYN_LOG", "error"),
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": os.environ.get("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "0"),
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        }
        environment |= {name: os.environ.get(name, "127.0.0.1") for name in _LOOPBACK}
        workers = []
        for number, device in enumerate(self._devices):
            port = {} if args.metrics_port is None else {"DYN_SYSTEM_PORT": str(args.metrics_port + number)}
            label = f"worker {number}" if len(self._devices) > 1 else "the worker"
            workers.append(Child(label, "cf_ops.dynamo", self._worker_arguments(device), environment | port))
            children.append(workers[-1])
        front_arguments = ["--http-host", args.host, "--http-port", str(args.port), "--discovery-backend", "file"]
        front_arguments += ["--request-plane", "tcp", "--migration-limit", "0"]
        limits = {"DYN_HTTP_BODY_LIMIT_MB": str(args.body_limit), "DYN_HTTP_OVERLOAD_STATUS_CODE": "429"}
        front = Child("the front end", "dynamo.frontend", front_arguments, environment | limits, log)
        children.append(front)

        code = self._watch(folder, front, workers)
        # Workers first: they finish what they have begun, and the front end passes it on.
        for part in (workers, [front]):
            self._end_all(part)
        return code

    def _watch(self, folder: str, front: Child, workers: list[Child]) -> int:
        """Looks after the processes until a signal comes; returns the exit code."""
        served = False
        while not self._ending:
            if not served and (served := self._is_served()):
                pids = ", ".join(f"pid {child.process.pid}: {child.label}" for child in [front, *workers])
                print(f"{program.PROGRAM}: {self._name} is served at {self._address()}/v1 ({pids})", flush=True)
            if front.code is not None:
                return program.fail(f"the front end has ended with {front.how_it_ended()}; --log FILE keeps its words")
            for worker in workers:
                if worker.code is None:
                    continue
                how = worker.how_it_ended()
                if worker.code == program.BAD_INPUT:  # it has said why
                    return program.BAD_INPUT
                if not worker.may_restart():
                    return program.fail(f"{worker.label} has ended with {how}, too often to start it again")
                forget_unreachable(folder)
                worker.start()
                program.fail(f"{worker.label} has ended with {how} and is started again, pid {worker.process.pid}")
            time.sleep(_SETTLE)
        return program.OK

    def _worker_arguments(self, device: str) -> list[str]:
        args = self._args
        given = [("--model", args.model), ("--revision", args.revision), ("--device", device), ("--impl", args.impl)]
        given += [("--activation", args.activation), ("--threads", args.threads), ("--slots", args.slots)]
        given += [("--capacity", args.capacity), ("--queue", args.queue), ("--drain", args.drain)]
        given += [("--pages", args.pages), ("--page-entries", args.page_entries), ("--step-tokens", args.step_tokens)]
        given += [("--name", self._name), ("--devices", ",".join(map(str, args.devices or [])) or None)]
        flags = [("--share-prefixes", args.share_prefixes), ("--invariant", args.invariant), ("--echo", args.echo)]
        words = [word for name, value in given if value is not None for word in (name, str(value))]
        return words + [name for name, is_set in flags if is_set]

    def _address(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._args.host, self._args.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self._args.port}"

    def _is_served(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._address()}/v1/models", timeout=5) as answer:
                return any(model["id"] == self._name for model in json.load(answer)["data"])
        except (OSError, urllib.error.URLError, ValueError, KeyError):
            return False

    def _end(self, number: int, frame: Any) -> None:
        self._ending += 1

    def _end_all(self, children: list[Child]) -> None:
        """Sends SIGTERM and waits until all have ended, or a second signal came, or they take too long."""
        for child in children:
            child.signal(signal.SIGTERM)
        end = time.monotonic() + self._args.drain + _END
        while any(child.code is None for child in children) and time.monotonic() < end and self._ending < 2:
            time.sleep(_SETTLE)
