from pellucid.cli.demo import SIZES, choose_size
from pellucid.configfile import apply_overrides
from pellucid.models import ModelConfig, build


def test_parameters_are_counted_as_they_are_built():
    for size in SIZES:
        mapping = {
            "model": {
                "vocab_size": 4096,
                "attention": {},
                "ffn": {"kind": "gated"},
            },
        }
        config = ModelConfig(**apply_overrides(mapping, size.overrides())["model"])
        built = sum(p.numel() for p in build(config, device="meta").parameters() if p.dim() == 2)
        assert built == size.parameters


def test_more_time_or_speed_never_means_a_smaller_model():
    chosen = [choose_size(minutes, speed) for minutes in (0.1, 4, 60) for speed in (1e9, 5e10, 1e12)]
    assert choose_size(0.01, 1e9) == SIZES[0]
    assert choose_size(1e6, 1e12) == SIZES[-1]
    by_work = sorted(zip([m * s for m in (0.1, 4, 60) for s in (1e9, 5e10, 1e12)], chosen, strict=True))
    sizes = [size.parameters for _, size in by_work]
    assert sizes == sorted(sizes)
