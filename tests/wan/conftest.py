"""The link as a fixture: skipped, with the reason, where the machine does not allow one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.wan.direction import LinkSettings
from tests.wan.link import Wan, wide_area
from tests.wan.namespaces import WanUnavailable


@pytest.fixture
def wan_of() -> Iterator[Callable[[LinkSettings], Wan]]:
    """Makes links that end with the test."""
    with contextlib.ExitStack() as links:

        def make(settings: LinkSettings) -> Wan:
            try:
                return links.enter_context(wide_area(settings))
            except WanUnavailable as error:
                pytest.skip(f"no wide-area link: {error}")

        yield make
