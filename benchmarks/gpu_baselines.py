"""What gpu_check.py measures beside: bare copies of as many bytes, and modules that hooks load and drop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class PlainCopies:
    """Copies from pinned memory, one behind the other on a stream, that nothing waits for and nothing else runs beside.

    Every byte is read from a place of its own, as a model's weights are: what a cache holds copies faster.

    Args:
        sizes: bytes of each copy.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.nbytes = sum(sizes)
        on_gpu = device.type != "cpu"
        source = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=on_gpu)
        source.fill_(1)  # pages that were never written may be one page of zeros
        into = torch.empty(max(sizes), dtype=torch.uint8, device=device)
        ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
        self._pairs = [(into[:size], source[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
        self._stream = torch.cuda.Stream(device) if on_gpu else None

    def __call__(self) -> None:
        with torch.cuda.stream(self._stream):  # None: whatever is current
            for into, source in self._pairs:
                into.copy_(source, non_blocking=True)


def with_hooks(model: nn.Module, backend: str | None) -> Callable[..., Tensor]:
    """The model with a hook before each layer that copies its weights from pinned memory, and one behind that drops them.

    Args:
        backend: compiles each layer by itself, between its hooks; None: nothing is compiled.
    """
    layers = model.layers
    assert isinstance(layers, nn.ModuleList)
    for place, layer in enumerate(layers):
        layers[place] = Hooked(layer, backend)
    return model


class Hooked(nn.Module):
    """A layer whose weights are on the device while it runs."""

    def __init__(self, layer: nn.Module, backend: str | None) -> None:
        super().__init__()
        compiled = None if backend is None else torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
        self._run = layer if compiled is None else compiled
        self._weights = list(layer.parameters())
        self._device = self._weights[0].device
        pinned = self._device.type != "cpu"
        self._host = [p.data.to("cpu").pin_memory() if pinned else p.data.clone() for p in self._weights]
        self.register_forward_pre_hook(Hooked.load)
        self.register_forward_hook(Hooked.drop)
        self.drop()

    def forward(self, *arguments: Any) -> Any:
        return self._run(*arguments)

    def load(self, *_: Any) -> None:
        for weight, host in zip(self._weights, self._host, strict=True):
            # A copy that is the memory itself would cost nothing on the CPU.
            weight.data = host.to(self._device, non_blocking=True, copy=True)

    def drop(self, *_: Any) -> None:
        for weight in self._weights:
            weight.data = torch.empty(0, dtype=weight.dtype, device=self._device)
