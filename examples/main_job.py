"""The main job, end to end: a language model runs with three quarters of its layers' weights on disk.

A Llama of about 200 MB with random weights is compiled twice, by Inductor alone and by flextensor with a budget, and both
must give the same bits; so must the model itself once its weights are back. Exits with 1 where they do not.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import flextensor_fx

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

OPTIONS = {"include_patterns": ["model.layers.*"], "budget": "25%"}


def main() -> int:
    """Runs the job and returns the exit status."""
    model = build_model()
    size = sum(parameter.nbytes for parameter in model.parameters())
    print(f"model: Llama, {len(model.model.layers)} layers, {size / 1e6:.0f} MB of float32 weights, random")
    ids = torch.randint(model.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(1))

    with torch.no_grad():
        eager = model(ids).logits
        resident = torch.compile(model, backend="inductor")
        expected = timed("inductor, all weights in memory", lambda: resident(ids).logits)
        streamed = torch.compile(model, backend="flextensor", fullgraph=True, options=OPTIONS)
        found = timed("flextensor, budget 25%", lambda: streamed(ids).logits)
        report = flextensor_fx.report(streamed)
        print(f"\n{report}\n")
        flextensor_fx.release(model)
        released = model(ids).logits

    checks = {
        "the streamed model gives the bits of the resident one": torch.equal(found, expected),
        f"peak {report.peak_bytes} bytes within the budget of {report.budget}": report.peak_bytes
        <= (report.budget or 0),
        "after release the model gives the bits it gave before": torch.equal(released, eager),
    }
    for claim, holds in checks.items():
        print(f"{'ok    ' if holds else 'FAILED'}  {claim}")
    return 0 if all(checks.values()) else 1


def build_model() -> LlamaForCausalLM:
    """The model, in eval mode."""
    # transformers imports torchao where it is installed, and that warns at import of every GPU kernel it cannot load.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=12,
        num_key_value_heads=12,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval()


def timed(label: str, call: Callable[[], Tensor]) -> Tensor:
    """Calls twice, prints the seconds of the first call, which compiles, and of the second, and returns the second's result."""
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    print(f"{label}: first call {seconds[0]:.1f} s (compiles), second {seconds[1] * 1e3:.0f} ms")
    return result


if __name__ == "__main__":
    sys.exit(main())
