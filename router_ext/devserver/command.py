"""``fairlane devserver``: flags, start-up order, readiness and shutdown of the CPU model server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import uvloop

from router_ext.devserver.admission import Admission
from router_ext.devserver.app import App
from router_ext.devserver.chat import ChatTemplate
from router_ext.devserver.codec import Codec
from router_ext.devserver.constraints import compiled
from router_ext.devserver.endpoint import Identity
from router_ext.devserver.engine import Engine
from router_ext.devserver.faults import Faults
from router_ext.devserver.grammars import Grammars
from router_ext.devserver.hazards import Hazards
from router_ext.devserver.http import Connection, Connections
from router_ext.devserver.metrics import Metrics
from router_ext.devserver.runner import Runner
from router_ext.devserver.validation import Constrain, Limits
from router_ext.tgi_model import Batcher, BatchRules, StepTime

_FOLDER = Path(".fairlane/model")
_TORCH_POSITIONS = 8192


DIED = 134
"""Exit status where TGI's process would have died: what a shell makes of an abort."""


def die(why: str) -> None:
    """Ends the process at once."""
    print(f"devserver: {why}", file=sys.stderr, flush=True)
    os._exit(DIED)


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither on nor off")
    return text == "on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags: TGI's own under their own names, everything else as ``--sim-...``."""
    parser.add_argument("--engine", choices=("torch", "model"), default="torch", help="a real small model, or a fake")
    tgi = parser.add_argument_group("TGI's flags")
    tgi.add_argument("--hostname", default="127.0.0.1")
    tgi.add_argument("--port", "-p", type=int, default=3000)
    tgi.add_argument("--model-id", default="SmolLM2-135M-Instruct", help="the name to answer to; the model is fixed")
    tgi.add_argument("--max-concurrent-requests", type=int, default=128)
    tgi.add_argument("--max-best-of", type=int, default=2)
    tgi.add_argument("--max-stop-sequences", type=int, default=4)
    tgi.add_argument("--max-top-n-tokens", type=int, default=5)
    tgi.add_argument("--max-client-batch-size", type=int, default=4)
    tgi.add_argument("--max-input-tokens", "--max-input-length", type=int, default=None)
    tgi.add_argument("--max-total-tokens", type=int, default=4096)
    tgi.add_argument("--max-batch-prefill-tokens", type=int, default=4096)
    tgi.add_argument(
        "--max-batch-total-tokens",
        type=int,
        default=None,
        help="KV budget in tokens; honoured here, while a TGI with a flash model measures its memory and ignores it",
    )
    tgi.add_argument("--max-batch-size", type=int, default=None)
    tgi.add_argument("--waiting-served-ratio", type=float, default=0.3)
    tgi.add_argument("--max-waiting-tokens", type=int, default=20)
    tgi.add_argument("--validation-workers", type=int, default=2)
    tgi.add_argument("--payload-limit", type=int, default=2_000_000)
    tgi.add_argument("--api-key", default=None)
    tgi.add_argument("--cors-allow-origin", action="append", default=[])
    tgi.add_argument("--disable-grammar-support", action="store_true")
    tgi.add_argument("--graceful-termination-timeout", type=float, default=90.0, help="seconds")
    sim = parser.add_argument_group("flags of this server")
    sim.add_argument("--sim-data-dir", type=Path, default=_FOLDER, help="cache of tokenizer and weights")
    sim.add_argument("--sim-chunking", type=_switch, default=True, metavar="on|off", help="chunked prefill")
    sim.add_argument("--sim-block-size", type=int, default=16, help="tokens per KV block; 0 is a padded model")
    sim.add_argument("--sim-prefix-cache", type=_switch, default=False, metavar="on|off")
    _add_switch(sim, "--sim-bos", help="the tokenizer adds BOS")
    _add_switch(sim, "--sim-hazards", help="model engine: grammars have effects from a table and are not compiled")
    sim.add_argument("--sim-compute-type", default="cpu")
    sim.add_argument("--sim-threads", type=int, default=0, help="torch engine: threads; 0 leaves it to torch")
    sim.add_argument("--sim-step-ms", type=float, default=20.0, help="model engine: base of a forward")
    sim.add_argument("--sim-step-sequence-ms", type=float, default=0.0, help="... and per decoding request")
    sim.add_argument("--sim-step-prefill-token-ms", type=float, default=0.0, help="... and per prompt token")
    sim.add_argument("--sim-step-context-token-ms", type=float, default=0.0, help="... and per token of context")
    sim.add_argument("--sim-time-scale", type=float, default=1.0, help="model engine: how much faster time runs")
    sim.add_argument("--sim-mean-tokens", type=int, default=256, help="mean length of an answer; 0 never ends one")
    sim.add_argument(
        "--sim-lengths",
        choices=("mean", "asked"),
        default="mean",
        help="model engine: `asked` answers chats at about the length of the first number in them",
    )
    sim.add_argument("--sim-noncanonical", type=_switch, default=False, metavar="on|off", help="odd token splits")
    sim.add_argument("--sim-special", type=int, default=0, help="a special token every so many; 0 never makes one")
    sim.add_argument("--sim-tokenizer", choices=("smollm2", "toy"), default="smollm2")
    sim.add_argument("--sim-seed", type=int, default=0, help="another fake model")
    sim.add_argument("--sim-control", type=_switch, default=False, metavar="on|off", help="POST /sim/faults")
    for field in fields(Faults):
        name = f"--sim-{field.name.replace('_', '-')}"
        kind: Callable[[str], object] = type(field.default)
        sim.add_argument(name, type=kind, default=field.default, help="fault injection")


