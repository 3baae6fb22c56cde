"""Cases that are compared with the oracle; the table in docs/internals/testing.md is generated from them.

Not the full product: every mesh runs every layout with sigmoid and every loss in the shared layout; architectures run
one axis at a time. Axes and losses are independent of each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from tests.support.engines.parity import Case, mesh_text
from tests.support.paths import ROOT
from thresher.distributed.mesh import ParallelDims

DOCS = ROOT / "docs" / "internals" / "testing.md"
_BEGIN, _END = "<!-- parity table: begin -->", "<!-- parity table: end -->"

USUAL = ("shared", "sigmoid", "llama")
LOSSES = ("sigmoid", "ipo", "simpo", "orpo")
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text")
MESHES = (
    ParallelDims(dp_shard=2),
    ParallelDims(dp_shard=4),
    ParallelDims(dp_replicate=2),
    ParallelDims(dp_replicate=4),
    ParallelDims(tp=2),
    ParallelDims(tp=4),
    ParallelDims(cp=2),
    ParallelDims(cp=4),
    ParallelDims(dp_replicate=2, dp_shard=2),
    ParallelDims(dp_shard=2, tp=2),
    ParallelDims(dp_shard=2, cp=2),
    ParallelDims(dp_replicate=2, tp=2),
    ParallelDims(cp=2, tp=2),
)
SINGLE_AXES = (ParallelDims(dp_shard=2), ParallelDims(tp=2), ParallelDims(cp=2))


def row_layouts(sizes: ParallelDims) -> Sequence[str]:
    """Context parallelism needs packed rows."""
    return ("shared", "packed") if sizes.cp > 1 else ("shared", "packed", "padded")


MATRIX = [
    *(Case(sizes, layout) for sizes in MESHES for layout in row_layouts(sizes)),
    *(Case(sizes, loss=loss) for sizes in MESHES for loss in LOSSES[1:]),
    *(
        Case(sizes, loss=loss, also=also)
        for loss, also in (
            ("kto", "labelled responses"),
            ("plackett_luce", "lists"),
            ("bradley_terry", "a reward model"),
        )
        for sizes in (
            ParallelDims(dp_shard=2),
            ParallelDims(dp_replicate=2),
            ParallelDims(tp=2),
            ParallelDims(cp=2),
            ParallelDims(dp_shard=4),
        )
    ),
    *(Case(sizes, family=family) for sizes in SINGLE_AXES for family in FAMILIES[1:]),
    Case(ParallelDims(dp_shard=2), family="qwen3_moe"),
    *(Case(sizes, family="qwen3_5_text") for sizes in SINGLE_AXES),
    *(Case(ParallelDims(cp=2), layout, family="nemotron_h") for layout in ("shared", "packed")),
    *(Case(ParallelDims(dp_shard=2), family=family) for family in ("granitemoehybrid", "lfm2")),
    Case(ParallelDims(dp_shard=2), family="qwen3_next"),
    *(Case(ParallelDims(tp=2), family=family) for family in ("olmo_hybrid", "nemotron_h")),
    Case(ParallelDims(dp_shard=2), family="gpt_oss"),
    Case(ParallelDims(cp=2), family="gpt_oss"),
    *(Case(sizes, "shared, varlen") for sizes in SINGLE_AXES),
    Case(ParallelDims(cp=4), family="mistral", also="fewer KV heads than cp"),
    Case(ParallelDims(dp_shard=4), pairs_per_step=2, also="fewer pairs than ranks"),
    Case(ParallelDims(dp_replicate=2), pairs_per_step=1, also="fewer pairs than ranks"),
    Case(ParallelDims(dp_shard=2), tokens_at_once=40, also="ranks with different numbers of micro-batches"),
    Case(ParallelDims(dp_shard=2), recompute="full", also="gradient checkpointing"),
    *(Case(ParallelDims(dp_shard=2), zero_stage=stage, also=f"zero_stage {stage}") for stage in (1, 2)),
    Case(ParallelDims(dp_shard=2), "padded", zero_stage=2, also="zero_stage 2"),
    *(
        Case(
            ParallelDims(dp_shard=2),
            zero_stage=stage,
            recompute="full",
            also=f"gradient checkpointing with zero_stage {stage}",
        )
        for stage in (1, 2)
    ),
    *(Case(ParallelDims(dp_replicate=2, dp_shard=2), zero_stage=stage, also=f"zero_stage {stage}") for stage in (1, 2)),
    Case(ParallelDims(dp_shard=2, tp=2), family="qwen2", zero_stage=1, also="a tied embedding with zero_stage 1"),
    Case(ParallelDims(tp=2), recompute="full", also="gradient checkpointing"),
    *(
        Case(sizes, layout, family=family, sequence_parallel=True, also="sequence parallelism")
        for sizes, layout, family in (
            (ParallelDims(tp=2), "shared", "llama"),
            (ParallelDims(tp=2), "packed", "qwen2"),
            (ParallelDims(tp=2), "shared", "qwen3"),
            (ParallelDims(tp=4), "shared", "llama"),
            (ParallelDims(dp_shard=2, tp=2), "shared", "llama"),
            (ParallelDims(cp=2, tp=2), "shared", "llama"),
        )
    ),
    Case(
        ParallelDims(tp=2),
        sequence_parallel=True,
        recompute="full",
        also="gradient checkpointing with sequence parallelism",
    ),
    *(
        Case(sizes, recompute="selective", also="selective recomputation")
        for sizes in (ParallelDims(dp_shard=2), ParallelDims(tp=2), ParallelDims(cp=2), ParallelDims(dp_shard=2, tp=2))
    ),
    Case(ParallelDims(dp_shard=2), "padded", recompute="selective", also="selective recomputation"),
    Case(ParallelDims(dp_shard=2), recompute="full", offloads_activations=True, also="offloaded activations"),
    Case(ParallelDims(dp_shard=2), zero_stage=2, recompute="selective", also="selective recomputation, zero_stage 2"),
    *(
        Case(ParallelDims(tp=2), family=family, recompute="selective", also="selective recomputation")
        for family in ("qwen2", "qwen3", "gemma2")
    ),
    Case(
        ParallelDims(tp=2),
        sequence_parallel=True,
        recompute="selective",
        also="selective recomputation with sequence parallelism",
    ),
    Case(ParallelDims(tp=2), sequence_parallel=True, compiles=True, also="torch_compile with sequence parallelism"),
    Case(ParallelDims(cp=2), compiles=True, also="torch_compile"),
    Case(ParallelDims(dp_shard=2), compiles=True, recompute="selective", also="torch_compile, selective"),
    Case(ParallelDims(dp_shard=2), compiles=True, also="torch_compile"),
    Case(ParallelDims(tp=2), compiles=True, also="torch_compile"),
    Case(ParallelDims(dp_shard=2), family="gemma2", compiles=True, also="torch_compile"),
    Case(
        ParallelDims(dp_shard=2),
        compiles=True,
        recompute="full",
        also="torch_compile, gradient checkpointing",
    ),
    Case(ParallelDims(tp=2), max_grad_norm=0.01, also="hard clipping"),
    Case(ParallelDims(dp_shard=2, tp=2), max_grad_norm=0.01, also="hard clipping"),
    Case(ParallelDims(dp_replicate=2, dp_shard=2), max_grad_norm=0.01, also="hard clipping"),
]
EP = ParallelDims(dp_shard=2, ep=2)
EXPERTS = [
    *(
        Case(sizes, family="qwen3_moe")
        for sizes in (
            EP,
            ParallelDims(dp_shard=4, ep=4),
            ParallelDims(dp_shard=4, ep=2),
            ParallelDims(dp_replicate=2, dp_shard=2, ep=2),
            ParallelDims(tp=2, ep=2),
            ParallelDims(dp_shard=2, tp=2, ep=2),
            ParallelDims(dp_shard=2, tp=2, ep=4),
            ParallelDims(cp=2, ep=2),
            ParallelDims(dp_shard=2, cp=2, ep=4),
        )
    ),
    Case(EP, "padded", family="qwen3_moe"),
    *(Case(EP, family="qwen3_moe", zero_stage=stage, also=f"zero_stage {stage}") for stage in (1, 2)),
    Case(EP, family="qwen3_moe", recompute="full", also="gradient checkpointing"),
    Case(ParallelDims(dp_shard=4, ep=2), family="qwen3_moe", max_grad_norm=0.01, also="hard clipping"),
]
INTERLEAVED = 2
TWO_STAGES = ParallelDims(pp=2)
PIPELINES = [
    Case(TWO_STAGES),
    Case(TWO_STAGES, virtual_pp_size=INTERLEAVED, also="interleaved"),
    Case(TWO_STAGES, recompute="selective", also="selective recomputation"),
    Case(TWO_STAGES, "packed", "ipo"),
    Case(TWO_STAGES, "padded", virtual_pp_size=INTERLEAVED, also="interleaved"),
    Case(TWO_STAGES, "padded", "orpo"),
    Case(TWO_STAGES, "shared", "simpo"),
    *(
        Case(TWO_STAGES, loss=loss, virtual_pp_size=INTERLEAVED, also=also)
        for loss, also in (
            ("kto", "interleaved, labelled responses"),
            ("plackett_luce", "interleaved, lists"),
            ("bradley_terry", "interleaved, a reward model"),
        )
    ),
    Case(TWO_STAGES, family="qwen2"),
    Case(TWO_STAGES, family="qwen2", virtual_pp_size=INTERLEAVED, also="interleaved"),
    Case(TWO_STAGES, family="qwen3"),
    Case(TWO_STAGES, family="mistral"),
    Case(TWO_STAGES, family="olmo_hybrid"),
    Case(TWO_STAGES, family="gpt_oss"),
    Case(TWO_STAGES, family="gemma2"),
    Case(TWO_STAGES, "padded", family="gemma2"),
    Case(TWO_STAGES, family="gemma3_text", virtual_pp_size=INTERLEAVED, also="interleaved"),
    Case(ParallelDims(pp=4)),
    Case(ParallelDims(pp=2, dp_shard=2)),
    Case(ParallelDims(pp=2, dp_shard=2), "packed", virtual_pp_size=INTERLEAVED, also="interleaved"),
    *(Case(ParallelDims(pp=2, dp_shard=2), zero_stage=stage, also=f"zero_stage {stage}") for stage in (1, 2)),
    Case(ParallelDims(pp=2, tp=2)),
    Case(ParallelDims(pp=2), compiles=True, also="torch_compile"),
    Case(ParallelDims(pp=2, tp=2), sequence_parallel=True, also="sequence parallelism"),
    Case(ParallelDims(pp=2, dp_replicate=2), "padded"),
    Case(ParallelDims(pp=2, cp=2)),
    Case(ParallelDims(pp=4), "padded", family="qwen2"),
    Case(ParallelDims(pp=2, dp_shard=2), family="qwen2"),
    Case(ParallelDims(pp=2, dp_shard=2, ep=2), family="qwen3_moe"),
    Case(ParallelDims(pp=2, tp=2, ep=2), family="qwen3_moe", virtual_pp_size=INTERLEAVED, also="interleaved"),
    Case(ParallelDims(pp=2, tp=2), family="gemma2"),
    *(
        Case(sizes, family=family, virtual_pp_size=virtual, pp_schedule="zero_bubble", also="zero bubble")
        for sizes, family, virtual in (
            (TWO_STAGES, "llama", 1),
            (TWO_STAGES, "qwen2", 1),
            (TWO_STAGES, "gemma2", 1),
            (ParallelDims(pp=4), "llama", 1),
            (ParallelDims(pp=2, dp_replicate=2), "llama", 1),
            (ParallelDims(pp=2, tp=2), "llama", 1),
        )
    ),
    Case(TWO_STAGES, virtual_pp_size=INTERLEAVED, pp_schedule="zero_bubble", also="interleaved with zero bubble"),
]
_EP = (
    ParallelDims(dp_shard=2, ep=2),
    ParallelDims(tp=2, ep=2),
    ParallelDims(cp=2, ep=2),
    ParallelDims(pp=2, dp_shard=2, ep=2),
    ParallelDims(dp_shard=4, ep=4),
)
DORA = (("use_dora", True), ("use_rslora", True))
TRAINED_WHOLE = (*DORA, ("modules_to_save", ("lm_head", "embed_tokens", "norm")))
# not supported by the oracle: compared with the native engine in one process
AGAINST_ONE_PROCESS = [
    Case(ParallelDims(dp_shard=2), loss="aot", also="a loss that couples pairs"),
    *(
        Case(
            ParallelDims(dp_shard=2),
            loss="aot",
            zero_stage=stage,
            also=f"a loss that couples pairs, zero_stage {stage}",
        )
        for stage in (1, 2)
    ),
    *(
        Case(sizes, loss="bradley_terry", lora_rank=4, also="LoRA, a reward model")
        for sizes in (ParallelDims(dp_shard=2), ParallelDims(tp=2))
    ),
    *(
        Case(sizes, family="qwen3_moe", router_loss_coef=0.5, also="load-balancing loss")
        for sizes in (
            *_EP,
            ParallelDims(dp_replicate=2),
            ParallelDims(dp_shard=2),
            ParallelDims(cp=2),
            ParallelDims(pp=2),
            ParallelDims(pp=2, cp=2),
        )
    ),
    Case(
        ParallelDims(pp=2),
        family="qwen3_moe",
        virtual_pp_size=INTERLEAVED,
        router_loss_coef=0.5,
        also="interleaved, load-balancing loss",
    ),
    *(
        Case(
            sizes,
            family=family,
            lora_rank=4,
            lora_target=("all-linear", "experts.gate_up_proj", "experts.down_proj"),
            also="LoRA on experts",
        )
        for sizes, family in (
            (ParallelDims(dp_shard=2), "qwen3_moe"),
            *((sizes, "qwen3_moe") for sizes in _EP),
            (ParallelDims(dp_shard=2, ep=2), "gpt_oss"),
        )
    ),
    *(
        Case(sizes, family="qwen2", lora_rank=4, lora_options=TRAINED_WHOLE, also="DoRA, modules trained whole")
        for sizes in (ParallelDims(dp_shard=2), ParallelDims(dp_replicate=2), ParallelDims(cp=2))
    ),
    Case(
        ParallelDims(dp_shard=2),
        zero_stage=1,
        lora_rank=4,
        lora_options=TRAINED_WHOLE,
        also="DoRA, modules trained whole, zero_stage 1",
    ),
    Case(ParallelDims(tp=2), compiles=True, lora_rank=4, also="torch_compile, LoRA"),
    Case(ParallelDims(dp_shard=2), compiles=True, lora_rank=4, also="torch_compile, LoRA"),
    Case(ParallelDims(pp=2), lora_rank=4, lora_options=DORA, also="DoRA"),
    Case(
        ParallelDims(dp_shard=2, ep=2),
        family="qwen3_moe",
        lora_rank=4,
        lora_target=("q_proj", "o_proj"),
        lora_options=DORA,
        also="DoRA",
    ),
    *(
        Case(sizes, optim=optim, also=f"optim {optim}")
        for sizes, optim in (
            (ParallelDims(dp_shard=2), "sgd"),
            (ParallelDims(dp_shard=2), "rmsprop"),
            (ParallelDims(tp=2), "rmsprop"),
            (ParallelDims(dp_replicate=2), "muon"),
            (ParallelDims(dp_replicate=2), "adafactor"),
            (ParallelDims(dp_shard=2), "schedule_free_adamw"),
            (ParallelDims(tp=2), "schedule_free_adamw"),
        )
    ),
    *(
        Case(
            sizes,
            family=family,
            param_groups=(("embed_tokens", 0.1), ("layers.1", 3.0), ("*experts", 2.0)),
            also=also,
        )
        for sizes, family, also in (
            (ParallelDims(dp_shard=2), "llama", "parameter groups"),
            (ParallelDims(tp=2), "llama", "parameter groups"),
            (EP, "qwen3_moe", "parameter groups"),
            (ParallelDims(pp=2), "qwen2", "parameter groups, a tied embedding"),
        )
    ),
    Case(ParallelDims(dp_shard=2), nonfinite_pair=0, also="a step skipped for a non-finite loss"),
    Case(ParallelDims(tp=2), nonfinite_pair=0, also="a step skipped for a non-finite loss"),
]
IN_BF16 = [
    *(Case(sizes, dtype=torch.bfloat16, also="bf16") for sizes in (ParallelDims(dp_shard=2), ParallelDims(tp=2))),
    Case(ParallelDims(dp_shard=2, tp=2), dtype=torch.bfloat16, zero_stage=1, also="bf16 with zero_stage 1"),
    Case(ParallelDims(dp_shard=2), family="qwen2", dtype=torch.bfloat16, also="a tied embedding in bf16"),
    Case(ParallelDims(dp_shard=2), family="qwen3_moe", dtype=torch.bfloat16, also="experts in bf16"),
    Case(EP, family="qwen3_moe", dtype=torch.bfloat16, also="experts in bf16"),
    Case(
        ParallelDims(dp_shard=2),
        dtype=torch.bfloat16,
        reduce_dtype="bf16",
        also="bf16 with sums of gradients in bf16",
    ),
    Case(TWO_STAGES, dtype=torch.bfloat16, pp_dtype="bf16", also="bf16 between stages"),
    Case(ParallelDims(pp=2, dp_shard=2), family="qwen2", dtype=torch.bfloat16, also="a tied embedding in bf16"),
]
IN_FP16 = [
    Case(ParallelDims(dp_replicate=2), "padded", dtype=torch.float16, also="fp16"),
    Case(ParallelDims(dp_shard=2), dtype=torch.float16, also="fp16"),
    Case(ParallelDims(tp=2), family="gemma2", dtype=torch.float16, also="fp16"),  # dense attention
    Case(ParallelDims(cp=2), dtype=torch.float16, also="fp16"),
]
ALL_CASES = [*MATRIX, *EXPERTS, *PIPELINES, *AGAINST_ONE_PROCESS, *IN_BF16, *IN_FP16]


def render_table(cases: Iterable[Case]) -> str:
    """One row per mesh, as markdown."""
    rows: dict[str, list[Case]] = {}
    for case in cases:
        rows.setdefault(mesh_text(case.sizes), []).append(case)
    lines = [
        "| mesh | layouts, with sigmoid | losses, shared layout | families, sigmoid, shared layout | also |",
        "|---|---|---|---|---|",
    ]
    for axes, of_mesh in rows.items():
        cells: list[list[str]] = [[], [], [], []]
        for case in of_mesh:
            for column, text in _entries(case).items():
                cells[column].append(text)
        lines.append(f"| {axes} | " + " | ".join(", ".join(dict.fromkeys(cell)) for cell in cells) + " |")
    return "\n".join(lines)


def _entries(case: Case) -> dict[int, str]:
    """The text of a case by column; a case that differs from the usual in two ways goes to the last column."""
    named = (case.layout, case.loss, case.family)
    unusual = [column for column, (text, usual) in enumerate(zip(named, USUAL, strict=True)) if text != usual]
    if not case.also and len(unusual) < 2:
        return {column: named[column] for column in (unusual or range(3))}
    texts = " + ".join(named[column] for column in unusual)
    return {3: f"{case.also} ({texts})" if case.also and texts else case.also or texts}


def table_in_docs() -> str:
    return DOCS.read_text(encoding="utf-8").partition(_BEGIN)[2].partition(_END)[0].strip()


def write_table(file: Path, cases: Iterable[Case]) -> None:
    """Replace the table between the markers of a page."""
    head, _, rest = file.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    file.write_text(f"{head}{_BEGIN}\n{render_table(cases)}\n{_END}{tail}", encoding="utf-8")
