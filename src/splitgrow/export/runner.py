"""ONNX files in onnxruntime."""

from __future__ import annotations

from pathlib import Path

from splitgrow.capture import _first_line
from splitgrow.errors import ExportError, InputError
from splitgrow.export.check import Arrays, Feeds


def require_onnx() -> None:
    """Raise unless the optional packages are there."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"an ONNX file is made and checked with onnx, onnxscript and onnxruntime ({error}). "
            'Install them with: pip install "splitgrow[export]"'
        ) from error


def require_onnxruntime() -> None:
    """Raise unless a file can be run; that needs less than making one."""
    try:
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"an ONNX file is run with onnxruntime ({error}). "
            'Install it with: pip install "splitgrow[export]"'
        ) from error


class OnnxRunner:
    """An ONNX file in onnxruntime, on one thread."""

    def __init__(self, model: bytes | Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors alone: it writes past Python's stderr
        source = model if isinstance(model, bytes) else str(model)
        try:
            self._session = onnxruntime.InferenceSession(
                source, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # its own classes, which it does not promise
            raise ExportError(f"onnxruntime cannot load the file: {_first_line(error)}") from error
        self.inputs: list[str] = [each.name for each in self._session.get_inputs()]

    @property
    def metadata(self) -> dict[str, str]:
        """What its maker has written into it."""
        found: dict[str, str] = self._session.get_modelmeta().custom_metadata_map
        return found

    def run(self, feeds: Feeds) -> Arrays:
        """The outputs of one call."""
        found: Arrays = self._session.run(None, feeds)
        return found
