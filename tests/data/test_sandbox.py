"""Hostile chat templates: each one clear error, in bounded time and memory, and nothing is run."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pellucid.data import ChatTemplate, sandbox
from pellucid.data.sandbox import Limits
from pellucid.errors import InputError

MESSAGES = [{"role": "user", "content": "hi"}]
QUICK = Limits(seconds=1.0, output=100_000)


def refused(template: str) -> str:
    """The one line that refuses."""
    with pytest.raises(InputError) as caught:
        ChatTemplate(template, limits=QUICK).render(MESSAGES)
    assert "\n" not in str(caught.value)
    return str(caught.value)


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"

COSTLY = {
    "nested loops": (NESTED.replace("BODY", ""), "takes longer than 1 s"),
    "a flood": (NESTED.replace("BODY", "x" * 50), "writes more than 100000 characters"),
    "a huge range": ("{{ range(10**9) | list }}", "Range too big"),
    "a repeated text": ("{{ 'x' * 10**9 }}", "repeats something"),
    "a repeated list": ("{{ 10**9 * [0] }}", "repeats something"),
    "a power": ("{{ 10 ** (10**9) }}", "too many digits"),
    "a padded text": ("{{ 'x' | center(10**10) }}", "more than 256 MiB of memory"),
    "a padded number": ("{{ '{:>9999999999}'.format(1) }}", "more than 256 MiB of memory"),
    "a percent format": ("{{ '%09999999999d' % 1 }}", "memory"),
    "doubling": (
        "{% set n = namespace(x='ab') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "more than 256 MiB of memory",
    ),
    "endless recursion": ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
    "deep nesting": ("{{ " + "(" * 4000 + "1" + ")" * 4000 + " }}", "recursion"),
    "many blocks": ("{% if 1 %}" * 4000 + "{% endif %}" * 4000, ""),
    "a large template": ("x" * (1 << 18) + "y", "at most 262144 are read"),
}  # fmt: skip

CURIOUS = {
    "a class": "{{ ''.__class__ }}",
    "a walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a walk by item": "{{ ''['__class__'] }}",
    "a walk by filter": "{{ '' | attr('__class__') }}",
    "a walk by map": "{{ messages | map(attribute='__class__') | list }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "a frame": "{{ raise_exception.__globals__ }}",
    "the template": "{{ self._TemplateReference__context }}",
    "format": "{{ '{0.__class__}'.format('') }}",
    "a changed list": "{{ messages.append({}) }}",
    "a changed mapping": "{{ messages[0].update({'role': 'x'}) }}",
    "an include": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}",
    "a file": "{{ open('/etc/passwd').read() }}",
    "what is not there": "{{ messages[0].contents }}",
    "a wrong word": "{% fi %}",
}


@pytest.mark.parametrize(("template", "words"), COSTLY.values(), ids=COSTLY)
def test_a_template_that_costs_too_much_is_stopped(template: str, words: str) -> None:
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert words.lower() in refused(template).lower()
    assert time.monotonic() - started < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kilobytes
    assert ChatTemplate("fine").render(MESSAGES) == "fine"  # and the next one is not the worse for it


@pytest.mark.parametrize("template", CURIOUS.values(), ids=CURIOUS)
def test_a_template_that_looks_around_is_refused_and_runs_nothing(template: str, tmp_path: Path) -> None:
    words = refused(template.replace("CANARY", str(tmp_path / "canary")))
    assert "cannot be used" in words
    assert list(tmp_path.iterdir()) == []


OPAQUE = [
    "dict(a=1).items", "[dict(a=1).items]", "messages", "none", "range(3)", "cycler", "joiner()", "raise_exception",
    "'a' ~ dict(a=1).items", "dict(a=1).items | string", "dict(a=1).items | trim", "dict(a=1).items | upper",
    "[dict(a=1).items] | join", "'%s' % dict(a=1).items", "'%s' | format(dict(a=1).items)", "dict(a=1).items | e",
    "'{}'.format(dict(a=1).items)", "'{a}'.format_map({'a': joiner()})", "[cycler(1)] | string", "joiner() | safe",
    "'abc' | replace('b', dict(a=1).items)", "messages | map('upper') | string", "{'a': joiner()} | xmlattr",
    "dict(a=1).items | urlencode", "[joiner()] | pprint", "messages | map(attribute='items') | join",
    "raise_exception(joiner())",
]  # fmt: skip


@pytest.mark.parametrize("written", OPAQUE)
def test_only_text_numbers_and_booleans_are_written(written: str) -> None:
    """The text of other objects says where they lie in memory: another one in each process."""
    words = refused(f"{{{{ {written} }}}}")
    assert "neither text nor a number" in words or "makes text of a" in words
    assert "0x" not in words


@pytest.mark.parametrize(("written", "text"), [
    ("1 ~ true ~ 1.5", "1True1.5"), ("['a', 1] | join('-')", "a-1"), ("'%s-%03d' % ('a', 3)", "a-003"), ("7 % 4", "3"),
    ("'{} {b}'.format(1, b='x')", "1 x"), ("messages | map(attribute='role') | join('+')", "user"),
    ("'a' if false", ""),
    ("messages | tojson", '[{"role": "user", "content": "hi"}]'), ("messages[0] | string | length", "33"),
    ("messages | selectattr('role', 'equalto', 'user') | list | length", "1"), ("'x'.join(['a', 'b'])", "axb"),
    ("missing | default('d')", "d"), ("' a '.strip() | upper", "A"), ("range(3) | join", "012"), ("3 | string", "3"),
    ("messages | map(attribute='content') | first", "hi"), ("['b', 'a'] | sort | reverse | join", "ba"),
])  # fmt: skip
def test_what_templates_do_all_day_is_written(written: str, text: str) -> None:
    assert ChatTemplate(f"{{{{ {written} }}}}").render(MESSAGES) == text


def test_the_process_of_templates_is_bare() -> None:
    """No files, no environment, bounded memory; and Ctrl-C is not for it."""
    ChatTemplate("x").render(MESSAGES)
    process = sandbox._worker._process
    assert process is not None
    proc = Path("/proc") / str(process.pid)
    if not proc.exists():
        pytest.skip("another system")
    limits = {line[:26].strip(): line[26:47].strip() for line in (proc / "limits").read_text().splitlines()}
    assert limits["Max open files"] == limits["Max file size"] == limits["Max core file size"] == "0"
    assert limits["Max address space"] == str(sandbox.MEMORY)
    told = {line.partition("=")[0] for line in (proc / "environ").read_text().split("\0") if line}
    assert told <= set(sandbox._KEPT)
    assert os.getsid(process.pid) != os.getsid(0)


def test_a_process_that_died_is_replaced() -> None:
    ChatTemplate("x").render(MESSAGES)
    process = sandbox._worker._process
    assert process is not None
    process.kill()
    process.wait()
    assert ChatTemplate("y").render(MESSAGES) == "y"


def test_a_broken_off_question_gets_no_late_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(process: subprocess.Popen[bytes], request: object) -> None:
        assert process.stdin is not None
        data = json.dumps(request).encode()
        process.stdin.write(len(data).to_bytes(8, "big") + data)
        process.stdin.flush()
        raise KeyboardInterrupt

    ChatTemplate("x").render(MESSAGES)
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "_exchange", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ChatTemplate("first").render(MESSAGES)
    assert ChatTemplate("second").render(MESSAGES) == "second"


def test_an_own_process_after_a_fork_and_none_left_at_the_end() -> None:
    code = """
import os
from pellucid.data.chat import ChatTemplate
from pellucid.data import sandbox
messages = [{"role": "user", "content": "x"}]
assert ChatTemplate("parent").render(messages) == "parent"
first = sandbox._worker._process.pid
child = os.fork()
if not child:
    assert ChatTemplate("child").render(messages) == "child"
    os._exit(sandbox._worker._process.pid == first)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert ChatTemplate("parent").render(messages) == "parent"
assert sandbox._worker._process.pid == first
print(first)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert not Path("/proc", done.stdout.strip()).exists()
