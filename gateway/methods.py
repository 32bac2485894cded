"""What may be done at a path: for 405, OPTIONS and HEAD."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import BaseRoute, Match

_ORDER = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def methods_at(routes: Iterable[BaseRoute], path: str) -> tuple[str, ...]:
    """All methods of a path, () where there is nothing. Whoever may GET may ask for the HEAD."""
    found: set[str] = set()
    for route in routes:
        scope = {"type": "http", "path": path, "root_path": "", "method": "OPTIONS", "headers": []}
        if route.matches(scope)[0] is not Match.NONE:
            found |= getattr(route, "methods", None) or set()
    return with_implied(found)


def with_implied(methods: set[str]) -> tuple[str, ...]:
    """In a fixed order, with what every path answers."""
    if not methods:
        return ()
    implied = {"OPTIONS"} | ({"HEAD"} if "GET" in methods else set())
    return tuple(method for method in _ORDER if method in methods | implied)
