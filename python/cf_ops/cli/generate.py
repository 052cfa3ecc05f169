"""``python -m cf_ops generate``: continue prompts on the terminal."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from cf_ops._text import encode, open_tokenizer
from cf_ops._chat import ChatTemplate
from cf_ops._generation import MOST_DRAFT, Session, Settings
from cf_ops.cli import _program as program
from cf_ops.model import MOST_SAMPLES, MOST_SLOTS, USUAL_SLOTS


def declare(parser: argparse.ArgumentParser) -> None:
    program.add_model(parser)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="a text")
    prompts.add_argument("--prompts-file", metavar="FILE", help="texts, a line each; empty lines are left out")
    prompts.add_argument(
        "--chat", metavar="TEXT", help="what a user says: the checkpoint's chat template goes around it"
    )
    prompts.add_argument("--prompt-ids", type=_ids, metavar="IDS", help='ids such as 1,2,3, several prompts by ";"')
    parser.add_argument("--max-new-tokens", type=program.integer(1, 1 << 20), default=32, metavar="N")
    parser.add_argument(
        "--min-new-tokens", type=program.integer(0, 1 << 20), default=0, metavar="N", help="no stop id before so many"
    )
    parser.add_argument("--n", type=program.integer(1, MOST_SAMPLES), default=1, help="samples of each prompt")
    parser.add_argument(
        "--slots", type=program.integer(1, MOST_SLOTS), help="prompts that decode at once; the others wait"
    )
    program.add_streams(parser)
    program.add_serving(parser)
    parser.add_argument(
        "--draft",
        choices=["lookup"],
        help="drafts ids that a step verifies together, as the text went on behind its last ids before; the ids are the "
        "same, on a GPU with --invariant, on the CPU up to 8 slots or with it",
    )
    parser.add_argument(
        "--draft-len",
        type=program.integer(1, MOST_DRAFT),
        default=MOST_DRAFT,
        metavar="N",
        help="ids of a draft, at most; drafts are shorter and rare where few of them are right",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 for the most likely token")
    parser.add_argument("--top-k", type=program.integer(0, 2**31 - 1), default=0, help="keep so many tokens, 0 for all")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the fewest that reach this probability")
    parser.add_argument("--min-p", type=float, default=0.0, help="keep those of this share of the largest probability")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="of ids that were seen")
    parser.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X", help="by how often an id was made")
    parser.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="of ids that were made")
    parser.add_argument(
        "--logit-bias", type=_biases, default={}, metavar="BIASES", help="by id, such as 50256:-inf,11:2.5"
    )
    parser.add_argument("--seed", type=program.integer(0, 2**64 - 1), default=0, help="seed of the draws")
    parser.add_argument("--stop", type=_stop, help="ids that end a text, or none; the checkpoint's when left out")
    parser.add_argument(
        "--stop-text", action="append", default=[], metavar="TEXT", help="ends a text where it appears; may be repeated"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="the checkpoint's eos_token_id does not end a text")
    parser.add_argument(
        "--logprobs",
        type=program.integer(0, 2**31 - 1),
        metavar="K",
        help="the log-probabilities of the new ids and of the K likeliest go to --json",
    )
    parser.add_argument("--echo", action="store_true", help="the prompt comes first")


def run(args: argparse.Namespace) -> int:
    settings = Settings(
        max_new_tokens=args.max_new_tokens,
        min_new_tokens=args.min_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        frequency_penalty=args.frequency_penalty,
        presence_penalty=args.presence_penalty,
        logit_bias=args.logit_bias,
        seed=args.seed,
        stop=args.stop_text or None,
        ignore_eos=args.ignore_eos,
        logprobs=args.logprobs,
        echo=args.echo,
        draft=args.draft,
        draft_len=args.draft_len,
    )
    if args.stop is not None:
        settings.stop_ids = args.stop
    if args.chat is not None and args.echo:
        raise ValueError("--echo: expected it with --prompt, --prompts-file or --prompt-ids, got it with --chat")
    prompts = _prompts(args)
    sequences = len(prompts) * args.n
    slots, capacity = args.slots or min(USUAL_SLOTS, sequences), 0
    if program.check_device(args) is not None:  # a GPU's cache gets its sizes when the model is loaded
        directory = program.model_directory(args)
        lengths = [len(encode(open_tokenizer(directory), p) if isinstance(p, str) else p) for p in prompts]
        capacity = max(lengths) + args.max_new_tokens - 1
    opened = time.perf_counter()
    model = program.open_model(args, slots, capacity)
    load_s = time.perf_counter() - opened
    streams = sequences == 1
    session = Session(model, prompts, settings, args.slots, streams, args.n, args.chat is not None)
    if not args.window and session.capacity > (most := model.config["max_position_embeddings"]):
        beyond = (
            f"positions beyond max_position_embeddings {most} are used as Hugging Face does, up to {session.capacity}"
        )
        print(f"{program.PROGRAM}: {beyond}", file=sys.stderr)
    is_text = not args.prompt_ids
    added = {index: 0.0 for index in range(min(session.slots, sequences))}
    first_s = [0.0] * sequences
    last_s: dict[int, float] = {}
    shown: set[int] = set()
    start = time.perf_counter()
    interrupted = False

    def show_ended() -> None:
        for index, result in enumerate(session.results):
            if result.finish == "running" or index in shown:
                continue
            shown.add(index)
            result.text = session.text(index)
            if streams:
                print(flush=True)
            else:
                text = ",".join(map(str, result.ids)) if result.text is None else result.text
                if args.echo and result.text is None:
                    text = ",".join(map(str, [*result.prompt, *result.ids]))
                prompt, sample = divmod(index, args.n)
                print(f"{prompt}: {text}" if args.n == 1 else f"{prompt}.{sample}: {text}", flush=True)

    if streams and args.echo:
        print(prompts[0] if is_text else ",".join(map(str, prompts[0])), end="", flush=True)
    try:
        while not session.done:
            before = time.perf_counter() - start
            for index, id, piece in session.step():
                is_first = index not in last_s
                added.setdefault(index, before)
                last_s[index] = time.perf_counter() - start - added[index]
                if is_first:
                    first_s[index] = last_s[index]
                if streams:
                    comma = "" if is_first and not args.echo else ","
                    print(piece if is_text else comma + str(id), end="", flush=True)
            show_ended()
    except KeyboardInterrupt:
        session.interrupt()  # where it came between two steps
        interrupted = True
        show_ended()
    total_s = time.perf_counter() - start

    results = session.results
    ends_s = [last_s.get(index, 0.0) for index in range(sequences)]
    print(_summary(len(prompts), [len(r.ids) for r in results], first_s, ends_s, total_s), file=sys.stderr)
    if args.draft is not None:
        drafted, accepted = (sum(getattr(r, name) or 0 for r in results) for name in ("drafted", "accepted"))
        print(f"drafts: {drafted} ids, {accepted} accepted", file=sys.stderr)
    for index, result in enumerate(results):
        if result.finish == "failed":
            print(f"{program.PROGRAM}: prompt {index // args.n}: {result.error}", file=sys.stderr)
    described: list[dict[str, Any]] = []
    for result, first, last in zip(results, first_s, ends_s):
        sequence: dict[str, Any] = {"prompt": result.prompt, "ids": result.ids, "finish": result.finish}
        sequence |= {"first_token_s": first, "total_s": last}
        sequence |= {"text": result.text} if result.text is not None else {}
        sequence |= {"fault": result.error} if result.error is not None else {}
        if result.drafted is not None:
            sequence |= {"drafts": {"drafted": result.drafted, "accepted": result.accepted}}
        if result.logprobs is not None:
            sequence |= {"logprobs": result.logprobs, "top_logprobs": result.top_logprobs}
        described.append(sequence)
    report = program.about("generate", args, model)
    report |= {"slots": session.slots, "capacity": session.capacity, "load_s": load_s, "total_s": total_s}
    report |= {"sequences": described}
    program.write_json(args.json, report)
    if interrupted:
        return program.INTERRUPTED
    return program.BAD_INPUT if any(r.finish == "failed" for r in results) else program.OK


def _summary(prompts: int, counts: list[int], first_s: list[float], last_s: list[float], total_s: float) -> str:
    later = sum(max(0, n - 1) for n in counts)
    text = f"{prompts} prompts, {sum(counts)} new tokens in {total_s:.2f} s: first token after "
    text += f"{1e3 * sum(first_s) / len(counts):.1f} ms on average"
    if later:
        text += f", then {1e3 * (sum(last_s) - sum(first_s)) / later:.2f} ms a token"
    return text + f", {sum(counts) / total_s:.1f} tokens/s"


def _prompts(args: argparse.Namespace) -> list[str] | list[list[int]]:
    if args.prompt_ids:
        ids: list[list[int]] = args.prompt_ids
        return ids
    if args.chat is not None:
        directory = program.model_directory(args)
        chat = ChatTemplate.open(directory).render([{"role": "user", "content": args.chat}], True, {})
        return [encode(open_tokenizer(directory), chat, "--chat", special_tokens=False)]
    if args.prompt is not None:
        return [args.prompt]
    texts = [line for line in program.read_text(args.prompts_file).split("\n") if line]
    if not texts:
        raise ValueError(f"{args.prompts_file}: expected a text on a line, got none")
    return texts


def _ids(text: str) -> list[list[int]]:
    one = program.integers(0, 2**31 - 1)
    return [one(prompt) for prompt in text.split(";")]


def _biases(text: str) -> dict[int, float]:
    biases = {}
    for part in text.split(","):
        id, _, bias = part.partition(":")
        try:
            biases[program.integer(0, 2**31 - 1)(id)] = float(bias)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected biases by id, such as 11:2.5,12:-inf, got {part!r}") from None
    return biases


def _stop(text: str) -> list[int]:
    return [] if text == "none" else program.integers(0, 2**31 - 1)(text)
