"""The process that renders chat templates for ``data.sandbox``: started on its own, it can do nothing else.

A template comes from outside. jinja2's immutable sandbox protects Python's internals, and this process
everything else: no files can be opened in it, memory and processor time have limits, and whoever waits for an
answer kills it when that takes too long. It knows nothing of Pellucid, and no code that a template names is run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NoReturn

_LONGEST_RESULT = 1 << 20
_MOST_BITS = 1 << 16
_CACHED = 16
_GO_THROUGH = {"batch", "first", "groupby", "join", "list", "map", "max", "min", "reject", "rejectattr", "select"}
_GO_THROUGH |= {"selectattr", "slice", "sort", "sum", "unique", "reverse", "default", "d"}

# Calls that look for text instead of writing it: a special token named in their arguments is plain text.
_SEARCHES = {"count", "find", "index", "rfind", "rindex", "startswith", "endswith", "removeprefix", "removesuffix"}
_SEARCHES |= {"partition", "rpartition", "split", "rsplit", "replace", "strip", "lstrip", "rstrip"}

Render = Callable[[Mapping[str, Any]], Any]


class RefusedError(Exception):
    """What is wrong with a template, in words for its reader."""


def serve(requests: BinaryIO, replies: BinaryIO, memory: int) -> None:
    """Answer requests until there are no more; a reply is ``{"text": …}`` or ``{"error": …}``.

    ``spent`` beside an error means that this process should be replaced.
    """
    environment = _environment()
    known: dict[str, Any] = {}
    _warm_up(environment)
    _confine(memory)
    _send(replies, {"ready": True})
    while (request := _receive(requests)) is not None:
        _limit_processor(request["seconds"])
        try:
            reply: dict[str, Any] = {"text": _answer(environment, known, request)}
        except MemoryError:
            reply = {"error": f"it needs more than {memory >> 20} MiB of memory", "spent": True}
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            reply = {"error": _words(error)}
        _send(replies, reply)


def _answer(environment: Any, known: dict[str, Any], request: Mapping[str, Any]) -> str:
    """The rendered text of one request."""
    names = [f"special_token_{number}_" for number in range(len(request["specials"]))]
    key = json.dumps([request["template"], request["specials"]])
    if key not in known:
        if len(known) >= _CACHED:
            known.clear()
        known[key] = _compile(environment, request["template"], dict(zip(request["specials"], names, strict=True)))
    variables = {**request["variables"], **dict(zip(names, request["marks"], strict=True))}
    pieces, size = [], 0
    for piece in known[key].generate(variables):
        size += len(piece)
        if size > request["output"]:
            raise RefusedError(f"it writes more than {request['output']} characters")
        pieces.append(piece)
    return "".join(pieces)


# ---- the template


def _environment() -> Any:
    """jinja2's immutable sandbox, in which what is missing or out of bounds is an error and not empty text."""
    from jinja2 import Undefined, runtime
    from jinja2.exceptions import SecurityError
    from jinja2.runtime import Macro
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Missing(Undefined):
        """Absent values can be read and tested, never written."""

        def __str__(self) -> str:
            self._fail_with_undefined_error()

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "%"})

        def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
            raise SecurityError(f"it asks for {attribute!r} of a {type(obj).__name__}, which is out of bounds")

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _refuse_huge(operator, left, right)
            if operator == "%":
                _refuse_opaque(right)
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(called, type | Macro):  # format, say
                _refuse_opaque(args, kwargs)
            return super().call(context, called, *args, **kwargs)

    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=Missing,
        finalize=_plain,
        extensions=["jinja2.ext.loopcontrols"],
    )
    for name in ("str_join", "markup_join"):  # the ~
        setattr(runtime, name, lambda parts: "".join(str(_plain(part)) for part in parts))
    environment.filters = {name: _guarded(name, each) for name, each in environment.filters.items()}
    del environment.globals["lipsum"], environment.filters["random"]  # ids must not depend on chance
    environment.globals["raise_exception"] = _raise
    environment.filters["tojson"] = _to_json
    return environment


def _plain(value: Any) -> Any:
    """``value``, which a template may write: other objects' texts may hold where they lie in memory."""
    from jinja2 import Undefined

    if not isinstance(value, str | int | float | Undefined):  # what is undefined refuses by itself
        raise RefusedError(f"it writes a {type(value).__name__}, which is neither text nor a number nor true or false")
    return value


