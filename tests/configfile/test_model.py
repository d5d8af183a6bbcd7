"""``Config``: strict types, one clear line per problem, text that reads back equal."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, model_validator

from pellucid.configfile import Config, to_yaml
from pellucid.configfile.yaml import load_yaml
from pellucid.errors import ConfigError, InputError

NAN, INF = float("nan"), float("inf")


class Rope(Config):
    kind: Literal["rope"] = "rope"
    base: float = 1e4


class Learned(Config):
    kind: Literal["learned"] = "learned"
    size: int = Field(gt=0)


Position = Annotated[Rope | Learned, Field(discriminator="kind")]


class Model(Config):
    hidden_size: int = Field(default=8, ge=1)
    layers: tuple[str, ...] = ("causal",)
    position: Position = Rope()
    others: tuple[Position, ...] = ()
    limit: int | Literal["auto"] = "auto"
    rates: dict[str, float] = Field(default_factory=dict)
    tied: bool = False
    maybe: Rope | None = None
    pairs: tuple[tuple[int, int], ...] = ()

    @model_validator(mode="after")
    def _divides(self) -> "Model":
        if self.hidden_size == 7:
            raise ConfigError("hidden_size 7 does not divide by 2")
        return self


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        ({"hidden_sise": 3}, "there is no key 'hidden_sise', did you mean 'hidden_size'?"),
        ({"base": 3.0}, "there is no key 'base', did you mean 'position.base'?"),
        (
            {"qqq": 3},
            "there is no key 'qqq', known keys are hidden_size, layers, position, others, limit, rates, "
            "tied, maybe, pairs",
        ),
        ({"hidden_size": "3"}, "is '3', but must be a whole number: it is text, write 3 without quotes"),
        ({"hidden_size": True}, "hidden_size is true, but must be a whole number"),
        ({"hidden_size": 3.0}, "hidden_size is 3.0, but must be a whole number, write 3"),
        ({"hidden_size": 3.5}, "hidden_size is 3.5, but must be a whole number"),
        ({"hidden_size": None}, "hidden_size is null, but must be a whole number"),
        ({"hidden_size": 0}, "hidden_size is 0, but must be at least 1"),
        ({"hidden_size": 7}, "hidden_size 7 does not divide by 2"),
        ({"layers": "causal"}, "layers is 'causal', but must be a list"),
        ({"layers": ["a", 3]}, "layers.1 is 3, but must be text"),
        ({"pairs": [[1, 2], [3]]}, "pairs.1.1 is missing"),
        ({"position": {"kind": "rop"}}, "kind is 'rop', choose 'rope' or 'learned' (did you mean 'rope'?)"),
        ({"position": {"base": 3}}, "position.kind is missing, choose 'rope' or 'learned'"),
        ({"position": {"kind": 3}}, "position.kind is '3', choose 'rope' or 'learned'"),
        ({"position": "rope"}, "position is 'rope', but must be a mapping"),
        (
            {"position": {"kind": "rope", "size": 3}},
            "position has no key 'size', it belongs to kind 'learned'",
        ),
        (
            {"position": {"kind": "learned", "sise": 3}},
            "position.size is missing; position has no key 'sise', did you mean 'size'?",
        ),
        ({"position": {"kind": "learned", "size": 0}}, "position.size is 0, but must be more than 0"),
        ({"position": {"kind": "rope", "base": NAN}}, "position.base is nan, but must be a finite number"),
        ({"position": {"kind": "rope", "base": INF}}, "position.base is inf, but must be a finite number"),
        (
            {"others": [{"kind": "rope"}, {"kind": "learned", "size": "x"}]},
            "others.1.size is 'x', but must be a whole number",
        ),
        ({"limit": "x"}, "limit is 'x', but must be a whole number or 'auto'"),
        ({"rates": {"a": "x"}}, "rates.a is 'x', but must be a number"),
        ({"rates": {"a": False}}, "rates.a is false, but must be a number"),
        ({"tied": "yes"}, "tied is 'yes', but must be true or false, write true"),
        ({"tied": 0}, "tied is 0, but must be true or false, write false"),
        ({"maybe": {"base": "x"}}, "maybe.base is 'x', but must be a number"),
        ({"position": {1: 3, "kind": "rope"}}, "the key 1 of position is not text, put it in quotes"),
        ({1: 3}, "the key 1 is not text, put it in quotes"),
        ({"hidden_size": "3", "tied": 1}, "hidden_size is '3', but must be a whole number"),
        ({"hidden_size": "x" * 5000}, "x…'"),
        ({"hidden_size": "a\nb"}, r"'a\nb'"),
    ],
)
def test_every_problem_is_one_clear_line(mapping: dict[Any, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Model.from_mapping(mapping)
    message = str(caught.value)
    assert said in message
    assert "\n" not in message
    assert len(message) < 400
    assert "pydantic" not in message


def test_all_problems_are_listed_and_many_are_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        Model(hidden_size="3", tied="no", layers=3)
    assert str(caught.value).count("; ") == 2
    with pytest.raises(ConfigError, match="and 12 more problems"):
        Model(**{f"key_{n:02}": 1 for n in range(20)})


def test_a_config_error_is_a_value_error_also_when_made_with_keywords() -> None:
    with pytest.raises(ValueError, match="no key"):
        Rope(bas=1.0)
    with pytest.raises(InputError, match="made from a mapping"):
        Rope.from_mapping([1])  # type: ignore[arg-type]


def test_lists_for_tuples_whole_numbers_for_floats_and_configs_as_values() -> None:
    model = Model(layers=["a", "b"], pairs=[[1, 2]], position=Learned(size=3), rates={"a": 1})
    assert model.layers == ("a", "b")
    assert model.pairs == ((1, 2),)
    assert model.position == Learned(size=3)
    assert isinstance(model.rates["a"], float)


def test_frozen_and_copies_are_checked() -> None:
    model = Model()
    with pytest.raises(ValueError, match="frozen"):
        model.hidden_size = 3  # type: ignore[misc]
    assert model.model_copy(update={"hidden_size": 16}).hidden_size == 16
    assert model.model_copy() == model
    with pytest.raises(ConfigError, match="must be a whole number"):
        model.model_copy(update={"hidden_size": "16"})


def test_from_file_names_the_file_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("hidden_size: 4\nposition: {kind: rope, base: 3e-4}\n")
    model = Model.from_file(path, ["hidden_size=16"])
    assert (model.hidden_size, model.position) == (16, Rope(base=3e-4))
    with pytest.raises(ConfigError, match=r"m\.yaml: there is no key 'hidden_sise'"):
        Model.from_file(path, ["hidden_sise=3"])


def test_yaml_keeps_the_order_of_the_fields() -> None:
    assert to_yaml(Model()).splitlines() == [
        "hidden_size: 8",
        "layers:",
        "- causal",
        "position:",
        "  kind: rope",
        "  base: 10000.0",
        "others: []",
        "limit: auto",
        "rates: {}",
        "tied: false",
        "maybe: null",
        "pairs: []",
    ]


TRAPS = st.sampled_from(
    ["3e-4", "no", "null", "~", "", "1_000", "0o7", "true", "a: b", "# c", "&a", "*a", "!t", "1:30", "- x",
     "2026-01-01", "<<", "=", ".nan", "a\nb", " a ", "é漢🙂", "'", '"', "\t", "\x85", "\u2028", "\\"]
)  # fmt: skip
TEXT = TRAPS | st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)


@settings(max_examples=100, deadline=None)
@given(
    layers=st.lists(TEXT, max_size=4),
    rates=st.dictionaries(TEXT, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    base=st.floats(allow_nan=False, allow_infinity=False),
)
def test_what_is_written_reads_back_equal(layers: list[str], rates: dict[str, float], base: float) -> None:
    model = Model(layers=layers, rates=rates, position=Rope(base=base), others=[Rope(), Rope()])
    assert Model.from_mapping(load_yaml(to_yaml(model), "text")) == model


def test_a_written_file_reads_back_equal(tmp_path: Path) -> None:
    model = Model(layers=["causal() & window(4)", "漢\n\x85"], rates={"no": 3e-4})
    (tmp_path / "m.yaml").write_text(to_yaml(model), encoding="utf-8")
    assert Model.from_file(tmp_path / "m.yaml") == model


def test_the_schema_forbids_unknown_keys() -> None:
    schema = Model.json_schema()
    assert schema["additionalProperties"] is False
    assert list(schema["properties"])[:2] == ["hidden_size", "layers"]
