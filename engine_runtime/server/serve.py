"""`python -m engine_runtime serve`: binds the port, then loads the engine, serves, and drains when told to end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
from typing import TYPE_CHECKING

from engine_runtime.cli import CommandError
from engine_runtime.server.config import ConfigError, ServeConfig, read_config

if TYPE_CHECKING:
    from engine_runtime.server.listener import Server
    from engine_runtime.server.services import ModelInfo, Services

BACKLOG = 1024
CLOSE_SECONDS = 5  # for connections to close after the last answer

_log = logging.getLogger(__name__)


def run(args: argparse.Namespace) -> int:
    """Carry out the command; `args` as `engine_runtime.cli` parses them. Returns the exit code."""
    try:
        config = read_config(args)
    except ConfigError as error:
        raise CommandError(str(error)) from None
    if args.print_config:
        print(config.to_yaml(), end="")
        return 0
    with _bind(config.host, config.port) as listener:
        from engine_runtime.server import logs
        from engine_runtime.server.services import ModelInfo

        model = ModelInfo.read(args.artifact, config.model_name)
        logs.configure(config.log_level)
        return asyncio.run(_serve(config, args.artifact, model, listener))


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket, before anything else is done: a port that is taken is told at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        raise CommandError(f"{host}:{port}: cannot listen: {error.strerror}; choose another --port or --host") from None
    return listener


def make_services(config: ServeConfig, artifact: str, model: ModelInfo) -> Services:
    """The parts, connected; the engine process is not started yet. Needs a running event loop."""
    from engine_runtime.chat import ChatTemplate
    from engine_runtime.sampling import SamplingParams
    from engine_runtime.server.chat_core import Chat
    from engine_runtime.server.chat_format import KimiFormat
    from engine_runtime.server.engine_client import EngineClient, EngineSettings
    from engine_runtime.server.metrics import Metered, Metrics
    from engine_runtime.server.services import Services
    from engine_runtime.server.wire import Open
    from engine_runtime.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(artifact)
    settings = EngineSettings(
        Open(artifact, config.threads),
        model.limits.max_requests,
        config.max_queue,
        config.stall_timeout,
        config.kill_timeout,
    )
    client = EngineClient(settings)
    metrics = Metrics(model.name, model.limits, lambda: client.snapshot, client.health)
    engine = Metered(client, metrics)
    chat = Chat(engine, KimiFormat(ChatTemplate.load(artifact, tokenizer), tokenizer), model.room(), metrics.finished)
    defaults = SamplingParams(temperature=config.temperature, top_p=config.top_p)
    return Services(model, tokenizer, engine, client, chat, metrics, defaults)


async def _serve(config: ServeConfig, artifact: str, model: ModelInfo, listener: socket.socket) -> int:
    from engine_runtime.server.app import create_app
    from engine_runtime.server.listener import Server

    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    services = make_services(config, artifact, model)
    app = create_app(services, config.api_key, config.max_body_bytes)
    server = Server(app, CLOSE_SECONDS)
    services.client.start()
    _log.info("listening", extra={"fields": {"address": listener.getsockname(), "engine": model.fingerprint}})
    ending = asyncio.create_task(_end_in_time(told, config, services, server))
    try:
        await server.serve([listener])
    finally:
        ending.cancel()
        await services.client.stop()
    if services.client.given_up.done():
        raise CommandError(services.client.given_up.result())
    return 0


async def _end_in_time(told: asyncio.Event, config: ServeConfig, services: Services, server: Server) -> None:
    """Wait for a signal (`told`), or for an engine that cannot be loaded; then end the server, after what runs has
    ended."""
    signalled = asyncio.create_task(told.wait())
    await asyncio.wait((signalled, services.client.given_up), return_when=asyncio.FIRST_COMPLETED)
    if told.is_set():
        told.clear()  # a second signal does not wait
        _log.info("draining")
        again = asyncio.create_task(told.wait())
        draining = asyncio.create_task(services.client.drain(config.shutdown_timeout))
        await asyncio.wait((again, draining), return_when=asyncio.FIRST_COMPLETED)
        if draining.done() and draining.result():
            _log.warning("%d requests had not ended in time", draining.result())
        await services.client.stop()
    server.should_exit = True
