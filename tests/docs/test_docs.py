"""What the documentation says is so: code runs and prints what it shows, commands parse, links lead somewhere."""

import importlib.util
import re
import shlex
import traceback
from pathlib import Path
from types import ModuleType

import pytest

from helpers.tiny import tiny_model
from pellucid.data import Batch
from pellucid.nn.backends import sdpa

ROOT = Path(__file__).resolve().parents[2]


def _loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = _loaded()
PAGES = build.pages()
EVERY_PAGE = [*PAGES, build.CLI, build.API, ROOT / "CHANGELOG.md"]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

_LINK = re.compile(r"\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")
_FILE = re.compile(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+)(?:::(\w+))?`")


def page_of(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


@pytest.mark.usefixtures("our_checks_only")
@each_page
def test_the_code_of_a_page_runs_and_prints_what_it_shows(page: Path) -> None:
    build.run_page(page)


def test_the_pages_are_those_that_a_reader_finds() -> None:
    names = {page.name for page in PAGES}
    assert names >= {"README.md", "README.zh.md", "text-to-logits.md", "visibility.md", "design.md", "lessons.md"}
    assert sum(block.language == "python" for page in PAGES for block in build.blocks(page)) > 30


@each_page
def test_the_commands_of_a_page_parse(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in build.command_lines(page):
        if words[0] == "pellucid":
            build.parse_command(words)
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, words


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_the_readme_names_the_test_command(name: str) -> None:
    """CI runs the very command that the README gives."""
    assert ["make", "test"] in list(build.command_lines(ROOT / name))
    assert "make test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_the_path_to_the_kernel_is_the_one_in_the_readme(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From ``model(batch)`` down to torch's kernel: these five functions of ours and no other."""
    steps = re.findall(r"^\| \d \| [^|`]*`([\w.]+)`[^|]*\| `([\w./]+)` \|$", (ROOT / name).read_text(), re.MULTILINE)
    expected = [(function.rpartition(".")[2], ROOT / file) for function, file in steps]
    seen: list[list[tuple[str, Path]]] = []
    kernel = sdpa.scaled_dot_product_attention

    def watched(*arguments: object, **options: object) -> object:
        stack = [(frame.name, Path(frame.filename)) for frame in traceback.extract_stack()]
        seen.append([frame for frame in stack if (ROOT / "src") in frame[1].parents])
        return kernel(*arguments, **options)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", watched)
    tiny_model()(Batch.from_rows([[1, 2, 3]]))
    assert len(expected) == 5
    assert seen[0] == expected


def test_the_page_of_the_command_line_is_fresh() -> None:
    assert build.CLI.read_text(encoding="utf-8") == build.cli_page(), "run: make docs"


def test_the_page_of_words_is_fresh_and_whole() -> None:
    page = build.WORDS.read_text(encoding="utf-8")
    assert page == build.words_page(), "run: make docs"
    for word in (
        "qk_rope_head_dim",
        "num_experts_per_tok",
        "low_freq_factor",
        "source_vocab_size",
        "label_smoothing_factor",
    ):
        assert f"| `{word}` |" in page


def test_the_page_of_the_python_interface_is_fresh_and_whole() -> None:
    """Every exported name with its arguments described, its errors, and an example that is run."""
    page = build.API.read_text(encoding="utf-8")
    assert page == build.api_page(), "run: make docs"
    assert build._beside("api_page").gaps() == []
    assert re.search(r"^Raises .*`CheckpointError`", page, re.MULTILINE)


def test_the_examples_in_the_help_parse() -> None:
    examples = re.findall(r"^ +(pellucid [a-z].*)$", build.cli_page(), re.MULTILINE)
    verbs = re.findall(r"^## pellucid (\w+)$", build.cli_page(), re.MULTILINE)
    assert {example.split()[1] for example in examples} == set(verbs)
    for example in examples:
        build.parse_command(shlex.split(example))


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in (a or b for a, b in _LINK.findall(text)):
        if not re.match(r"https?://|#", target):
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name} links to {target}"
    for file, test in _FILE.findall(text):
        assert (ROOT / file).exists(), f"{page.name} names {file}"
        assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{page.name} names {test}"


# ------------------------------------------------------------------------------------- that these can fail


def test_a_page_that_prints_something_else_is_stale(tmp_path: Path) -> None:
    fine = page_of(tmp_path, "```python\nx = 2\nprint(x)\n```\n\n```text\n2\n```\n\n```python\nassert x == 2\n```\n")
    assert build.run_page(fine) == 2
    stale = page_of(tmp_path, "```python\nprint(2)\n```\n\n```text\n3\n```\n")
    with pytest.raises(build.StalePageError, match="prints\n2\n"):
        build.run_page(stale)


def test_a_warning_in_a_page_is_an_error_at_its_line(tmp_path: Path) -> None:
    page = page_of(tmp_path, "A page.\n\n```python\nimport warnings\nwarnings.warn('old')\n```\n")
    with pytest.raises(UserWarning, match="old") as caught:
        build.run_page(page)
    assert caught.traceback[-1].lineno + 1 == 5


@pytest.mark.parametrize("line", ["pellucid trian x.yaml", "pellucid draw causal --colour red", "pellucid train"])
def test_a_command_that_does_not_exist_is_refused(line: str, tmp_path: Path) -> None:
    page = page_of(tmp_path, f"```console\n$ {line}\nsome output\n```\n")
    (words,) = build.command_lines(page)
    with pytest.raises(Exception, match=r"verb 'trian'|--colour|Missing"):
        build.parse_command(words)


def test_a_stale_page_of_the_command_line_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "pages", list)
    monkeypatch.setattr(build, "CLI", tmp_path / "cli.md")
    assert build.main(["--check"]) == 1
    assert build.main([]) == 0
    assert build.main(["--check"]) == 0
