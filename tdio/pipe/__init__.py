"""Pipes: tensordicts streamed between processes."""

from tdio.pipe.messages import recv_tensordict, send_tensordict
from tdio.pipe.pipe import TensorDictPipe
from tdio.pipe.server import TensorDictServer

__all__ = ["TensorDictPipe", "TensorDictServer", "recv_tensordict", "send_tensordict"]
