"""How request bodies are read."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute


class _JSONRequest(Request):
    async def json(self) -> Any:
        """The body; far faster than the json module on long texts, and without its NaN and Infinity."""
        try:
            return msgspec.json.decode(await self.body())
        except (ValueError, RecursionError):
            raise HTTPException(400, "the body is not valid JSON") from None


class JSONRoute(APIRoute):
    """A route whose JSON body is decoded by msgspec."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JSONRequest(request.scope, request.receive))

        return handle_json