def _add_switch(group: argparse._ArgumentGroup, name: str, *, help: str) -> None:
    """A flag that may stand alone, for on."""
    group.add_argument(name, type=_switch, nargs="?", const=True, default=False, metavar="on|off", help=help)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; 1 if the server cannot start."""
    try:
        plan = _plan(args)
        listener = _listen(args.hostname, args.port)
    except StartError as e:
        print(f"devserver: {e}", file=sys.stderr)
        return 1
    with listener:
        try:
            server = _build(args, plan)
        except StartError as e:
            print(f"devserver: {e}", file=sys.stderr)
            return 1
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(_serve(args, server, listener))
    return 0


class StartError(Exception):
    """The server cannot start with these flags on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    limits: Limits
    rules: BatchRules


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    app: App
    admission: Admission
    runner_of: Callable[[], Runner]


def _plan(args: argparse.Namespace) -> _Plan:
    """TGI's start-up checks, with its rules.

    Raises:
        StartError: limits that contradict each other.
    """
    max_total: int = args.max_total_tokens
    max_input: int = max_total - 1 if args.max_input_tokens is None else args.max_input_tokens
    if args.engine == "torch" and args.sim_prefix_cache:
        raise StartError("the torch engine shares no keys and values: --sim-prefix-cache is for --engine model")
    if args.engine == "torch" and max_total > _TORCH_POSITIONS:
        raise StartError(f"the torch engine's model has {_TORCH_POSITIONS} positions. Given: {max_total}")
    if args.engine == "torch" and args.sim_hazards:
        raise StartError("the torch engine compiles what it is sent: --sim-hazards is for --engine model")
    chunking = args.sim_chunking and args.sim_block_size > 0
    batch_total: int = args.max_batch_total_tokens or max(16_000, max_total, args.max_batch_prefill_tokens)
    if max_input >= max_total:
        raise StartError(f"`max_input_tokens` must be < `max_total_tokens`. Given: {max_input} and {max_total}")
    if max_input > args.max_batch_prefill_tokens and not chunking:
        raise StartError(
            "`max_batch_prefill_tokens` must be >= `max_input_tokens`. "
            f"Given: {args.max_batch_prefill_tokens} and {max_input}"
        )
    if args.max_batch_prefill_tokens > batch_total:
        raise StartError(
            "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. "
            f"Given: {args.max_batch_prefill_tokens} and {batch_total}"
        )
    if max_total > batch_total:
        raise StartError(
            f"`max_total_tokens` must be <= `max_batch_total_tokens`. Given: {max_total} and {batch_total}"
        )
    limits = Limits(
        max_concurrent_requests=args.max_concurrent_requests,
        max_best_of=args.max_best_of,
        max_stop_sequences=args.max_stop_sequences,
        max_top_n_tokens=args.max_top_n_tokens,
        max_client_batch_size=args.max_client_batch_size,
        max_input_tokens=max_input,
        max_total_tokens=max_total,
        payload_limit=args.payload_limit,
        validation_workers=args.validation_workers,
        is_grammar_disabled=args.disable_grammar_support,
    )
    rules = BatchRules(
        max_batch_prefill_tokens=args.max_batch_prefill_tokens,
        max_batch_total_tokens=batch_total,
        max_batch_size=args.max_batch_size,
        waiting_served_ratio=args.waiting_served_ratio,
        max_waiting_tokens=args.max_waiting_tokens,
        block_size=args.sim_block_size or None,
        chunking=chunking,
        prefix_cache=args.sim_prefix_cache,
    )
    return _Plan(limits=limits, rules=rules)


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: the port is ours, and refuses until the model is ready.

    Raises:
        StartError: the port is taken, or the address is not ours.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as e:
        listener.close()
        if e.errno == errno.EADDRINUSE:
            raise StartError(f"port {port} on {host} is busy: another program listens there") from e
        raise StartError(f"cannot listen on {host}:{port}: {e.strerror}") from e
    return listener


