"""A jinja2 environment for templates that came with a model file: trusted with text, with nothing else.

jinja2's immutable sandbox keeps a template from attributes, files and from changing what it is given. What
it leaves open is cost: nested loops, recursion, strings that grow by doubling. So a rendering has a budget
of steps (loop turns and calls) and of characters made, which every such operation draws on beforehand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import _PassArg

MAX_STEPS = 300_000  # about a second of rendering; a long conversation takes some thousands
CALL_STEPS = 5  # a macro call costs about as much as five turns of a loop
MAX_CHARS = 256_000_000  # made in all, not at once: every concatenation makes its result anew

# Names with a space, which no template can spell.
_BUDGET, _METERED, _TEXT = "the budget", "metered loop", "template text"

# Functions whose result can be far longer than any one argument.
_AMPLIFIERS = frozenset(
    ("batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "replace", "rjust",
     "slice", "tojson", "translate", "truncate", "wordwrap", "zfill")
)  # fmt: skip
_WIDE_FORMAT = re.compile(r"\d{5}|%[^a-zA-Z%]*\*|\{[^}]*\{")  # "%99999d", "%*d", "{:{}}"


class RaisedByTemplate(TemplateError):
    """The template called raise_exception: these messages are not what the model was trained on."""


@dataclass(slots=True)
class Budget:
    """What one rendering may still cost."""

    steps: int = MAX_STEPS
    chars: int = MAX_CHARS

    def take(self, *, steps: int = 0, chars: int = 0) -> None:
        self.steps -= steps
        self.chars -= chars
        if self.steps < 0:
            raise SecurityError(f"it takes more than {MAX_STEPS} steps")
        if self.chars < 0:
            raise SecurityError(f"it makes more than {MAX_CHARS} characters of text")


def compile_template(source: str) -> Template:
    """Raises jinja2's TemplateError; SecurityError for what no chat template needs."""
    return _Sandbox().from_string(source)


def variables_of(source: str) -> frozenset[str]:
    """The names that the template reads and that neither it nor the environment defines."""
    environment = _Sandbox()
    return frozenset(find_undeclared_variables(environment.parse(source))) - environment.globals.keys()


def render(template: Template, variables: dict[str, Any]) -> str:
    """Raises jinja2's errors, and whatever Python error an operation of the template raises."""
    return template.render({**variables, _BUDGET: Budget()})


class _MeteredCode(CodeGenerator):
    """Puts the meter into a template's tree before it becomes Python."""

    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        foreign = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
        for banned in node.find_all(foreign):
            name = type(banned).__name__.lower()
            raise SecurityError(f"line {banned.lineno}: {name}: a chat template can't use other files")
        for loop in node.find_all(nodes.For):
            if loop.recursive:
                raise SecurityError(f"line {loop.lineno}: recursive loops are not supported")
            loop.iter = self._through(_METERED, loop.iter)
        for output in node.find_all(nodes.Output):
            output.nodes = [
                self._through(_TEXT, nodes.Const(child.data, lineno=child.lineno))
                if isinstance(child, nodes.TemplateData)
                else child
                for child in output.nodes
            ]
        # Children before parents: a concatenation of concatenations is charged at each level.
        for parent in [node, *node.find_all(nodes.Node)]:
            for field, value in parent.iter_fields():
                if isinstance(value, nodes.Concat):
                    setattr(parent, field, self._through(_TEXT, value))
                elif isinstance(value, list):
                    value[:] = [self._through(_TEXT, v) if isinstance(v, nodes.Concat) else v for v in value]
        super().visit_Template(node, frame)

    def _through(self, name: str, value: Any) -> Any:
        """The expression `value | name`."""
        made = nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)
        return made.set_environment(self.environment)


