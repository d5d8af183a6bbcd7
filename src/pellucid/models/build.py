"""From a config to a model with first weights: the only place where the two meet."""

from __future__ import annotations

import torch
from torch import nn

from pellucid.errors import ConfigError
from pellucid.models.assemble import assembled, deep_norm, tie
from pellucid.models.config import ModelConfig, TransformerConfig
from pellucid.models.devices import why_unusable
from pellucid.models.encoder_decoder import EncoderDecoder
from pellucid.models.model import Model
from pellucid.nn import init
from pellucid.nn.attend import Backend


def build(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    backend: Backend = "auto",
) -> Model:
    """A new model in eval mode, its weights drawn from ``seed``; the global random state is not touched.

    ``backend`` names the attention kernel for every layer; it changes speed, never results. On the ``meta`` device
    no memory is used and no weights are drawn.
    """
    if not isinstance(config, ModelConfig):
        raise ConfigError(
            f"build takes a ModelConfig, not {type(config).__name__}; make one with ModelConfig(**mapping)"
        )
    _check(seed, dtype, device)
    with torch.device("meta"):
        model = assembled(config, backend)
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
        _fill(model, config, seed)
    tie(model, config)
    return model.to(dtype).eval()


def _check(seed: object, dtype: object, device: object) -> None:
    if type(seed) is not int or not 0 <= seed < 1 << 63:
        raise ConfigError(f"seed is {str(seed)[:40]!r}, but a whole number from 0 to 2^63 - 1 is needed")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(
            f"dtype is {str(dtype)[:40]!r}, but weights are floating-point; give torch.float32, for example"
        )
    if str(device).split(":")[0] == "meta":  # where nothing is computed
        return
    if reason := why_unusable(device):  # type: ignore[arg-type]  # what it is, is asked here
        raise ConfigError(f"device is {str(device)[:40]!r}, which cannot be used here ({reason}); choose cpu")


def _fill(model: Model, config: ModelConfig, seed: int) -> None:
    """Initial values for every parameter and buffer, drawn on the model's device from ``seed``."""
    generator = torch.Generator(device=model.device).manual_seed(seed)
    init.init_norms(model)
    _draw(model, config, config, generator)
    if isinstance(model, EncoderDecoder):
        assert config.encoder is not None
        _draw(model.encoder, config.encoder, config, generator)
        if model.encoder.embed_tokens is model.embed_tokens:
            _draw(model.embed_tokens, config, config, generator)  # a shared table begins as the decoder's
    for part in reversed(model.stacks):
        init.init_positions(part, std=part.config.initializer_range or 0.02, generator=generator)


def _draw(model: nn.Module, stack: TransformerConfig, config: ModelConfig, generator: torch.Generator) -> None:
    """First weights of one stack by where its norms sit."""
    std, branches = stack.initializer_range, 3 if stack is config and config.encoder is not None else 2
    match stack.norm_placement:
        case "pre":
            init.init_pre_norm(
                model,
                layers=len(stack.layers),
                branches=branches,
                std=std,
                residual=stack.residual_init,
                generator=generator,
            )
        case "parallel" | "parallel_two":
            init.init_parallel(
                model, layers=len(stack.layers), std=std, residual=stack.residual_init, generator=generator
            )
        case "sandwich" | "reordered":
            init.init_sandwich(model, std=std, generator=generator)
        case "post":
            init.init_post_norm(model, generator=generator)
        case "deep":
            init.init_deep_norm(model, beta=deep_norm(config, stack)[1], generator=generator)
