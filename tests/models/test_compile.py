"""Compiled layers: the same gradients, one compilation for rows of any length."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from tests.support.tiny_models import batch_of, pair_of, tiny_model
from thresher.errors import UserError
from thresher.models.forward_check import check_logps
from thresher.models.layouts import PackedLayout
from thresher.models.logps import PairModel
from thresher.models.optimizations import compile as compile_module
from thresher.models.optimizations.compile import compile_elementwise, compile_layers

LAYOUT = PackedLayout(shares_prompt=True)
BATCHES = [
    batch_of(pair_of(9, 7, 5, seed=1), pair_of(4, 6, 11, seed=2)),
    batch_of(pair_of(12, 3, 8, seed=3), pair_of(2, 9, 4, seed=4), pair_of(5, 5, 6, seed=5)),
    batch_of(pair_of(20, 10, 9, seed=6)),
]


def _gradients(model: PairModel, batch) -> dict[str, torch.Tensor]:
    model.causal_lm.zero_grad()
    scored = model.score(LAYOUT.collate(batch))
    (scored.chosen.values.sum() - 2 * scored.rejected.values.sum()).backward()
    return {name: p.grad.clone() for name, p in model.causal_lm.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("compiles", [compile_layers, compile_elementwise])
def test_compiled_layers_give_the_same_gradients_and_compile_once(compiles, checkpointing):
    eager, compiled = (PairModel.for_layout(tiny_model("llama").train(), torch.float32, LAYOUT) for _ in range(2))
    if checkpointing:
        compiled.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.compiler.reset()
    counters.clear()
    compiles(compiled.backbone)
    check_logps(compiled, LAYOUT, BATCHES[0])
    assert counters["stats"]["unique_graphs"] == 0  # the check runs the layers uncompiled
    graphs = []
    for batch in BATCHES:
        expected, found = _gradients(eager, batch), _gradients(compiled, batch)
        norm = torch.cat([grad.flatten() for grad in expected.values()]).norm()
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, atol=float(1e-5 * norm), rtol=0, msg=name)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs == graphs[:1] * len(BATCHES)


def test_a_model_without_a_list_of_layers_is_rejected():
    with pytest.raises(UserError, match="set torch_compile to false"):
        compile_layers(torch.nn.Linear(2, 2))


@pytest.fixture
def without_compiler() -> Iterator[None]:
    """Inductor on a machine without a C++ compiler."""
    torch.compiler.reset()
    compile_module._warn_once.cache_clear()
    missing = {"cpp.cxx": ("/no/such/compiler",)}
    with torch.compiler.config.patch(force_disable_caches=True), inductor_config.patch(missing):
        yield
    torch.compiler.reset()


def test_a_layer_that_cannot_be_compiled_is_a_user_error_if_compilation_was_asked_for(without_compiler):
    model = PairModel.for_layout(tiny_model("llama"), torch.float32, LAYOUT)
    compile_elementwise(model.backbone)
    with pytest.raises(UserError) as caught:
        model.score(LAYOUT.collate(BATCHES[0]))
    message = str(caught.value)
    assert message.startswith("torch cannot compile the layers of this model (")
    assert message.endswith("; set actor_train.training_args.torch_compile=false")


def _fail_in_the_backward(graph: torch.fx.Graph) -> None:
    if any("tangents" in node.name for node in graph.find_nodes(op="placeholder")):
        raise RuntimeError("no kernel for the backward")


def _fail_to_trace(_self: InstructionTranslator) -> None:
    raise RecursionError("maximum recursion depth exceeded")


@pytest.mark.parametrize(
    ("compiles", "failing"),
    [
        (compile_layers, "forward"),
        (compile_elementwise, "forward"),
        (compile_elementwise, "backward"),
        (compile_layers, "tracer"),
        (compile_elementwise, "tracer"),
    ],
)
def test_otherwise_it_runs_uncompiled_and_one_warning_says_so(compiles, failing, without_compiler, caplog, monkeypatch):
    changes = {"cpp.cxx": (None, "g++"), "post_grad_custom_pre_pass": _fail_in_the_backward}
    if failing == "tracer":
        monkeypatch.setattr(InstructionTranslator, "run", _fail_to_trace)
    eager, compiled = (PairModel.for_layout(tiny_model("llama"), torch.float32, LAYOUT) for _ in range(2))
    compiles(compiled.backbone, is_optional=True)
    with inductor_config.patch(changes if failing == "backward" else {}):
        expected, found = _gradients(eager, BATCHES[0]), _gradients(compiled, BATCHES[0])
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)
    [warning] = [record.getMessage() for record in caplog.records if record.name.startswith("thresher")]
    assert warning.startswith("torch cannot compile a part of the layers (")
    assert "runs uncompiled" in warning
    assert warning.endswith("set actor_train.training_args.torch_compile=false to compile none")


def test_variants_beyond_the_limit_run_uncompiled_and_a_warning_of_the_run_says_so(monkeypatch, caplog):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(compile_module, "MAX_COMPILED_VARIANTS", 1)
    torch.compiler.reset()
    counters.clear()
    eager, compiled = (PairModel.for_layout(tiny_model("gemma2"), torch.float32, LAYOUT) for _ in range(2))
    compile_layers(compiled.backbone)
    expected, found = (model.score(LAYOUT.collate(BATCHES[0])).chosen.values for model in (eager, compiled))
    torch.testing.assert_close(found, expected)
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("thresher")]
    assert warnings
    assert all(
        text.startswith("a compiled layer has more than 1 variants; further ones run uncompiled") for text in warnings
    )
