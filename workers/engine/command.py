"""`evenhand engine`: a simulated engine for trying a deployment out, for demonstrations and measurements.

Owns the command's options and the life of the process: listen, say where, register at the proxy the way
LMDeploy's api_server does, end on a signal and be registered no more. The server is `server`, one connection `http`,
what it says `answers`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import aiohttp

from app.errors import BadRequest
from app.nodes import Role, normalise_url
from app.terminal import arguments
from workers.engine.answers import Knobs
from workers.engine.encoder import EncoderEngine
from workers.engine.lmdeploy import LmdeployEngine
from workers.engine.server import Engine

REGISTER_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 2.0  # for the way out of the registry: nobody who ends a program waits longer for that
BACKOFF_S = (0.2, 1.0)  # first and longest pause between two tries to register
GRACE_S = 3.0  # running answers may go on for so long after a signal; a second signal ends them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port",
        type=arguments.whole_number(0, 65535),
        default=0,
        help="port to listen on; 0, the default: any free one",
    )
    parser.add_argument("--model", nargs="+", default=["sim"], help="names of the models served (default: sim)")
    parser.add_argument(
        "--ttft-s", type=arguments.seconds(), default=0.05, help="to the first chunk, s (default: %(default)s)"
    )
    parser.add_argument(
        "--gap-s", type=arguments.seconds(), default=0.02, help="between chunks, s (default: %(default)s)"
    )
    parser.add_argument(
        "--chunks",
        type=arguments.whole_number(),
        default=16,
        help="chunks of an answer, at most (default: %(default)s)",
    )
    parser.add_argument("--text", default="token", help="what the chunks say (default: %(default)s)")
    parser.add_argument("--key", default="", help="ask for this key on every path")
    parser.add_argument(
        "--proxy-url", type=_node_url, help="register at this distributor, such as http://127.0.0.1:8000"
    )
    # As in `evenhand nodes`: the key from the environment is read when it is used, never a default.
    parser.add_argument(
        "--admin-key", metavar="KEY", help="admin key of the distributor, where it asks for one; env EVENHAND_ADMIN_KEY"
    )
    parser.add_argument("--url", help="the address to register, where others reach it by another than --host")
    parser.add_argument(
        "--role",
        type=arguments.role,
        default=Role.Hybrid,
        help="Hybrid, Prefill, Decode, Encode (an encoder) or 1 to 4",
    )
    parser.add_argument(
        "--pd-protocol",
        choices=["lmdeploy"],
        help="speak DistServe, with books of sessions and links at GET /sim/books; --role is Prefill or Decode",
    )
    parser.add_argument("--speed", type=arguments.speed, help="the node's speed, any unit, the same for all nodes")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM, SIGINT or `GET /terminate`; the exit code."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_serve(args))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(args))


async def _serve(args: argparse.Namespace) -> int:
    told_to_end = asyncio.Event()
    told_again = asyncio.Event()

    def end() -> None:
        (told_again if told_to_end.is_set() else told_to_end).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)

    knobs = Knobs(
        models=tuple(args.model),
        ttft_s=args.ttft_s,
        gap_s=args.gap_s,
        chunks=args.chunks,
        text=args.text,
        key=args.key,
        own_id=False,
    )
    try:
        engine = _engine(args, knobs, end)
        await engine.start()
    except ValueError as e:
        print(f"evenhand engine: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"evenhand engine: can't listen on {args.host}:{args.port}: {e.strerror or e}", file=sys.stderr)
        return 1
    print(f"simulated engine at {engine.url}", flush=True)

    registration = asyncio.create_task(_register(args, engine)) if args.proxy_url else None
    await told_to_end.wait()
    if registration is not None:
        registration.cancel()
        (registered,) = await asyncio.gather(registration, return_exceptions=True)
        # Where it was just trying, the distributor may know it already.
        if registered is not False:
            await _leave(args, engine)  # while it listens: what is sent here until then is served
    await engine.stop_listening()
    deadline_s = loop.time() + GRACE_S
    while engine.stats.in_flight and not told_again.is_set() and loop.time() < deadline_s:
        await asyncio.sleep(0.02)
    await engine.close()
    return 0


def _engine(args: argparse.Namespace, knobs: Knobs, end: Callable[[], None]) -> Engine:
    """Raises ValueError (a role that the protocol doesn't have) or OSError (the port is taken)."""
    options: dict[str, Any] = {"host": args.host, "port": args.port, "keep_records": False, "on_terminate": end}
    engine: LmdeployEngine | EncoderEngine
    if args.pd_protocol is not None:
        engine = LmdeployEngine(args.role, None, knobs, **options)
    elif args.role is Role.Encode:
        engine = EncoderEngine(knobs, **options)
    else:
        return Engine(knobs, **options)
    engine.known_as = _url_of(args, engine)
    return engine


def _url_of(args: argparse.Namespace, engine: Engine) -> str:
    """The address by which others know it."""
    plain = engine.url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    return str(args.url or plain)


async def _register(args: argparse.Namespace, engine: Engine) -> bool:
    """Post once what LMDeploy's api_server posts when it starts; try again only while nothing answers.

    Returns whether it is registered; not where it was refused.

    Source: lmdeploy/serve/openai/api_server.py, `startup_event`: no key, {url, status: {models, role}}.
    `speed` is of the same Status object; api_server itself never sends it, and no key either.
    """
    status: dict[str, object] = {"models": list(args.model), "role": int(args.role)}
    if args.speed is not None:
        status["speed"] = args.speed
    target, body = _management(args, "add"), {"url": _url_of(args, engine), "status": status}
    pause_s, longest_s = BACKOFF_S
    told = False
    async with _session(args, REGISTER_TIMEOUT_S) as session:
        while True:
            try:
                async with session.post(target, json=body) as answer:
                    if answer.status == 200:
                        print(f"registered at {args.proxy_url}", flush=True)
                        return True
                    if answer.status < 500:
                        await _tell_refusal(target, answer)
                        return False
            except (aiohttp.ClientError, TimeoutError, OSError) as e:
                if not told:
                    told = True
                    reason = e or type(e).__name__
                    print(f"evenhand engine: can't reach {target} yet, trying again: {reason}", file=sys.stderr)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, longest_s)


