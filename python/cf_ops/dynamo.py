"""``python -m cf_ops.dynamo --model DIR``: one worker of NVIDIA Dynamo's, without a front end.

It registers the model with Dynamo's discovery, and any ``python -m dynamo.frontend`` that looks there sends it
requests. Its options are those of ``python -m cf_ops serve`` that a worker has, and where Dynamo's parts meet.
``cf_ops serve`` starts this program for a single machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from typing import Any

from cf_ops import _core
from cf_ops.cli import _program as program
from cf_ops.model import PAGE_ENTRIES, Model
from cf_ops.serve import _processes as processes
from cf_ops.serve._batcher import Batcher, Fault, Full, Job, Logprob, Piece
from cf_ops.serve._request import Asked, Refused, read_request

_BLOCK = 16  # entries; Dynamo counts a cache in blocks
_LAST_WORDS = 2.0  # seconds in which clients hear that a drain is over
_SWITCH = 0.0005  # seconds that the event loop may keep the decoder's thread from its next step

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Runs a worker until SIGTERM or SIGINT; returns the exit code: 0, 1 where Dynamo fails, or 2 for bad input and a
    missing package."""
    parser = program.Parser(prog="python -m cf_ops.dynamo", description="One worker of NVIDIA Dynamo's.")
    processes.declare_worker(parser)
    parser.add_argument("--namespace", default="cf_ops", help="of Dynamo's; a front end serves the workers of one")
    parser.add_argument(
        "--discovery-backend", default="file", help="where workers and front ends meet: file, etcd or kubernetes"
    )
    args = parser.parse_args(argv)
    try:
        processes.check_packages()
        worker = make_worker(args)
    except KeyboardInterrupt:
        return program.INTERRUPTED
    except (ValueError, OSError, ImportError, MemoryError, NotImplementedError, _core.CfError) as error:
        return program.fail(program.message_of(error))
    import uvloop  # type: ignore[import-not-found, unused-ignore]

    os.environ |= processes.drain_limits(args.drain)
    sys.setswitchinterval(_SWITCH)
    try:
        uvloop.run(worker.run())
    except Exception as error:  # Dynamo's have no class of their own
        program.fail(f"Dynamo has failed: {error}")
        return program.CHECK_FAILED
    return program.OK


def make_worker(args: argparse.Namespace) -> Any:
    """Loads the model; returns Dynamo's worker for it. What is wrong with the model is raised before Dynamo starts."""
    from dynamo.common.backend import Worker, WorkerConfig  # type: ignore[import-not-found, unused-ignore]

    directory = os.path.abspath(program.model_directory(args))  # a front end elsewhere reads the tokenizer there
    processes.check_model(directory)
    capacity = args.capacity or processes.default_capacity(directory)
    on_gpu_with_echo = args.echo and (args.devices is not None or args.device != "cpu")
    model = program.open_model(args, args.slots + on_gpu_with_echo, capacity)
    name = processes.served_name(args, directory)
    engine = _engine_class()(model, name, capacity, args)
    kinds = "completions,chat" if has_chat_template(directory) else "completions"
    config = WorkerConfig(
        namespace=args.namespace,
        component="worker",
        model_name=directory,
        served_model_name=name,
        endpoint_types=kinds,
        discovery_backend=args.discovery_backend,
        request_plane="tcp",
        enable_kv_routing=False,
    )
    return Worker(engine, config)


def has_chat_template(directory: str) -> bool:
    """Whether the checkpoint's tokenizer_config.json has a chat template: Dynamo cannot serve a chat without one."""
    try:
        with open(os.path.join(directory, "tokenizer_config.json"), encoding="utf-8") as file:
            return bool(json.load(file).get("chat_template"))
    except (FileNotFoundError, ValueError, AttributeError):
        return False


def _logprobs(piece: Piece) -> dict[str, Any]:
    """A piece's log-probabilities as Dynamo has them; its front end knows the tokens' texts."""
    if piece.logprobs is None:
        return {}
    top = [
        [
            {"rank": rank, "token_id": id, "token": None, "logprob": value}
            for rank, (id, value) in enumerate(likeliest, 1)
        ]
        for _, likeliest in piece.logprobs
    ]
    return {"log_probs": [value for value, _ in piece.logprobs], "top_logprobs": top}


