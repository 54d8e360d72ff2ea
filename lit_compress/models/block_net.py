"""A model with one block at a time in memory, so that it can be larger than memory.

Everything outside the blocks (embeddings, last norm, head) stays in memory. In the place of every block is a stand-in.
The model's own forward makes masks and positions, and calls every stand-in as it would call the block; the stand-in of
the block in question runs it, on hidden states that are given, and ends the forward there. So no code of a family is
needed here, and none is copied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from lit_compress.models.architectures import get_architecture
from lit_compress.models.backbones import empty_net
from lit_compress.models.files import LazyTensors
from lit_compress.models.sites import base_prefix, blocks
from lit_compress.models.storage import tied
from lit_compress.models.surgery import Structure, empty_parameters, rebuild, replace
from lit_compress.numerics.decompose import all_finite
from lit_compress.utils.devices import move
from lit_compress.utils.errors import UserError
from lit_compress.utils.types import Config, Model

BatchTensors = dict[str, Tensor]


class _BlockReached(Exception):
    """Ends a forward behind the block in question."""


class StandIn(nn.Module):
    """Has no weights; asks its owner for the output of block ``number``, whose attributes it has."""

    def __init__(self, block: nn.Module, owner: Blocks, number: int) -> None:
        super().__init__()
        self._held = (block, owner, number)  # in a tuple, so that the block is no submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the owner's output for these states, and a function that calls a block with other states."""
        block, owner, number = self._held

        def again(hidden: Tensor, other: nn.Module | None = None) -> Any:
            called = block if other is None else other
            return called(hidden, *args[1:], **kwargs) if args else called(**kwargs | {"hidden_states": hidden})

        return owner.run(number, args[0] if args else kwargs["hidden_states"], again)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the block."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._held[0], name)


def check_by_block(net: Model, option: str = "--by_block") -> None:
    """Refuse a model whose blocks cannot run one by one on the previous block's output; only its record is read."""
    record, name = get_architecture(net), net.config.model_type
    reasons = {
        "it has an encoder and a decoder": net.config.is_encoder_decoder,
        "one block runs several times": record.repeated,
        "its blocks hand on more than hidden states": record.passes_on,
        "its matrices also read relative positions": getattr(net.config, "relative_attention", False),
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise UserError(f"{option}: '{name}' cannot go block by block, {reason}; leave the option out")


class Blocks:
    """A model whose ``blocks``, by ``names``, run one by one on ``device``; ``net`` gets stand-ins in their places."""

    def __init__(self, net: Model, device: torch.device | str = "cpu") -> None:
        self.net, self.device = net, torch.device(device)
        self.names = [name for *_, name, _ in blocks(net)]
        self.blocks = [block for *_, block in blocks(net)]
        self.run: Callable[..., Any]  # of number, hidden states and StandIn's function; only in a forward
        for number, (name, block) in enumerate(zip(self.names, self.blocks, strict=True)):
            replace(net, name, StandIn(block, self, number))
        if hasattr(net.config, "use_cache"):
            net.config.use_cache = False

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.names)

    @contextmanager
    def block(self, number: int) -> Iterator[nn.Module]:
        """Yield block ``number``, which is on the device meanwhile."""
        block = self.blocks[number]
        yield block.to(self.device)
        block.to("cpu")

    def step(self, number: int, inputs: BatchTensors, hidden: Tensor | None, other: nn.Module | None = None) -> Tensor:
        """Return the output of block ``number``, which has its values, or of the module ``other`` in its place.

        ``inputs`` are the model's; ``hidden`` [b, length, width] is on any device, by default the embeddings' output.
        """
        outputs: list[Tensor] = []

        def run(at: int, states: Tensor, again: Callable[..., Any]) -> Any:
            if at != number:
                return self._shaped(states)
            output = again(states if hidden is None else hidden.to(self.device, states.dtype), other)
            outputs.append(output if isinstance(output, Tensor) else output[0])
            raise _BlockReached

        with self._running(run), suppress(_BlockReached):
            self.net(**inputs)
        return outputs[0]

    def finish(self, inputs: BatchTensors, hidden: Tensor) -> Any:
        """Return the model's output if ``hidden`` [b, length, width] is the last block's output."""
        last = len(self) - 1

        def run(at: int, states: Tensor, again: Callable[..., Any]) -> Any:
            return self._shaped(hidden.to(self.device, states.dtype) if at == last else states)

        with self._running(run):
            return self.net(**inputs)

    @contextmanager
    def _running(self, run: Callable[..., Any]) -> Iterator[None]:
        self.run = run
        try:
            with torch.autocast(self.device.type, enabled=False):
                yield
        finally:
            del self.run  # it has the output, and so the graph

    def _shaped(self, hidden: Tensor) -> Any:
        parts = get_architecture(self.net).parts_returned
        return (hidden, *[None] * (parts - 1)) if parts else hidden


