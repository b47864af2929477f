"""Operations that are known, and that no unit passes through: each with its own reason."""

from __future__ import annotations

from splitgrow.layout import Dims
from splitgrow.rules.registry import Op, Result, rule


def _refuse(op: Op, cause: str) -> Result:
    for node in op.inputs:
        op.block(list(op.dims(node)), cause)
    value = op.node.meta["val"]
    if not isinstance(value, list | tuple):
        return op.opaque(op.shape)
    return [_refused_result(op, each) for each in value]


def _refused_result(op: Op, value: object) -> Dims:
    return op.opaque(tuple(map(int, getattr(value, "shape", ()))))


@rule("scaled_dot_product_attention", "_scaled_dot_product_flash_attention",
      "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
      "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math",
      "_native_multi_head_attention", "_transformer_encoder_layer_fwd")  # fmt: skip
def attention(op: Op) -> Result:
    """Attention: queries and keys are contracted with each other, not with a parameter."""
    return _refuse(
        op,
        "attention mixes the channels of a head (queries are contracted with keys, not with a "
        "parameter), so they cannot be split one by one, and whole heads are not split yet",
    )


@rule("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell",
      "rnn_relu_cell", "mkldnn_rnn_layer", "_cudnn_rnn", "_thnn_fused_lstm_cell",
      "_thnn_fused_gru_cell")  # fmt: skip
def recurrent(op: Op) -> Result:
    """A recurrent layer: its weights are used at every time step."""
    return _refuse(
        op,
        "a recurrent layer uses its weights at every time step, and its state feeds back, so its "
        "neurons are not split",
    )
