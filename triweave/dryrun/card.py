"""A GPU that is not there: tensors on the meta device take the ways through the code that they would take on a GPU.

A tensor that says `cuda` aborts a CPU build of torch as soon as autograd sees it, so the tensors stay on `meta` and
only the answers to the code's questions change: `is_cuda`, and which kernel computes attention, where that of a GPU
keeps other tensors than the operations that replace it elsewhere. Why: docs/decisions/0009.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from triweave.layers.attention_kernels import cudnn_fits

META = torch.device("meta")

_IS_CUDA = vars(torch.Tensor.__base__)["is_cuda"].__get__
_READS = {Tensor.item: 1.0, Tensor.__float__: 1.0, Tensor.__int__: 1, Tensor.__bool__: True}
"""What the numbers of a tensor without numbers are taken to be."""


_ANSWERED = frozenset(
    {
        *_READS,
        _IS_CUDA,
        torch.autograd.backward,
        torch.autograd.grad,
        Tensor.to,
        Tensor.data_ptr,
        Tensor.untyped_storage,
        functional.scaled_dot_product_attention,
    }
)


class Card(TorchFunctionMode):
    """Inside, the meta device is a GPU to the code that asks."""

    def __init__(self, attention: str, handed_out: Callable[[torch.UntypedStorage], None]) -> None:
        """Be the GPU of a run.

        Args:
            attention: the run file's `model.attention`.
            handed_out: told of every storage that the code asks for: it may resize it, which no operation shows.
        """
        super().__init__()
        self.attention = attention
        self.handed_out = handed_out

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer for the GPU, or let the call through."""
        kwargs = kwargs or {}
        # Nearly every call is none of these, and there are a hundred thousand of them.
        if func not in _ANSWERED:
            return func(*args, **kwargs) if "device" not in kwargs else func(*args, **_on_meta(kwargs))
        if func is torch.autograd.backward:
            # From torch 2.13 on this call would take the mode off while backward runs.
            with self:
                return _run_backward(*args, **kwargs)
        if func is torch.autograd.grad:
            with self:
                return _run_grad(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], Tensor) and args[0].is_meta else None
        if first is None:
            return func(*args, **_on_meta(kwargs))
        if func == _IS_CUDA:
            return True
        if func in _READS:
            return _READS[func]
        if func is Tensor.data_ptr:
            return first.untyped_storage()._cdata + first.storage_offset() * first.element_size()
        if func is Tensor.untyped_storage:
            storage = first.untyped_storage()
            self.handed_out(storage)
            return storage
        if func is functional.scaled_dot_product_attention:
            return attend(self.attention, *args, **kwargs)
        return func(*[META if _is_cuda_device(arg) else arg for arg in args], **_on_meta(kwargs))


def _is_cuda_device(value: object) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def _on_meta(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments with the GPU's name replaced."""
    return {key: META if _is_cuda_device(value) else value for key, value in kwargs.items()}


def _run_backward(
    tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False
) -> None:
    """`torch.autograd.backward` below the layer that asks for modes; gradients are given, as the pipeline does."""
    _engine_run_backward(
        tensors,
        grad_tensors,
        retain_graph if retain_graph is not None else create_graph,
        create_graph,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _run_grad(outputs: Any, inputs: Any, grad_outputs: Any, **_: Any) -> tuple[Tensor, ...]:
    """`torch.autograd.grad` likewise, as the capture of graphs calls it."""
    of, gradients, by = ((one,) if isinstance(one, Tensor) else one for one in (outputs, grad_outputs, inputs))
    found: tuple[Tensor, ...] = _engine_run_backward(
        of, gradients, False, False, by, allow_unreachable=False, accumulate_grad=False
    )
    return found


def attend(
    wanted: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` by the kernel that a GPU would choose (`sdp_utils.cpp`), with all that it keeps.

    Args:
        wanted: `model.attention`; `auto` takes the first kernel that accepts the inputs.
        q: `[batch, heads, seq, head_dim]`.
        k: `[batch, kv_heads, seq, head_dim]`.
        v: as `k`.
        attn_mask: which positions see which.
        dropout_p: share of the probabilities that is dropped.
        is_causal: whether a position sees only what is before it.
        scale: factor of the scores.
        enable_gqa: whether there are fewer key/value heads than heads.

    Returns:
        As `q`.
    """
    aten = torch.ops.aten
    half = q.dtype in (torch.bfloat16, torch.float16)
    keeps = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if wanted in ("auto", "cudnn") and cudnn_fits(q.dtype, q.shape[-1]):
        out = aten._scaled_dot_product_cudnn_attention(
            q, k, v, attn_mask, keeps, dropout_p, is_causal, False, scale=scale
        )
    elif half and wanted in ("auto", "flash") and attn_mask is None:
        out = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)
    elif wanted in ("auto", "efficient") and not enable_gqa:
        bias = attn_mask
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            # torch makes one of the queries' type of it, which backward keeps (`convert_boolean_attn_mask`).
            bias = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
        out = aten._scaled_dot_product_efficient_attention(q, k, v, bias, keeps, dropout_p, is_causal, scale=scale)
    else:
        out = aten._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
    attended: Tensor = out[0]
    return attended