@contextmanager
def one_by_one(net: Model, device: torch.device | str) -> Iterator[Blocks]:
    """Yield the :class:`Blocks` of a model in memory, which is whole again afterwards, on the CPU.

    The parts outside the blocks are on ``device``; a block is there only while it is needed.
    """
    cache = getattr(net.config, "use_cache", None)
    walked = Blocks(net, device)
    try:
        move(net, device)
        yield walked
    finally:
        move(net, "cpu")
        for name, block in zip(walked.names, walked.blocks, strict=True):
            replace(net, name, block)
        if cache is not None:
            net.config.use_cache = cache


class BlockNet(Blocks):
    """The model in a folder, with one block at a time in memory; parameters of blocks have values in :meth:`block`.

    Args:
        config, tensors: of the folder, with the ``structure`` of an export.
        unused: starts of names of tensors that a file may lack; they are 0 then.
        device: where it runs.
    """

    def __init__(
        self,
        config: Config,
        tensors: LazyTensors,
        structure: Structure | None = None,
        unused: tuple[str, ...] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        with empty_parameters():  # but buffers are whole
            net = empty_net(copy.deepcopy(config))
            net.tie_weights()  # which the initialization does
            rebuild(net, structure or {})
        check_by_block(net)
        super().__init__(net.eval().requires_grad_(False), device)
        self.tensors, self._unused = tensors, unused
        self.prefix = base_prefix(net)
        tensors.rename(net)
        self._aliases = tied(net)
        self._fill_outside()

    def _fill_outside(self) -> None:
        values = {name: self.read(name) for name in self.outside()}
        self.net.load_state_dict(values, strict=False, assign=True)
        for name, first in self._aliases.items():
            replace(self.net, name, self.net.get_parameter(first))
        move(self.net, self.device).requires_grad_(False)

    @contextmanager
    def only_block(self) -> Iterator[None]:
        """Unload the parts outside the blocks, and reload them at the end."""
        empty(self.net)
        yield
        self._fill_outside()

    def read(self, name: str) -> Tensor:
        """Return a tensor from the file, in float32; refuse one that is missing or not finite."""
        stored = self.tensors.find(name, self.prefix)
        if stored is None:
            if name.startswith(self._unused):
                return torch.zeros(self.net.state_dict()[name].shape)
            raise UserError(f"{self.tensors.what} has no tensor '{name}'; give the folder of a whole model")
        value = self.tensors[stored]
        value = value.to(torch.float32 if value.is_floating_point() else value.dtype, copy=True)
        if value.is_floating_point() and not all_finite(value):
            raise UserError(f"{self.tensors.what}: '{name}' has values that are not finite; it is broken")
        return value

    def outside(self) -> dict[str, Tensor]:
        """Return the tensors outside the blocks, each once; without values in :meth:`only_block`."""
        return {name: value for name, value in self.net.state_dict().items() if name not in self._aliases}

    def fill(self, number: int, block: nn.Module) -> None:
        """Give ``block``, of this model or one with the same names, the values of block ``number``."""
        own, name = block.state_dict(), self.names[number]
        values = {key: self.read(f"{name}.{key}") for key in own}
        if wrong := next((key for key in own if own[key].shape != values[key].shape), None):
            shapes = f"{list(values[wrong].shape)} in the file and {list(own[wrong].shape)} by its configuration"
            raise UserError(f"{self.tensors.what}: '{name}.{wrong}' has the shape {shapes}")
        block.load_state_dict(values, assign=True)
        block.requires_grad_(False)

    @contextmanager
    def block(self, number: int) -> Iterator[nn.Module]:
        """Yield block ``number`` with its values, which are released afterwards."""
        block = self.blocks[number]
        self.fill(number, block)
        try:
            yield block.to(self.device)
        finally:
            empty(block)


def empty(block: nn.Module) -> None:
    """Give the parameters of ``block`` up; their shapes stay."""
    for module in block.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False))


class Ending(nn.Module):
    """The rest of ``net`` behind its last block, whose ``states`` are for every batch; called as a model."""

    def __init__(self, net: Blocks, states: Iterator[Tensor]) -> None:
        super().__init__()
        self._net, self._states, self.config = net, states, net.net.config
        self.get_output_embeddings = net.net.get_output_embeddings

    def forward(self, **inputs: Tensor) -> Any:
        """Return the outputs of the next batch, or of its first rows."""
        rows = len(next(iter(inputs.values())))
        return self._net.finish(inputs, next(self._states)[:rows])
