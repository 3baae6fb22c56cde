"""Frozen matrices in 4 or 8 bits: quantized by bitsandbytes while they are read, dequantized for every product.

The numbers are those of bitsandbytes' modules in training. Those modules compute differently in evaluation (8-bit
inputs; on CPUs with AVX512-BF16, repacked weights in bf16), so policy and reference could differ at step 0, and FSDP2
replaces the parameters that hold their constants.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from thresher.distributed.tensors import local_slices, to_local
from thresher.errors import UserError
from thresher.models.experts import stacks_of
from thresher.models.loading.weight_files import config_of
from thresher.models.pipeline_chunk import decoder_of
from thresher.models.router import routers
from thresher.optional import require

# elements that share a constant, and constants that share one, as in bitsandbytes
_BLOCK, _CONSTANTS_PER_BLOCK = 64, 256


@dataclass(frozen=True)
class Quantization:
    """How matrices are quantized; type and double are of 4 bits."""

    bits: int
    type: str = "nf4"
    double: bool = True

    def __str__(self) -> str:
        if self.bits == 8:
            return "8 bits"
        return f"4 bits ({self.type}{', double' if self.double else ''})"

    def constant_shapes(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the constants of a matrix, by name."""
        if self.bits == 8:
            return {"scale": ((rows,), torch.float32)}
        blocks = math.ceil(rows * columns / _BLOCK)
        if not self.double:
            return {"absmax": ((blocks,), torch.float32)}
        return {
            "absmax": ((blocks,), torch.uint8),
            "offset": ((), torch.float32),
            "nested_absmax": ((math.ceil(blocks / _CONSTANTS_PER_BLOCK),), torch.float32),
            "nested_code": ((256,), torch.float32),
        }


def stored_quantization(path: str) -> Quantization | None:
    """How bitsandbytes has quantized a model's files; None if it has not."""
    if path.endswith(".gguf"):
        return None
    try:
        stored = config_of(path).get("quantization_config")
    except (UserError, OSError, ValueError, AttributeError, RecursionError):
        return None  # loading the model reports what is wrong with its files
    if not isinstance(stored, dict) or stored.get("quant_method") != "bitsandbytes":
        return None
    if stored.get("load_in_8bit") or stored.get("_load_in_8bit"):
        return Quantization(8)
    kind, double = stored.get("bnb_4bit_quant_type", "fp4"), stored.get("bnb_4bit_use_double_quant", False)
    return Quantization(4, str(kind), bool(double))


def import_bitsandbytes() -> Any:
    """Import bitsandbytes; without native code from the Hub, which it would fetch if `kernels` is installed."""
    if "bitsandbytes" not in sys.modules:
        require("quantization", "bitsandbytes", extra="quantization")
        # the code is for products in evaluation, which are not used here
        logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "kernels" not in record.msg)
        before = {name: sys.modules.pop(name) for name in ("kernels",) if name in sys.modules}
        sys.modules["kernels"] = None  # type: ignore[assignment]  # an import of it fails
        try:
            import bitsandbytes  # noqa: F401
        finally:
            del sys.modules["kernels"]
            sys.modules.update(before)
    return sys.modules["bitsandbytes"]


def import_peft() -> Any:
    """Import PEFT, which imports bitsandbytes if that is installed."""
    if find_spec("bitsandbytes") is not None:
        import_bitsandbytes()
    import peft

    return peft


def _dequantize(
    quantization: Quantization, shape: tuple[int, int], dtype: torch.dtype, weight: Tensor, *constants: Tensor
) -> Tensor:
    """The matrix of this shape, as bitsandbytes computes it; constants in the order of `constant_shapes`."""
    if quantization.bits == 8:
        return weight.to(dtype).mul_(constants[0].unsqueeze(1).mul(1 / 127))
    absmax, operations = constants[0], torch.ops.bitsandbytes
    if quantization.double:
        codes, offset, scales, values = constants
        absmax = operations.dequantize_blockwise(codes, scales, values, _CONSTANTS_PER_BLOCK, torch.float32) + offset
    dense: Tensor = operations.dequantize_4bit(weight, absmax, _BLOCK, quantization.type, shape, dtype)
    return dense