class _GenerationBlock(Extension):
    """`{% generation %}`: marks the assistant's tokens for training; here its body is just rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """What Hugging Face's chat templates expect, with every costly operation metered."""

    code_generator_class = _MeteredCode
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_show,
            extensions=[LoopControlExtension, _GenerationBlock],
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: _metered_filter(name, f) for name, f in self.filters.items()}
        self.filters |= {_METERED: _metered_loop, _TEXT: _metered_text}
        del self.globals["lipsum"]
        self.globals |= {
            "range": _metered_range,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = context[_BUDGET]
        budget.take(steps=CALL_STEPS)
        method = getattr(obj, "__wrapped__", obj)  # jinja2 wraps str.format
        _check_growth(
            budget, getattr(method, "__name__", ""), getattr(method, "__self__", None), args, kwargs
        )
        result = super().call(context, obj, *args, **kwargs)
        budget.take(chars=_size(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = context[_BUDGET]
        if operator == "+":
            budget.take(chars=_size(left) + _size(right))
        elif operator == "%" and isinstance(left, str):
            values = (
                right.values() if isinstance(right, dict) else right if isinstance(right, tuple) else (right,)
            )
            _check_growth(budget, "format", left, values, {})
            budget.take(chars=len(left) + sum(map(_size, values)))
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    budget.take(chars=_size(value) * max(0, times))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        return super().call_binop(context, operator, left, right)


def _size(value: Any) -> int:
    """Length of what can be long; containers count by entries."""
    return len(value) if isinstance(value, str | list | tuple | dict) else 0


def _check_bits(bits: int) -> None:
    if bits > 4096:
        raise SecurityError(f"it makes a number of about {bits} bits; the limit is 4096")


def _check_growth(
    budget: Budget, name: str, receiver: Any, args: Iterable[Any], kwargs: Mapping[str, Any]
) -> None:
    """Refuse a call whose result could exceed the budget, by a bound from the sizes of its arguments."""
    if name not in _AMPLIFIERS or receiver is None:
        return
    values = [*args, *kwargs.values()]
    if name in ("format", "format_map") and isinstance(receiver, str) and _WIDE_FORMAT.search(receiver):
        raise SecurityError("a format with a computed width, or one of five digits, is not supported")
    if name in ("format", "format_map"):
        values = [value for value in values if not isinstance(value, int)]  # a value to show, not a width
    if name == "replace":
        values = values[1:]  # the text it looks for makes nothing longer
    largest = max((abs(v) if isinstance(v, int) else _size(v) for v in values), default=0)
    if max(1, _size(receiver)) * largest > budget.chars:
        raise SecurityError(f"{name} could make more than {MAX_CHARS} characters of text")


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter at the same cost model as a call; passes on what jinja2 would have passed it."""
    wants = _PassArg.from_obj(function)

    @pass_context
    def metered(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = context[_BUDGET]
        budget.take(steps=1, chars=_size(value))
        _check_growth(budget, name, value, args, kwargs)
        if wants is _PassArg.context:
            result = function(context, value, *args, **kwargs)
        elif wants is _PassArg.eval_context:
            result = function(context.eval_ctx, value, *args, **kwargs)
        elif wants is _PassArg.environment:
            result = function(context.environment, value, *args, **kwargs)
        else:
            result = function(value, *args, **kwargs)
        budget.take(chars=_size(result))
        return result

    return metered


@pass_context
def _metered_loop(context: Context, items: Any) -> Any:
    budget = context[_BUDGET]
    try:
        budget.take(steps=1 + len(items))
    except TypeError:  # lazy, such as a `select`
        return _metered_iterator(budget, items)
    return items


def _metered_iterator(budget: Budget, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        budget.take(steps=1)
        yield item


@pass_context
def _metered_text(context: Context, text: str) -> str:
    context[_BUDGET].take(chars=len(text))
    return text


@pass_context
def _show(context: Context, value: Any) -> str:
    text = str(value)
    context[_BUDGET].take(chars=len(text))
    return text


@pass_context
def _metered_range(context: Context, *args: int) -> range:
    numbers = range(*args)
    context[_BUDGET].take(steps=len(numbers))
    return numbers


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON. jinja2's own escapes HTML, which a model has never seen."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise RaisedByTemplate(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
