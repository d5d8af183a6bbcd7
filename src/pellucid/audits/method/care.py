"""Leave a target as it was found."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from pellucid.audits.method.world import put_back, switches


@contextmanager
def left_as_found(module: nn.Module | None) -> Iterator[None]:
    """Eval mode inside; outside, mode, weights, buffers and every random state are what they were."""
    modes = [] if module is None else [(m, m.training) for m in module.modules()]
    tensors = [] if module is None else [*module.parameters(), *module.buffers()]
    kept = [tensor.detach().clone() for tensor in tensors]
    buffers = [(m, dict(m._buffers)) for m, _ in modes if isinstance(m._buffers, dict)]  # not of a scripted module
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.callback(put_back, switches())
        stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
        stack.callback(random.setstate, random.getstate())
        if "numpy" in sys.modules:
            numpy_random = sys.modules["numpy"].random
            stack.callback(numpy_random.set_state, numpy_random.get_state())
        try:
            if module is not None:
                module.eval()
            yield
        finally:
            for part, training in modes:
                part.training = training
            for part, named in buffers:
                part._buffers.update(named)
            with torch.no_grad():
                for tensor, before in zip(tensors, kept, strict=True):
                    if not torch.equal(tensor, before):
                        tensor.copy_(before)
