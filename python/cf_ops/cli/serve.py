"""``python -m cf_ops serve``: an OpenAI-compatible server on NVIDIA Dynamo."""

from __future__ import annotations

import argparse

from cf_ops.cli import _program as program
from cf_ops.serve import _processes as processes


def declare(parser: argparse.ArgumentParser) -> None:
    processes.declare_worker(parser)
    parser.add_argument("--gpus", type=program.integer(1, 64), metavar="N", help="a worker on each of the first N GPUs")
    parser.add_argument("--workers", type=program.integer(1, 64), metavar="N", help="workers on the CPU (1)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1, this machine alone)")
    parser.add_argument("--port", type=program.integer(1, 65535), default=8000, help="the port of the HTTP API (8000)")
    parser.add_argument(
        "--metrics-port",
        type=program.integer(1, 32000),  # Dynamo takes a port of 15 bits
        metavar="PORT",
        help="worker i's /metrics and /health are at this port + i, on loopback; none when left out",
    )
    parser.add_argument(
        "--body-limit", type=program.integer(1, 4096), default=8, metavar="MB", help="a request's largest body (8 MB)"
    )
    parser.add_argument("--log", type=program.output_file, metavar="FILE", help="append what the front end prints")


def run(args: argparse.Namespace) -> int:
    processes.check_packages()
    if args.devices is not None and args.gpus is not None:
        raise ValueError("--devices: expected without --gpus, which has a worker with the whole model a GPU")
    if args.workers is not None and (args.gpus is not None or args.devices is not None or args.device != "cpu"):
        raise ValueError("--workers: expected on the CPU alone; --gpus has a worker a GPU")
    devices = [args.device] * (args.workers or 1)
    if args.gpus is not None:
        devices = [f"cuda:{number}" for number in range(args.gpus)]
    for args.device in devices:
        program.check_device(args)
    directory = program.model_directory(args)
    processes.check_model(directory)
    processes.check_port(args.host, args.port)
    return processes.Server(args, processes.served_name(args, directory), devices).run()
