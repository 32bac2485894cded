"""Layouts of models that plans and tests speak of by name."""

from __future__ import annotations

from kvcache.layout import DType, GroupKind, GroupSpec, KVLayout, LayerSpec, TensorSpec


def dense_70b() -> KVLayout:
    """A 70B dense transformer: 80 layers, 8 KV heads of 128, bf16; 327,680 bytes per token."""
    tensors = tuple(TensorSpec(name, DType.BFLOAT16, (8, 128)) for name in ("k", "v"))
    return KVLayout((GroupSpec(GroupKind.FULL, tuple(LayerSpec(i, tensors) for i in range(80))),))


def case_study_1t() -> KVLayout:
    """The 1T hybrid of the PrfaaS case study (KDA : MLA = 3 : 1), inferred from its published sizes.

    15 MLA layers of 576 bf16 values make 17,280 bytes per token; 45 KDA layers share the fixed 173.9 MiB, of which a
    layer's exact division into tensors is not published: each holds 1,013,041 fp32 values here.
    """
    mla = (TensorSpec("latent", DType.BFLOAT16, (1, 512)), TensorSpec("rope", DType.BFLOAT16, (1, 64)))
    kda = (TensorSpec("state", DType.FLOAT32, (1_013_041,)),)
    return KVLayout(
        (
            GroupSpec(GroupKind.FULL, tuple(LayerSpec(i, mla) for i in range(3, 60, 4))),
            GroupSpec(GroupKind.STATE, tuple(LayerSpec(i, kda) for i in range(60) if i % 4 != 3)),
        )
    )


def gemma3_270m() -> KVLayout:
    """Gemma 3 270M in bf16: 18 layers, every sixth full, else windows of 512; 1 KV head of 256."""
    tensors = tuple(TensorSpec(name, DType.BFLOAT16, (1, 256)) for name in ("k", "v"))
    full = [i for i in range(18) if i % 6 == 5]
    sliding = [i for i in range(18) if i % 6 != 5]
    return KVLayout(
        (
            GroupSpec(GroupKind.FULL, tuple(LayerSpec(i, tensors) for i in full)),
            GroupSpec(GroupKind.SLIDING, tuple(LayerSpec(i, tensors) for i in sliding), window=512),
        )
    )
