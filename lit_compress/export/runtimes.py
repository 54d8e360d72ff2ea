"""The runtimes that can run an export or any other model folder: PyTorch, ONNX Runtime, OpenVINO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

ProgramFormat = Literal["onnx", "openvino"]
Format = Literal["hf", "onnx", "openvino"]
Dtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"]
FILES: dict[ProgramFormat, str] = {"onnx": "model.onnx", "openvino": "openvino_model.xml"}
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}

Inputs = dict[str, Any]  # arrays of int64 by name
Runner = Callable[[Inputs], list[Any]]  # returns the results in the runtime's own type


@dataclass(frozen=True)
class Setting:
    """How a model is run.

    Attributes:
        results: names of its outputs; for a program none are all.
        threads: of the runtime.
        device, dtype: of PyTorch; ``cpu``, ``cuda``, ...
    """

    results: tuple[str, ...]
    threads: int = 1
    device: str = "cpu"
    dtype: str = "float32"


@dataclass(frozen=True)
class Runtime:
    """One way to run a model.

    Attributes:
        name: as users type it.
        packages: that must be installed.
        load: makes a function of a model (``hf``) or the file of a program; raises LookupError if the runtime does not
            run on the device.
        form, dtype: of its input, and of its products; of PyTorch the setting has the dtype.
        tolerance: by how much its results usually differ from PyTorch's, relative above 1.
    """

    name: str
    packages: tuple[str, ...]
    load: Callable[[Any, Setting], Runner]
    form: Format = "hf"
    dtype: Dtype = "float32"
    tolerance: float = 1e-4

    def missing(self) -> list[str]:
        """Return the packages that are not installed."""
        return [package for package in self.packages if find_spec(package) is None]

    @property
    def runs_programs(self) -> bool:
        """Whether it loads a program in place of a model."""
        return self.form != "hf"


def torch_runner(net: Any, setting: Setting, way: str = "eager") -> Runner:
    """Return the call of a model in PyTorch; results stay on the device, which may still be computing them.

    ``net`` is moved to the device of ``setting`` and gets its dtype, in place. ``way`` is ``eager``, ``graphs``
    (replayed as a CUDA graph for each shape) or ``compiled`` (by ``torch.compile``, on CUDA block by block for each
    shape, and then replayed as graphs). A LookupError says that the device has no CUDA graphs.
    """
    net = net.to(setting.device).eval()
    for value in net.state_dict(keep_vars=True).values():  # what a file would have; other buffers stay in float32
        if value.is_floating_point():
            value.data = value.data.to(getattr(torch, setting.dtype))
    call = net
    if way == "compiled":
        # models of one class count as one function, which would not be compiled any more after some of them; on CUDA
        # each width of a block counts, at each shape
        torch._dynamo.config.recompile_limit = 10_000 if setting.device == "cuda" else 64
        if setting.device == "cuda":
            torch._dynamo.config.accumulated_recompile_limit = 10_000
            for block in _blocks(net):
                block.compile(dynamic=False)
        else:  # one form for all shapes: else what is timed at a shape would depend on the shapes before it
            call = torch.compile(net, dynamic=True)
    if way == "graphs" and setting.device != "cuda":
        raise LookupError("CUDA graphs need --device cuda")
    if way != "eager" and setting.device == "cuda":
        call = _Graphs(net, setting.results)

    def run(inputs: Inputs) -> list[Any]:
        with torch.inference_mode():
            output = call(**{name: torch.as_tensor(value, device=setting.device) for name, value in inputs.items()})
        return [output[name] for name in setting.results]

    return run


def _blocks(net: Any) -> list[Any]:
    """Return the blocks of a model, which are compiled once if they have one shape; else the model."""
    lists = [module for module in net.modules() if isinstance(module, nn.ModuleList) and len(module)]
    return list(max(lists, key=lambda blocks: sum(value.numel() for value in blocks.parameters()), default=[net]))


class _Graphs:
    """A model whose calls are replayed as CUDA graphs of its ``results``: one launch for all operations of a shape."""

    kept = 8  # shapes, the last ones; a graph holds its results

    def __init__(self, net: Any, results: tuple[str, ...]) -> None:
        self._results = results
        self._net, self._made, self._pool = net, dict[Any, Any](), torch.cuda.graph_pool_handle()

    def __call__(self, **inputs: Any) -> dict[str, Any]:
        key = tuple((name, tuple(value.shape)) for name, value in sorted(inputs.items()))
        if key not in self._made:
            while len(self._made) >= self.kept:
                self._made.pop(next(iter(self._made)))
            given = {name: value.clone() for name, value in inputs.items()}
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # what is allocated or compiled at the first call must not be captured
                for _ in range(3):
                    self._net(**given)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                output = self._net(**given)
            self._made[key] = graph, given, {name: output[name] for name in self._results}
        graph, given, output = self._made[key]
        for name, value in inputs.items():
            given[name].copy_(value)
        graph.replay()
        return {name: value.clone() for name, value in output.items()}


def _onnx(file: Path, setting: Setting) -> Runner:
    import onnxruntime

    provider = PROVIDERS.get(setting.device, f"provider for {setting.device}")
    if provider not in onnxruntime.get_available_providers():
        raise LookupError(f"this onnxruntime has no {provider}")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = setting.threads, 1, 3
    options.add_session_config_entry("session.force_spinning_stop", "1")  # its threads rest while others have a turn
    session = onnxruntime.InferenceSession(file, options, providers=[provider])
    names = [item.name for item in session.get_inputs()]
    results = [*setting.results] or None
    return lambda inputs: session.run(results, {name: inputs[name] for name in names})


@cache
def openvino_core() -> Any:
    """Return OpenVINO's core of this process, which is never freed.

    A core brings a stack for the handlers of signals. If one of two is freed before the other, that stack is gone, and
    the next signal, such as Ctrl-C or the end of a worker of a data loader, ends the process.
    """
    import openvino

    core = openvino.Core()
    core.get_property("CPU", "FULL_DEVICE_NAME")  # loads the plugin, which has the stack
    return core


def _openvino(file: Path, setting: Setting) -> Runner:
    if setting.device != "cpu":
        raise LookupError("OpenVINO is timed on the CPU only")
    options = {"INFERENCE_NUM_THREADS": setting.threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    model = openvino_core().compile_model(str(file), "CPU", options)
    names = [item.any_name for item in model.inputs]

    def run(inputs: Inputs) -> list[Any]:
        results = model({name: inputs[name] for name in names})
        return [results[name] for name in setting.results] or [*results.values()]

    return run


def placed(inputs: Mapping[str, Any], device: str) -> Inputs:
    """Return inputs as a runtime takes them: arrays; on an accelerator tensors, without a mask that hides nothing."""
    if device == "cpu":
        return {name: np.asarray(value) for name, value in inputs.items()}
    # with a mask, models ask the accelerator in every call whether it hides something, or take the slower attention
    hides = {name: not value.all() for name, value in inputs.items() if name == "attention_mask"}
    return {name: torch.as_tensor(value, device=device) for name, value in inputs.items() if hides.get(name, True)}


RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime("eager", ("torch", "transformers"), torch_runner),
        Runtime("compiled", ("torch", "transformers"), partial(torch_runner, way="compiled")),
        Runtime("graphs", ("torch", "transformers"), partial(torch_runner, way="graphs")),
        Runtime("onnx", ("onnx", "onnxscript", "onnxruntime"), _onnx, "onnx"),
        Runtime("openvino", ("openvino", "onnx", "onnxscript"), _openvino, "onnx", tolerance=1e-3),
        Runtime("onnx-int8", ("onnx", "onnxscript", "onnxruntime", "nncf"), _onnx, "onnx", "int8", 0.25),
        Runtime("openvino-int8", ("openvino", "nncf"), _openvino, "openvino", "int8", 0.25),
    )
}  # fmt: skip
