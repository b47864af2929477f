"""A grown model as a file that runs without Python: ONNX, quantised ONNX, ExecuTorch.

    from splitgrow.export import export_onnx, quantize_onnx

    file = export_onnx(model, x[:1], "grown.onnx", batches=[x])
    small = quantize_onnx(file.path, batches=[x])

Every file is compared with the model on real inputs before it is written.
"""

from splitgrow.errors import ExportError
from splitgrow.export.check import Exported
from splitgrow.export.executorch_file import export_executorch
from splitgrow.export.int8 import Quantized, quantize_onnx
from splitgrow.export.onnx_file import export_onnx

__all__ = [
    "ExportError",
    "Exported",
    "Quantized",
    "export_executorch",
    "export_onnx",
    "quantize_onnx",
]
