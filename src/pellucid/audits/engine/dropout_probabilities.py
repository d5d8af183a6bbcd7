"""Where a module holds probabilities to drop something, and dropout switched off or up in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

_NESTED = 3  # how deep configurations are looked through for probabilities


@dataclass(frozen=True)
class Probability:
    """A place that holds a probability to drop something: ``holder[key]``."""

    holder: dict[str, Any]
    key: str
    path: str
    value: float
    keeps: bool = False  # it is the probability to keep

    @property
    def drops(self) -> float:
        return 1 - self.value if self.keeps else self.value

    def set(self, probability: float) -> None:
        """From now on drop with this probability."""
        self.holder[self.key] = 1 - probability if self.keeps else probability


def probabilities(module: nn.Module, nested: bool = True) -> list[Probability]:
    """Every dropout probability: of torch's own layers, of attributes called so, of configurations (``nested``)."""
    found: list[Probability] = []
    seen: set[int] = set()
    for name, part in module.named_modules():
        own = vars(part)
        if isinstance(part, _DropoutNd):
            found.append(Probability(own, "p", f"{name}.p".lstrip("."), float(part.p)))
        known = {**_of_classes(type(part)), **own}
        found += _in_attributes(own, known, name)
        if "drop" in type(part).__name__.lower() and not isinstance(part, _DropoutNd):  # somebody's own dropout
            named = {key: value for key, value in known.items() if key in ("p", "prob", "rate", "probability")}
            found += (
                Probability(own, key, f"{name}.{key}".lstrip("."), float(value))
                for key, value in named.items()
                if isinstance(value, float) and 0 <= value <= 1
            )
        if nested:
            for key, value in own.items():
                found += _in_configuration(value, f"{name}.{key}".lstrip("."), _NESTED, seen)
    return found


def _in_attributes(holder: dict[str, Any], values: dict[str, Any], path: str) -> Iterator[Probability]:
    for key, value in values.items():
        if isinstance(key, str) and _is_probability(key, value):
            yield Probability(holder, key, f"{path}.{key}".lstrip("."), float(value), "keep" in key.lower())


def _is_probability(name: str, value: object) -> bool:
    low = name.lower()
    number = isinstance(value, float) or (isinstance(value, int) and low.endswith(("dropout", "pdrop")))
    if not number or isinstance(value, bool) or not 0 <= value <= 1:  # type: ignore[operator]
        return False
    return "drop" in low or low in ("keep_prob", "keep_probability")


def _of_classes(kind: type) -> dict[str, Any]:
    """What the classes between this one and ``nn.Module`` hold."""
    attributes: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, nn.Module) and base is not nn.Module:
            attributes |= vars(base)
    return attributes


def _in_configuration(value: object, path: str, depth: int, seen: set[int]) -> Iterator[Probability]:
    """Inside plain objects and mappings; modules have been visited already."""
    if depth == 0 or id(value) in seen or isinstance(value, (nn.Module, Tensor, type)) or callable(value):
        return
    attributes = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or path.rpartition(".")[2] in ("_parameters", "_buffers", "_modules"):
        return
    seen.add(id(value))
    yield from _in_attributes(attributes, attributes, path)
    for key, inner in list(attributes.items())[:200]:
        yield from _in_configuration(inner, f"{path}.{key}", depth - 1, seen)


def set_dropout(module: nn.Module, probability: float) -> int:
    """Set every probability to drop; how many there are."""
    places = probabilities(module)
    for place in places:
        place.set(probability)
    return len(places)


class NoDropout(TorchFunctionMode):
    """While inside, torch's functional dropouts give their input back."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        named = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            named["dropout_p"] = 0.0
            return func(*args[:4], **named, **dict(zip(("is_causal",), args[5:6], strict=False)))
        if "dropout" in name and name != "native_dropout" and (args or "input" in named):
            return args[0] if args else named["input"]
        return func(*args, **named)
