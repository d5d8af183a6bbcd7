"""Every whole number of every configuration has an end: none is so large that it fails somewhere else."""

import importlib
import pkgutil
from typing import Annotated, Any, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

import pellucid
from pellucid.configfile import Config
from pellucid.errors import ConfigError
from pellucid.generation import BeamSearchConfig, GenerationConfig
from pellucid.training.config import TrainConfig

for module in pkgutil.walk_packages(pellucid.__path__, "pellucid."):
    if module.name != "pellucid.__main__" and "audits" not in module.name:
        importlib.import_module(module.name)

HUGE = 99999999999999999999999


def configs(of: type = Config) -> list[type[Config]]:
    below = [part for kind in of.__subclasses__() for part in (kind, *configs(kind))]
    return sorted({kind for kind in below if kind.__module__.startswith("pellucid.")}, key=lambda k: k.__name__)


def endless(annotation: Any, limits: tuple[Any, ...]) -> bool:
    """Whether a whole number of any size is taken somewhere in this type."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        flat = [part for one in more for part in (one.metadata if isinstance(one, FieldInfo) else [one])]
        return endless(inner, (*limits, *flat))
    if annotation is int:
        return not any(getattr(limit, "le", None) or getattr(limit, "lt", None) for limit in limits)
    return any(endless(part, limits if type(None) in get_args(annotation) else ()) for part in get_args(annotation))


def test_every_whole_number_has_a_largest_value() -> None:
    found = [
        f"{kind.__name__}.{name}"
        for kind in configs()
        for name, field in kind.model_fields.items()
        if endless(field.annotation, tuple(field.metadata))
    ]
    assert len(configs()) > 50
    assert found == []


@pytest.mark.parametrize(
    "name", ["seed", "save_total_limit", "batch_size", "save_steps", "gradient_accumulation_steps"]
)
def test_a_number_too_large_for_a_run_is_one_clear_line(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is {HUGE}, but must be (at most|less than) \d+"):
        TrainConfig.from_mapping({"model": {"preset": "tiny-decoder"}, "max_steps": 1, name: HUGE})


@pytest.mark.parametrize("params", [GenerationConfig, BeamSearchConfig])
def test_a_number_too_large_for_a_request_is_one_clear_line(params: type[Config]) -> None:
    with pytest.raises(ConfigError, match=f"max_new_tokens is {HUGE}, but must be at most 1099511627776"):
        params(max_new_tokens=HUGE)