async def _leave(args: argparse.Namespace, engine: Engine) -> None:
    """Be registered no more. Where nobody answers, which is so when all ends at once, that is all there is to do."""
    target = _management(args, "remove")
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
        async with (
            _session(args, LEAVE_TIMEOUT_S) as session,
            session.post(target, json={"url": _url_of(args, engine)}) as answer,
        ):
            if answer.status == 200:
                print(f"removed from {args.proxy_url}", flush=True)
            else:
                await _tell_refusal(target, answer)


def _management(args: argparse.Namespace, verb: str) -> str:
    return f"{args.proxy_url.rstrip('/')}/nodes/{verb}"


def _session(args: argparse.Namespace, timeout_s: float) -> aiohttp.ClientSession:
    headers = {"accept": "application/json"}
    if key := args.admin_key or os.environ.get("EVENHAND_ADMIN_KEY"):
        headers["authorization"] = f"Bearer {key}"
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s), headers=headers)


async def _tell_refusal(target: str, answer: aiohttp.ClientResponse) -> None:
    text = (await answer.text())[:300]
    hint = "; give --admin-key (EVENHAND_ADMIN_KEY)" if answer.status in (401, 403) else ""
    print(f"evenhand engine: {target} refused it: {answer.status} {text}{hint}", file=sys.stderr)


def _node_url(text: str) -> str:
    try:
        return normalise_url(text, field="it")
    except BadRequest as e:
        raise argparse.ArgumentTypeError(e.message) from e
