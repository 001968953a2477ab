"""A graph ready to run."""

from __future__ import annotations

import onnxruntime
import torch
from torch import Tensor

from stages.backends.graph import Graph


class Session:
    """A graph with as many threads as torch uses. It holds its matrices in a layout of its own, and nothing of those
    that it was made of."""

    def __init__(self, graph: Graph) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # a thread that spins while it waits takes the processor from the event loop
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # buffers that a session keeps for itself would add up: there are two sessions for each layer
        options.enable_cpu_mem_arena = False
        matrices = [onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy()) for x in graph.matrices.values()]
        options.add_external_initializers(list(graph.matrices), matrices)
        self.session = onnxruntime.InferenceSession(
            graph.model().SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self.inputs = [each.name for each in self.session.get_inputs()]
        self.outputs = [each.name for each in self.session.get_outputs()]

    def run(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        results = self.session.run(self.outputs, {name: x.contiguous().numpy() for name, x in feeds.items()})
        return dict(zip(self.outputs, map(torch.from_numpy, results), strict=True))

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The only output, of contiguous inputs in the graph's order."""
        feeds = {name: x.numpy() for name, x in zip(self.inputs, inputs, strict=True)}
        (result,) = self.session.run(self.outputs, feeds)
        return torch.from_numpy(result)
