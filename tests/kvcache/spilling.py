"""Keeps prompts in a pool with a tier below, and says which are copied: ``python -m tests.kvcache.spilling DIR``.

For a test that kills it.
"""

from __future__ import annotations

import asyncio
import sys
from itertools import count
from pathlib import Path

from tests.kvcache.tiered import files, ids, tiered


async def main(directory: Path) -> None:
    async with tiered(files(directory, mib=64), pages=40) as bench:
        for number in count():
            bench.keep(ids(number, 1, 2))
            await bench.copied()
            print(number, flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
