"""Templates that would reach out of the sandbox, or not come back from it."""

from __future__ import annotations

import pytest

from jaxserve.errors import JaxserveError, TokenizerError
from jaxserve.tokenizer import sandbox
from jaxserve.tokenizer.chat import ChatTemplate

# Every way to say no, but not that memory ran out.
REFUSED = r"more than \d+ (steps|characters)|not supported|RecursionError|number of about \d+ bits"
HI = [{"role": "user", "content": "hi"}]
GROW = (
    "{%% set ns = namespace(a='0123456789') %%}{%% for i in range(60) %%}{%% set ns.a = %s %%}{%% endfor %%}"
)
MILLION = "{% set a = 'a' * 1000000 %}"


def render(source: str) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(HI)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'].loads }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].__class__() }}",
        "{{ open('/etc/passwd').read() }}",
        "{{ '{0.__class__.__mro__}'.format(1).x.y }}",
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}",
        "{% from '/etc/passwd' import x %}",
        "{% extends '/etc/passwd' %}",
    ],
)
def test_a_template_can_not_reach_attributes_files_or_change_its_input(source):
    messages = [dict(HI[0])]
    with pytest.raises(JaxserveError):
        ChatTemplate(source, bos_token="", eos_token="").render(messages)
    assert messages == HI


@pytest.mark.parametrize("source", ["{{ ''['__class__'] }}", "{{ ''|attr('__class__') }}"])
def test_a_hidden_attribute_is_undefined(source):
    assert render(source) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ range(10**9) | list }}",
        "{% for i in range(999) %}{% for j in range(999) %}{% for k in range(999) %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "{% for a in range(90000) | select %}{% for b in range(90000) | select %}{% endfor %}{% endfor %}",
        "{% set big = range(100000) | list %}{% for i in range(99999) %}{{ big | sum }}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ [1] * 10**10 }}",
        "{{ 9 ** (9 ** 9) }}",
        GROW % "ns.a + ns.a",
        GROW % "ns.a ~ ns.a",
        GROW % "[ns.a, ns.a] | join",
        GROW % "'%s%s' % (ns.a, ns.a)",
        GROW % "'%(a)s%(a)s' % {'a': ns.a}",
        GROW % "'{0}{0}'.format(ns.a)",
        GROW % "'%s%s' | format(ns.a, ns.a)",
        "{{ 'x' | center(10**10) }}",
        "{{ 'x'.ljust(10**10) }}",
        "{{ ['x'] | map('center', 10**10) | list }}",
        "{{ '%1000000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%1000000000000d' | format(1) }}",
        "{{ '{:1000000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**12) }}",
        MILLION + "{{ a.replace('a', a) }}",
        MILLION + "{{ a | replace('a', a) }}",
        MILLION + "{{ a.join(['a'] * 1000000) }}",
        MILLION + "{{ (['a'] * 1000000) | join(a) }}",
        "{{ {'a': 1} | tojson(indent=10**10) }}",
        "{{ [1, 2] | batch(10**9, 'x') | list }}",
        "{{ 'a\\nb' | indent(10**10) }}",
        MILLION + "{% for i in range(90000) %}{{ a }}{% endfor %}",
        MILLION + "{% set b %}{% for i in range(90000) %}{{ a }}{% endfor %}{% endset %}",
        "{% for i in range(99999) %}" + "y" * 100_000 + "{% endfor %}",
        "{% set b %}{% for i in range(99999) %}" + "y" * 100_000 + "{% endfor %}{% endset %}",
    ],
    ids=lambda source: source[:70],
)
def test_a_template_that_costs_too_much_is_refused_before_it_does(source):
    with pytest.raises(TokenizerError, match=REFUSED):
        render(source)


def test_lorem_ipsum_is_no_part_of_chat():
    with pytest.raises(JaxserveError, match="lipsum"):
        render("{{ lipsum(n=10**7) }}")


def test_long_conversations_stay_far_within_the_budget():
    turn = "{{ '<|im_start|>' + m.role + '\n' + m['content'] | trim + '<|im_end|>\n' }}"
    source = "{% for m in messages %}" + turn + "{% endfor %}"
    messages = [{"role": "user", "content": "x" * 2_000}] * 2_000
    template = sandbox.compile_template(source)
    budget = sandbox.Budget()
    text = template.render({"messages": messages, sandbox._BUDGET: budget})
    assert len(text) > 4_000_000
    assert budget.steps > sandbox.MAX_STEPS * 0.9
    assert budget.chars > sandbox.MAX_CHARS * 0.8
