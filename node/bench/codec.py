"""Every codec on every group of a cache: size, speed, and what a model makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from kvcache.codecs import CodecSet
from kvcache.layout import DType, GroupKind, GroupSpec, KVLayout, LayerSpec, TensorSpec
from kvcache.presets import gemma3_270m
from node.bench.captured import Captured, carries, made_up
from node.bench.speed import Speed, measure
from node.bench.texts import documents

PREFIX_TOKENS = 2048
POSITIONS = 100
CHUNK_TOKENS = 256
NOISE_REQUESTS = 8
ALL = "all"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result. Speeds are 10**9 raw bytes per second of one core.

    ``top1_agreement`` is over ``counted`` positions, those whose best token leads by more than the batch ``noise``;
    ``top1_all`` and ``mean_kl`` (nats) are over all. They are None where no model read the cache.
    """

    codec: str
    exact: bool
    group: str
    ratio: float
    encode_gbytes_s: float
    decode_gbytes_s: float
    top1_agreement: float | None
    mean_kl: float | None
    max_abs_err: float
    source: str
    top1_all: float | None = None
    counted: int | None = None
    noise: float | None = None

    def plain(self) -> dict[str, object]:
        """As JSON has it."""
        return asdict(self)


def groups_of(captured: Captured) -> dict[str, tuple[GroupKind, ...]]:
    """The groups of a cache by name, and all together where there are several."""
    kinds = tuple(dict.fromkeys(group.kind for group in captured.plan.layout.groups))
    names: dict[str, tuple[GroupKind, ...]] = {str(kind): (kind,) for kind in kinds}
    return names | ({ALL: kinds} if len(kinds) > 1 else {})


def synthetic_rows(chosen: Sequence[CodecSet], say: Say) -> Iterator[Row]:
    """Size, speed and error on a made-up cache: K and V in bf16, states in fp32."""
    kv, states = made_up(gemma3_270m(), PREFIX_TOKENS, CHUNK_TOKENS), made_up(_states(), 1, CHUNK_TOKENS)
    try:
        for source in (kv, states):
            yield from _measured_rows(chosen, source, "synthetic", say)
    finally:
        kv.close()
        states.close()


def captured_rows(chosen: Sequence[CodecSet], model_dir: Path, dtype: DType, count: int, say: Say) -> Iterator[Row]:
    """All figures on a model's cache of ``count`` documents; then states made up, where the model has none in fp32.

    Raises ValueError or OSError for a model that the engine does not run.
    """
    from node.bench.quality import Agreement, Reader

    say(f"loading {model_dir.name}")
    reader = Reader(model_dir, dtype, CHUNK_TOKENS)
    prefixes: list[Captured] = []
    try:
        for ids in _token_ids(model_dir, count):
            prefixes.append(reader.capture(ids, PREFIX_TOKENS))
            say(f"document {len(prefixes)} of {count} prefilled")
        rows = {(row.codec, row.group): row for row in _measured_rows(chosen, prefixes[0], "captured", say)}
        noise = reader.batch_noise(prefixes[:NOISE_REQUESTS])
        say(f"batch noise {noise:.3f} over {len(prefixes[:NOISE_REQUESTS])} requests")
        agreements = {key: Agreement() for key, row in rows.items() if not row.exact}
        by_name = {codec.name: codec for codec in chosen}
        landing = Captured.room(reader.layout, (), PREFIX_TOKENS, CHUNK_TOKENS)
        try:
            for number, prefix in enumerate(prefixes):
                reference = reader.read(prefix)
                arrived = replace(landing, ids=prefix.ids)
                for (name, group), agreement in agreements.items():
                    error = prefix.through(by_name[name], groups_of(prefix)[group], arrived)
                    agreement.add(reference, reader.read(arrived), noise, error)
                say(f"document {number + 1} of {count} read after every codec")
        finally:
            landing.close()
        for key, row in rows.items():
            found = agreements.get(key)
            if found is None:  # every byte was compared
                yield replace(row, top1_agreement=1.0, mean_kl=0.0, top1_all=1.0)
            else:
                yield replace(
                    row,
                    top1_agreement=round(found.agreed / found.counted, 5) if found.counted else None,
                    mean_kl=round(found.kl_sum / found.positions, 6),
                    max_abs_err=found.worst_error,
                    top1_all=round(found.same / found.positions, 5),
                    counted=found.counted,
                    noise=noise,
                )
    finally:
        for prefix in prefixes:
            prefix.close()
    missing = [codec for codec in chosen if not any(name == codec.name for name, _ in rows)]
    if missing:
        states = made_up(_states(), 1, CHUNK_TOKENS)
        try:
            yield from _measured_rows(missing, states, "synthetic", say)
        finally:
            states.close()


def _measured_rows(chosen: Sequence[CodecSet], source: Captured, kind: str, say: Say) -> Iterator[Row]:
    landing = Captured.room(source.plan.layout, (), source.plan.stop, source.plan.chunk_tokens)
    try:
        for codec in chosen:
            for group, kinds in groups_of(source).items():
                if carries(codec, source, kinds):
                    error = source.through(codec, kinds, landing)
                    yield _row(codec, group, measure(codec, source, kinds), error, kind)
            say(f"{codec.name} timed on a {kind} cache")
    finally:
        landing.close()


def _row(codec: CodecSet, group: str, speed: Speed, error: float, source: str) -> Row:
    return Row(
        codec.name,
        codec.exact,
        group,
        round(speed.ratio, 4),
        round(speed.encode_bytes_s / 1e9, 3),
        round(speed.decode_bytes_s / 1e9, 3),
        None,
        None,
        error,
        source,
    )


def _token_ids(model_dir: Path, count: int) -> Iterator[list[int]]:
    """What each document is read as. The tokeniser's own post-processor adds what the model wants in front."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    needed = PREFIX_TOKENS + POSITIONS
    for number, text in enumerate(documents(count)):
        ids = tokenizer.encode(text).ids
        if len(ids) < needed:
            raise ValueError(f"document {number + 1} has {len(ids)} tokens, {needed} are needed; ask for fewer")
        yield ids[:needed]


def _states() -> KVLayout:
    recurrent = TensorSpec("recurrent", DType.FLOAT32, (32, 128, 128))
    return KVLayout((GroupSpec(GroupKind.STATE, tuple(LayerSpec(i, (recurrent,)) for i in range(4))),))
