"""Rules that can be read off the source: no circles, standard words, whole ``__all__`` (ruff sorts it)."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections import defaultdict
from statistics import median

import pytest
from pydantic import BaseModel

from helpers.source_tree import SRC, circles, identifiers, imports, trees

MODULES = trees()
ROOMS = sorted(".".join(path.relative_to(SRC).parent.parts) for path in (SRC / "pellucid").rglob("__init__.py"))

_WORDS = """
Alike Answered AnyOf AsWeightsOf Asked AtLeast Blocks Everything Forms GatedShared Given HeldOut Judge Judged
Labelled MeasuredFlow Memory Multiply Paired Passes PortableDropout Prompted RoutingSums RoutingTally ScoredRouter
SegmentEmbedding Speaker Tagged TextWitness Toy Twin ahead_of amplified apart as_it_is asked asking bench best_of
by_prefix by_slots care choice_bias culprit declaration dice edges_of embedded encode_with_places found_tries
furthest go_on goes_on has_memory held held_by infill_of judged judges learnt leave_nothing left_as_found loud
louder made_finite made_loud material meant onward owed passes_of penalise_prompt penalised pointed ragged
reading_of rebalance remembered renormalise said settled shown_as silenced speaker speaks spoken spreads sums_of
take_up takes_up tally tell tell_all telling tells told toy twin twins unheard unless_refused unspoken utter weigh
with_places written_out
"""
DIALECT = frozenset(_WORDS.split())
"""Names that this project once used for what the field calls otherwise; CONTRIBUTING has the words in their place."""


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_speaks_the_fields_language(module: str) -> None:
    names = [(part, 1) for part in module.split(".")] + list(identifiers(MODULES[module]))
    assert [f"{name} (line {line})" for name, line in names if name.strip("_") in DIALECT] == []


def test_no_circle_of_files() -> None:
    """Imports inside functions and those for types alone count too."""
    assert circles({name: imports(MODULES, name) for name in MODULES}) == []


def test_no_class_name_stands_in_two_files() -> None:
    where: dict[str, list[str]] = defaultdict(list)
    for module, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(module)
    assert {name: modules for name, modules in where.items() if len(modules) > 1} == {}


@pytest.mark.parametrize("room", ROOMS)
def test_a_rooms_names_are_whole_and_there(room: str) -> None:
    module = importlib.import_module(room)
    public = {
        alias.asname or alias.name
        for node in MODULES[room].body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pellucid")
        for alias in node.names
    }
    public |= {
        node.name for node in MODULES[room].body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }  # fmt: skip
    used = {node.id for node in ast.walk(MODULES[room]) if isinstance(node, ast.Name)}  # imported for its own work
    public = {name for name in public if not name.startswith("_")} - used
    names = list(getattr(module, "__all__", []))
    assert len(set(names)) == len(names)
    assert [name for name in names if getattr(module, name, None) is None] == []
    assert public - set(names) == set()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_configs_name_ends_in_config(module: str) -> None:
    """What a checkpoint stores is a record, no config."""
    loaded = importlib.import_module(module)
    odd = [
        name
        for name, value in vars(loaded).items()
        if inspect.isclass(value) and issubclass(value, BaseModel) and value.__module__ == module
        and not name.endswith("Config") and not module.startswith("pellucid.checkpoints.")
    ]  # fmt: skip
    assert odd == []


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (SRC / "pellucid").rglob("*.py")}
    assert {str(path): length for path, length in lengths.items() if length > 375} == {}
    assert median(lengths.values()) < 200


# ------------------------------------------------------------------------------------- that these can fail


def test_a_circle_is_found() -> None:
    modules = {
        "a": ast.parse("import b"),
        "b": ast.parse("def late():\n    import c"),
        "c": ast.parse("if TYPE_CHECKING:\n    from a import x"),
        "d": ast.parse("import a"),
    }
    assert circles({name: imports(modules, name) for name in modules}) == [["a", "b", "c"]]


def test_identifiers_are_found() -> None:
    tree = ast.parse("class Toy:\n    def tell(self, said):\n        self.told = kept = said\n")
    assert {name for name, _ in identifiers(tree)} == {"Toy", "tell", "self", "said", "told", "kept"}
