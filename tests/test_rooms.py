"""The house's arrows: which room may import which, and what must load without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("kvcache", "scheduler", "engines", "prefill_service", "decode_client", "node", "gateway", "deploy")

MAY_IMPORT = {
    "kvcache": (),
    "scheduler": ("kvcache.layout", "kvcache.blocks", "kvcache.quality", "kvcache.topology"),
    "engines": ("kvcache",),
    "prefill_service": ("kvcache", "engines"),
    "decode_client": ("kvcache", "engines"),
    "node": ("kvcache", "scheduler", "engines", "prefill_service", "decode_client"),
    "gateway": ("kvcache", "scheduler"),
    "deploy": ROOMS,
}

LIGHT = (
    "kvcache.layout",
    "kvcache.layout_configs",
    "kvcache.fingerprint",
    "kvcache.blocks",
    "kvcache.ticket",
    "kvcache.wire",
    "kvcache.control",
    "kvcache.kv_events",
    "kvcache.topology",
)


def module_files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def our_imports(source: str) -> Iterator[str]:
    """Every name of our rooms that a module imports, as room.module, wherever in the file it does so."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the arrow"
            # `from kvcache import blocks` names a module, `from kvcache.blocks import X` does not
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names] if base in ROOMS else [base]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in ROOMS)


def allowed(room: str, name: str) -> bool:
    permitted = (room, *MAY_IMPORT[room])
    return any(name == entry or name.startswith(entry + ".") for entry in permitted)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_from_the_rooms_below_it(room: str) -> None:
    files = module_files(room)
    assert files, f"{room} has no modules"
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in our_imports(path.read_text())
        if not allowed(room, name)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_room_is_installed() -> None:
    packaging = (ROOT / "pyproject.toml").read_text()
    assert [room for room in ROOMS if f'"{room}*"' not in packaging] == []


def test_the_checker_sees_a_forbidden_arrow_in_any_form() -> None:
    sources = ("import gateway.cli", "from gateway import cli", "def f():\n    from gateway.cli import main")
    for source in sources:
        assert [allowed("node", name) for name in our_imports(source)] == [False]
    assert not allowed("scheduler", next(our_imports("from kvcache import transport")))
    assert allowed("scheduler", next(our_imports("from kvcache.blocks import PagePool")))


def modules_of(room: str) -> list[str]:
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in module_files(room)]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def heavy_modules_after(imports: list[str]) -> str:
    lines = [f"import {name}" for name in imports]
    check = "import sys; print([m for m in ('torch', 'transformers', 'safetensors') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*lines, check])], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", LIGHT)
def test_what_both_ends_share_loads_without_torch(name: str) -> None:
    assert heavy_modules_after([name]) == "[]"


@pytest.mark.parametrize("room", ["gateway", "scheduler"])
def test_a_room_without_tensors_loads_without_torch(room: str) -> None:
    assert heavy_modules_after(modules_of(room)) == "[]"