class _Product(torch.autograd.Function):
    """x @ dequantized weight; the backward dequantizes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Any, quantization: Quantization, shape: Any, *weight: Tensor) -> Tensor:
        ctx.save_for_backward(*weight)
        ctx.quantization, ctx.shape = quantization, shape
        return F.linear(x, _dequantize(quantization, shape, x.dtype, *weight), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        packed = ctx.saved_tensors  # which recomputed activations give once
        weight = _dequantize(ctx.quantization, ctx.shape, gradient.dtype, *packed)
        return gradient @ weight, *[None] * (3 + len(packed))


class QuantizedLinear(nn.Linear):
    """A frozen linear layer whose weight has 4 or 8 bits per element.

    weight: [elements / 2, 1], two elements per byte, or [rows, columns] of int8. Sharding splits it; the constants are
    buffers, which every process has whole.
    """

    def __init__(self, dense: nn.Linear, quantization: Quantization, *, is_stored: bool):
        super().__init__(dense.in_features, dense.out_features, bias=False, device="meta")
        self.quantization, self.is_stored = quantization, is_stored
        self.dense_shape = (dense.out_features, dense.in_features)
        shape, dtype = self.dense_shape, torch.int8
        if quantization.bits == 4:
            shape, dtype = (math.ceil(math.prod(shape) / 2), 1), torch.uint8
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
        self.bias = dense.bias
        for name, (sizes, kind) in quantization.constant_shapes(*self.dense_shape).items():
            self.register_buffer(name, torch.empty(sizes, dtype=kind, device="meta"), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if torch.is_autocast_enabled(device):  # which does not know this product
            x = x.to(torch.get_autocast_dtype(device))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        packed = (self.weight, *self.buffers(recurse=False))
        out: Tensor = _Product.apply(x, bias, self.quantization, self.dense_shape, *packed)  # type: ignore[no-untyped-call]
        return out

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The matrix [rows, columns] of an unsharded weight."""
        return _dequantize(self.quantization, self.dense_shape, dtype, self.weight, *self.buffers(recurse=False))

    @property
    def num_elements(self) -> int:
        return math.prod(self.dense_shape)

    @property
    def shape_in_files(self) -> tuple[int, ...] | None:
        """None: it depends on the dtype that holds the packed elements."""
        if not self.is_stored:
            return self.dense_shape
        return self.dense_shape if self.quantization.bits == 8 else None

    @torch.no_grad()
    def fill(self, into: Tensor, stored: Mapping[str, Any], name: str, path: str, device: torch.device) -> None:
        """Read the matrix, quantize it if its file has it dense, and copy this process's part and the constants."""
        bitsandbytes = import_bitsandbytes().functional
        if self.is_stored:
            weight, constants = self._read_stored(stored, name, path)
        elif self.quantization.bits == 8:
            values = stored[name][:].to(device, torch.float16)  # which bitsandbytes quantizes
            weight, scale, _ = bitsandbytes.int8_vectorwise_quant(values)
            constants = {"scale": scale}
        else:
            weight, state = bitsandbytes.quantize_4bit(
                stored[name][:].to(device, torch.float32),
                blocksize=_BLOCK,
                compress_statistics=self.quantization.double,
                quant_type=self.quantization.type,
            )
            constants = _constants_of(state)
        to_local(into).copy_(weight[local_slices(into)])
        for each, values in constants.items():
            self.get_buffer(each).copy_(values)

    def _read_stored(self, stored: Mapping[str, Any], name: str, path: str) -> tuple[Tensor, dict[str, Tensor]]:
        weight = stored[name][:]
        if self.quantization.bits == 8:
            return weight, {"scale": stored[f"{name.removesuffix('weight')}SCB"][:]}
        of_state = {each.removeprefix(f"{name}."): stored[each][:] for each in stored if each.startswith(f"{name}.")}
        state = import_bitsandbytes().functional.QuantState.from_dict(of_state, device=torch.device("cpu"))
        found = Quantization(4, state.quant_type, state.nested)
        if (found, state.blocksize, tuple(state.shape)) != (self.quantization, _BLOCK, self.dense_shape):
            raise UserError(
                f"{name} in {path} has {found}, blocks of {state.blocksize} and shape {list(state.shape)}, but the "
                f"model has {self.quantization}, blocks of {_BLOCK} and shape {list(self.dense_shape)}; quantize the "
                "original model with model_args.quantization"
            )
        return weight.view(torch.uint8).reshape(-1, 1), _constants_of(state)


def _constants_of(state: Any) -> dict[str, Tensor]:
    constants = {"absmax": state.absmax}
    if state.nested:
        nested = state.state2
        constants |= {"offset": state.offset, "nested_absmax": nested.absmax, "nested_code": nested.code}
    return constants


def quantize_modules(model: PreTrainedModel, quantization: Quantization, path: str, stored: set[str] | None) -> None:
    """Replace the matrices of the layers of a model on the meta device, except routers.

    stored: the names in files that have quantized matrices, which alone are replaced then.
    """
    if any(True for _ in stacks_of(model)):
        raise UserError(
            f"{path} has stacked experts, which are not linear layers, so quantization would leave most of its weights "
            "as they are; remove model_args.quantization, or use a dense model"
        )
    kept = set(routers(model))
    prefixes = {module: name for name, module in model.named_modules()}
    found = 0
    for layer in getattr(decoder_of(model), "layers", ()):
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if not isinstance(child, nn.Linear) or child in kept:
                    continue
                if stored is None or _has_constants(prefixes[child], stored):
                    setattr(parent, name, QuantizedLinear(child, quantization, is_stored=stored is not None))
                    found += 1
    if not found:
        raise UserError(f"{path} has no linear layers that quantization supports; remove model_args.quantization")


def _has_constants(name: str, stored: set[str]) -> bool:
    return f"{name}.SCB" in stored or any(
        f"{name}.weight.quant_state.bitsandbytes__{kind}" in stored for kind in ("nf4", "fp4")
    )


def quantized_modules(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Quantized modules by the name of their weight in files."""
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedLinear))
    return {f"{name}.weight".replace(".base_layer", ""): module for name, module in named}


@torch.no_grad()
def dequantize_modules(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace quantized modules by dense ones that compute the same."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, QuantizedLinear):
                dense = nn.Linear(child.in_features, child.out_features, bias=False, device="meta")
                dense.weight = nn.Parameter(child.dequantize(dtype), requires_grad=False)
                dense.bias = child.bias
                setattr(parent, name, dense)
