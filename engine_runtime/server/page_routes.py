"""GET /: a page to chat with the engine and watch its draft trees, made of the files in page/ and nothing else."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

DIRECTORY = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def router() -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    for path in sorted(DIRECTORY.iterdir()):
        name = "/" if path.name == "index.html" else f"/{path.name}"
        routes.add_api_route(name, _sender(path.read_bytes(), TYPES[path.suffix]), methods=["GET"])
    return routes


def _sender(content: bytes, media_type: str):  # type: ignore[no-untyped-def]
    async def send() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return send