def _refuse_opaque(*values: Any) -> None:
    """Whatever could put the text of a function or the like into another text."""
    from jinja2 import Undefined

    for value in values:
        if isinstance(value, Mapping):
            _refuse_opaque(*value, *value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            _refuse_opaque(*value)
        elif not isinstance(value, Undefined) and (
            callable(value) or type(value).__repr__ is object.__repr__  # type: ignore[comparison-overlap]
        ):
            raise RefusedError(f"it makes text of a {type(value).__name__}, which has none that stays the same")


def _guarded(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """``filter_``, which is given nothing opaque, and iterators only where it iterates over them."""
    skipped = int(hasattr(filter_, "jinja_pass_arg"))  # what jinja2 passes first

    @functools.wraps(filter_)
    def guarded(*given: Any, **named: Any) -> Any:
        inner, (value, *rest) = given[:skipped], given[skipped:]
        if isinstance(value, Iterator) and name not in _GO_THROUGH:
            raise RefusedError(f"it makes text of a {type(value).__name__}; make it a list first")
        value = list(value) if name == "join" and isinstance(value, Iterator) else value
        _refuse_opaque(value, *rest, *named.values())
        return filter_(*inner, value, *rest, **named)

    return guarded


def _raise(message: object) -> NoReturn:
    """What templates call when they do not like the messages."""
    raise RefusedError(f"it refuses these messages: {message}")


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse_huge(operator: str, left: Any, right: Any) -> None:
    """Repetition and powers are bounded by their result, before it is made."""
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        if abs(right) * left.bit_length() > _MOST_BITS:
            raise RefusedError("it computes a number with too many digits")
    elif operator == "*":
        for text, times in ((left, right), (right, left)):
            if isinstance(text, str | list | tuple) and isinstance(times, int) and len(text) * times > _LONGEST_RESULT:
                raise RefusedError(f"it repeats something to more than {_LONGEST_RESULT} characters")
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MOST_BITS:
            raise RefusedError("it computes a number with too many digits")


def _compile(environment: Any, text: str, specials: Mapping[str, str]) -> Any:
    """The template, in which every special token that its own text writes has become a variable.

    Only what a template literally writes can so become a special token: what arrives through messages or
    other values, or is put together from parts, stays text.
    """
    tree = environment.parse(text)
    if specials:
        longest_first = sorted(specials, key=len, reverse=True)
        _lift(tree, re.compile("(" + "|".join(map(re.escape, longest_first)) + ")"), specials)
        tree.set_environment(environment).set_lineno(1)  # of the nodes that are new
    code = environment.compile(tree)
    return environment.template_class.from_code(environment, code, environment.make_globals(None))


def _lift(node: Any, pattern: re.Pattern[str], names: Mapping[str, str]) -> None:
    """Replace special tokens in the literals below ``node`` by the variables that hold them."""
    from jinja2 import nodes

    def parts(text: str, kind: type[Any]) -> list[Any]:
        found = pattern.split(text)  # text, token, text, …
        return [nodes.Name(names[p], "load") if at % 2 else kind(p) for at, p in enumerate(found) if p]

    def lifted(child: Any) -> list[Any]:
        if isinstance(child, nodes.TemplateData) and pattern.search(child.data):
            return parts(child.data, nodes.TemplateData)
        if isinstance(child, nodes.Const) and isinstance(child.value, str) and pattern.search(child.value):
            return [nodes.Concat(parts(child.value, nodes.Const))]
        _lift(child, pattern, names)
        return [child]

    for field, value in _written(node):
        if isinstance(value, list):
            changed = [new for child in value for new in (lifted(child) if isinstance(child, nodes.Node) else [child])]
            setattr(node, field, changed)
        elif isinstance(value, nodes.Node):
            (new,) = lifted(value)
            setattr(node, field, new)


def _written(node: Any) -> list[tuple[str, Any]]:
    """The fields of a node whose literals may end up in the output, not those that are only compared."""
    from jinja2 import nodes

    searched = isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr in _SEARCHES
    replaced = isinstance(node, nodes.Filter) and node.name in ("replace", "trim")
    if isinstance(node, nodes.Compare | nodes.Test):
        return []
    if searched or replaced:
        return [("node", node.node)]
    return list(node.iter_fields())


# ---- the process


def _confine(memory: int) -> None:
    """Give up what a renderer has no need of, where the system lets it: memory, files, further processes."""
    try:
        import resource
    except ImportError:
        return
    limits = {"RLIMIT_AS": memory, "RLIMIT_CORE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_NPROC": 0, "RLIMIT_NOFILE": 0}
    for name, limit in limits.items():
        with contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (limit, limit))


def _limit_processor(seconds: float) -> None:
    """End this process by itself when nobody is left to end it."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds) + 1, hard))


def _warm_up(environment: Any) -> None:
    """Load every module that rendering or a mistake in a template will need, while files can be opened."""
    for module in ("jinja2.debug", "textwrap", "pprint", "html"):  # what jinja2 imports late
        importlib.import_module(module)
    good = "{% for m in x %}{{ loop.index ~ m|tojson|replace('a', 'b') }}{% endfor %}"
    request = {"template": good, "specials": ["<"], "marks": ["<"], "variables": {"x": ["a"]}, "output": 9}
    _answer(environment, {}, request)
    for bad in ("{% if %}", "{{ x.y }}", "{{ ''.__class__ }}", "{{ 1 / 0 }}"):
        with contextlib.suppress(Exception):
            environment.from_string(bad).render()
    _words(ValueError("é"))


def _words(error: Exception) -> str:
    """An error as one line of text."""
    line = getattr(error, "lineno", None)
    where = f"line {line}: " if isinstance(line, int) else ""
    message = " ".join(str(getattr(error, "message", None) or error).split()) or "no more is known"
    plain = "".join(c if c.isprintable() else "?" for c in message[:300])
    kind = (
        "" if isinstance(error, RefusedError) or type(error).__module__.startswith("jinja2") else type(error).__name__
    )
    return f"{where}{kind}{': ' if kind else ''}{plain}"


def _receive(stream: BinaryIO) -> dict[str, Any] | None:
    prefix = stream.read(8)
    if len(prefix) < 8:
        return None
    request: dict[str, Any] = json.loads(stream.read(int.from_bytes(prefix, "big")))
    return request


def _send(stream: BinaryIO, reply: Mapping[str, Any]) -> None:
    data = json.dumps(reply).encode()
    stream.write(len(data).to_bytes(8, "big") + data)
    stream.flush()


if __name__ == "__main__":
    sys.path += json.loads(sys.argv[2])
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    serve(inbox, outbox, int(sys.argv[1]))