def _engine_class() -> Any:
    """The engine's class, whose base is Dynamo's."""
    from dynamo.common.backend import (  # type: ignore[import-not-found, unused-ignore]
        EngineConfig,
        LLMEngine,
        LlmRegistration,
        health_check,
        metrics,
    )
    from dynamo.common.utils import token_ids  # type: ignore[import-not-found, unused-ignore]
    from dynamo.llm import exceptions  # type: ignore[import-not-found, unused-ignore]

    from cf_ops.serve._metrics import Metrics

    class Engine(LLMEngine):  # type: ignore[misc, unused-ignore]
        """A model as Dynamo's backend: `generate` hands a request's sequences to the batcher and passes on what it
        makes."""

        def __init__(self, model: Model, name: str, capacity: int, args: argparse.Namespace) -> None:
            self._model, self._name, self._capacity = model, name, capacity
            self._slots, self._queue, self._drain = args.slots, args.queue, args.drain
            self._scoring = asyncio.Lock()
            self._entries = args.pages * (args.page_entries or PAGE_ENTRIES) if args.pages else args.slots * capacity
            self._metrics = Metrics(args.slots, args.pages or 0)
            self._batcher: Batcher | None = None
            self._jobs: dict[str, list[Job]] = {}  # by Dynamo's id of a request

        @classmethod
        async def from_args(cls, argv: list[str] | None = None) -> Any:
            raise NotImplementedError("the model is loaded before the engine is made: python -m cf_ops.dynamo")

        async def start(self, worker_id: int) -> Any:
            decoder = self._model.decoder(self._slots, self._capacity)
            self._batcher = Batcher(decoder, self._slots, self._queue, self._metrics, self._end_process)
            registration = LlmRegistration(
                context_length=self._capacity,
                kv_cache_block_size=_BLOCK,
                total_kv_blocks=self._entries // _BLOCK,
                max_num_seqs=self._slots,
                max_num_batched_tokens=self._capacity,
            )
            return EngineConfig(
                model=os.path.abspath(self._model.directory), served_model_name=self._name, llm=registration
            )

        async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
            token_ids.normalize_request_token_ids(request)
            try:
                asked = read_request(request, self._capacity, self._slots + self._queue)
            except Refused as error:
                raise exceptions.InvalidArgument(str(error)) from None
            pieces: asyncio.Queue[Piece] = asyncio.Queue()
            jobs = [Job(choice, asked.prompt, options, pieces) for choice, options in enumerate(asked.options)]
            if self._batcher is None:
                raise exceptions.EngineShutdown("the worker has ended")
            self._jobs[context.id()] = jobs
            try:
                self._batcher.submit(jobs)
                if asked.echo:
                    echo = await self._echo(asked)
                    for job in jobs:
                        yield echo | {"index": job.choice}
                async for chunk in self._chunks(jobs, pieces):
                    yield chunk
            except Full as error:
                raise exceptions.HttpError(429, str(error)) from None
            except Fault as error:
                raise exceptions.EngineShutdown(str(error)) from None
            finally:
                self._jobs.pop(context.id(), None)
                if self._batcher is not None:
                    self._batcher.cancel(jobs)

        async def _echo(self, asked: Asked) -> dict[str, Any]:
            """A chunk with the prompt, whose ids have log-probabilities where they are asked for."""
            top = asked.options[0]["logprobs"]
            if top is None:
                return {"token_ids": asked.prompt}
            scores: list[Logprob] = [(0.0, [])]  # the front end takes numbers alone: of the first id, which has none
            if len(asked.prompt) > 1:
                if self._model.slots is not None and self._model.slots == self._slots:
                    raise exceptions.InvalidArgument(
                        "echo: expected it without logprobs, which take a slot of the GPU that this server was started "
                        "without: --echo"
                    )
                async with self._scoring:
                    (score,) = await asyncio.to_thread(self._model.score, [asked.prompt], top=top, slots=1)
                if score.error is not None:
                    raise exceptions.Unknown(score.error)
                likely = zip(score.top_ids.tolist(), score.top_log_probs.tolist())
                scores += [(own, list(zip(*pair))) for own, pair in zip(score.log_probs.tolist(), likely)]
            return {"token_ids": asked.prompt, **_logprobs(Piece(0, asked.prompt, logprobs=scores))}

        async def _chunks(self, jobs: list[Job], pieces: asyncio.Queue[Piece]) -> AsyncGenerator[Any, None]:
            """The answer. Dynamo ends a request with the first chunk that has a finish_reason: it comes last, with the
            usage of all choices."""
            running, made = len(jobs), 0
            while True:
                piece = await pieces.get()
                while len(jobs) == 1 and piece.finish is None and not pieces.empty():
                    piece = piece.then(pieces.get_nowait())  # a busy loop passes on fewer and longer chunks
                if piece.finish == "refused":
                    raise exceptions.InvalidArgument(piece.error)
                if piece.finish == "failed":
                    raise exceptions.Unknown(piece.error)
                if piece.finish == "ended":
                    raise exceptions.EngineShutdown("the worker has ended, and this request took longer than --drain")
                made += len(piece.ids)
                chunk: dict[str, Any] = {"token_ids": piece.ids, "index": piece.choice, **_logprobs(piece)}
                if piece.finish == "cancelled":
                    running = 0
                elif piece.finish is not None:
                    running -= 1
                if running and piece.ids:
                    yield chunk
                elif not running:
                    prompt = len(jobs[0].prompt)
                    usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
                    yield chunk | {"finish_reason": piece.finish, "completion_usage": usage}
                    return

        async def abort(self, context: Any) -> None:
            """The client has left: frees the slots of all choices and ends generate()."""
            jobs = self._jobs.get(context.id())
            if jobs is None or self._batcher is None:
                return
            self._batcher.cancel(jobs)
            jobs[0].pieces.put_nowait(Piece(0, [], "cancelled"))

        async def cleanup(self) -> None:
            """Lets what runs end, then gives everything back. The worker gets no new requests any more."""
            await self._await_no_jobs(self._drain)
            if self._batcher is not None and self._jobs:
                for jobs in self._jobs.values():
                    self._batcher.cancel(jobs)
                    jobs[0].pieces.put_nowait(Piece(0, [], "ended"))
                await self._await_no_jobs(_LAST_WORDS)
            if self._batcher is not None:
                batcher, self._batcher = self._batcher, None
                await asyncio.to_thread(batcher.close)
                self._model.close()

        async def _await_no_jobs(self, seconds: float) -> None:
            end = asyncio.get_running_loop().time() + seconds
            while self._jobs and asyncio.get_running_loop().time() < end:
                await asyncio.sleep(0.02)

        async def health_check_payload(self) -> Any:
            return health_check.build_health_check_payload(bos_token_id=(self._model.eos_token_ids or [0])[0])

        async def register_prometheus(self, engine_metrics: Any) -> None:
            metrics.register_engine_registry(engine_metrics, self._metrics.registry)

        def _end_process(self, fault: str) -> None:
            """Ends the worker, which serves no more; who started it starts another one."""
            program.fail(fault)
            os.kill(os.getpid(), signal.SIGTERM)

    return Engine


if __name__ == "__main__":
    sys.exit(main())
