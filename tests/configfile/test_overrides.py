"""``a.b=c`` laid over a mapping."""

import copy

import pytest

from pellucid.configfile import apply_overrides
from pellucid.errors import ConfigError

BASE = {"rate": 0.1, "layers": ["causal", "causal"], "position": {"kind": "rope"}, "none": None}


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("rate=3e-4", ("rate",), 3e-4),
        ("rate = 1", ("rate",), 1),
        ("position.base=1e6", ("position", "base"), 1e6),
        ("new.inner.deep=true", ("new", "inner", "deep"), True),
        ("none.inner=1", ("none", "inner"), 1),
        ("layers.1=causal & window(4)", ("layers", 1), "causal & window(4)"),
        ("layers=[a, 'b']", ("layers",), ["a", "b"]),
        ("position={kind: learned, size: 8}", ("position",), {"kind": "learned", "size": 8}),
        ("text='3'", ("text",), "3"),
        ("text=a=b", ("text",), "a=b"),
        ("text=a: b #c", ("text",), "a: b #c"),
        ("text=&x *y !z", ("text",), "&x *y !z"),
        ("text=no", ("text",), "no"),
        ("text=", ("text",), None),
        ("text=null", ("text",), None),
    ],
)
def test_sets_one_value_and_leaves_the_input_alone(override: str, path: tuple[str | int, ...], value: object) -> None:
    before = copy.deepcopy(BASE)
    got = apply_overrides(BASE, [override])
    for key in path:
        got = got[key]  # type: ignore[index]
    assert got == value
    assert type(got) is type(value)
    assert before == BASE


def test_the_later_one_wins_and_tuples_can_be_entered() -> None:
    assert apply_overrides({}, ["a=1", "a=2"]) == {"a": 2}
    assert apply_overrides({"a": (1, 2)}, ["a.0=5"]) == {"a": [5, 2]}


def test_nothing_is_shared_with_the_input() -> None:
    result = apply_overrides(BASE, [])
    result["position"]["kind"] = "changed"
    assert BASE["position"] == {"kind": "rope"}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rate", "write key=value"),
        ("=3", "write key=value"),
        ("a..b=3", "write key=value"),
        ("a.=3", "write key=value"),
        ("rate.x=3", "rate is 0.1, not a mapping or a list"),
        ("layers.2=x", "'2' of layers, but layers is a list of 2"),
        ("layers.x=x", "'x' of layers"),
        ("layers.-1=x", "'-1' of layers"),
        ("layers.²=x", "'²' of layers"),
        ("layers.99999999999999999999=x", "of layers"),
        ("layers=[a", "override 'layers=[a' line 1"),
        ("a=[*x]", "anchors and aliases"),
        ("a={b: 1, b: 2}", "already given"),
        ("a=" + "9" * 5000, "5000 digits"),
        (".".join("a" * 40) + "=1", "40 levels deep"),
    ],
)
def test_refused_overrides(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides(BASE, [override])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