def _build(args: argparse.Namespace, plan: _Plan) -> _Server:
    """Tokenizer, engine and application."""
    if args.sim_tokenizer == "toy":
        from router_ext.devserver import toy

        if args.engine == "torch":
            raise StartError("the torch engine has a tokenizer of its own; --sim-tokenizer toy is for --engine model")
        codec = Codec(toy.tokenizer())
        template = ChatTemplate(toy.CHAT_TEMPLATE, bos_token=toy.BOS, eos_token=toy.EOS)
        eos_id = toy.EOS_ID
    else:
        from router_ext.devserver import smollm

        tokenizer = smollm.load_tokenizer(args.sim_data_dir, add_bos=args.sim_bos)
        codec = Codec(tokenizer)
        source = smollm.chat_template(args.sim_data_dir)
        template = ChatTemplate(source, bos_token=smollm.BOS, eos_token=smollm.EOS)
        eos_id = smollm.EOS_ID
    engine, step_time = _engine(args, codec, eos_id)
    metrics = Metrics(max_input_tokens=plan.limits.max_input_tokens, max_total_tokens=plan.limits.max_total_tokens)
    faults = Faults(**{f.name: getattr(args, f"sim_{f.name}") for f in fields(Faults)})
    constrain: Constrain = Hazards(codec) if args.sim_hazards else compiled
    admission = Admission(
        limits=plan.limits, codec=codec, metrics=metrics, eos_ids=engine.eos_ids, constrain=constrain, die=die
    )
    identity = Identity(
        model_id=args.model_id,
        compute_type=args.sim_compute_type,
        api_key=args.api_key,
        is_controllable=args.sim_control,
        cors_origins=tuple(args.cors_allow_origin),
    )
    app = App(identity=identity, admission=admission, template=template, faults=faults)

    def make_runner() -> Runner:
        return Runner(
            engine=engine,
            batcher=Batcher(plan.rules),
            metrics=metrics,
            faults=faults,
            step_time=step_time,
            time_scale=args.sim_time_scale,
            grammars=Grammars(codec, eos_id),
            die=die,
            next_piece=admission.next_piece,
            on_finished=admission.finished,
            on_left=admission.left,
        )

    return _Server(app=app, admission=admission, runner_of=make_runner)


def _engine(args: argparse.Namespace, codec: Codec, eos_id: int) -> tuple[Engine, StepTime | None]:
    if args.engine == "torch":
        from router_ext.devserver.torch_engine import TorchEngine

        return TorchEngine(args.sim_data_dir, threads=args.sim_threads or None), None
    from router_ext.devserver.model_engine import ModelEngine

    engine = ModelEngine(
        codec,
        eos_id=eos_id,
        mean_tokens=args.sim_mean_tokens,
        obeys_numbers=args.sim_lengths == "asked",
        noncanonical=args.sim_noncanonical,
        special_every=args.sim_special,
        seed=args.sim_seed,
    )
    return engine, StepTime(
        base_s=args.sim_step_ms / 1000,
        per_sequence_s=args.sim_step_sequence_ms / 1000,
        per_prefill_token_s=args.sim_step_prefill_token_ms / 1000,
        per_context_token_s=args.sim_step_context_token_ms / 1000,
    )


async def _serve(args: argparse.Namespace, server: _Server, listener: socket.socket) -> None:
    """Listen until told to stop; then refuse newcomers at once and let what runs finish."""
    loop = asyncio.get_running_loop()
    app = server.app
    server.admission.runner = runner = server.runner_of()
    connections = Connections()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as tasks:
        stepping = tasks.create_task(runner.run())
        stepping.add_done_callback(lambda _: stop.set())
        listening = await loop.create_server(lambda: Connection(app, loop, connections), sock=listener, backlog=4096)
        host, port = listener.getsockname()[:2]
        print(
            f"devserver: serving {args.model_id} ({args.engine}) on http://{host}:{port}", file=sys.stderr, flush=True
        )
        await stop.wait()
        listening.close()
        for connection in list(connections):
            connection.drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(connections.emptied.wait(), args.graceful_termination_timeout)
        for connection in list(connections):
            connection.transport.abort()
        await app.close()
        stepping.cancel()
    runner.close()
