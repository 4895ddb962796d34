"""Chat templates: what they render, what they refuse, and BOS exactly once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import RequestError, TokenizerError
from jaxserve.tokenizer.chat import ChatTemplate, chat_template, encode_chat

HI = [{"role": "user", "content": "Hi <there> & you"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


# As long templates of real models are written: namespaces, macros, filters, loop variables, tools.
ELABORATE = """
{%- macro content_of(m) %}
{{ m.content | trim if m.content is string else m.content[0]['text'] }}
{% endmacro -%}
{%- set ns = namespace(last=-1, seen=[]) -%}
{{- bos_token ~ 'v' ~ 1 }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = 'none' %}
    {%- set rest = messages %}
{%- endif %}
[{{ system | upper }}]
{% for m in rest[::-1] %}
    {% if m.role == 'user' and ns.last < 0 %}
        {% set ns.last = loop.revindex0 %}
    {% endif %}
{% endfor %}
{% for m in rest if m.role != 'tool' %}
{{ loop.index }}/{{ loop.length }}{{ ' last' if loop.last }} {{ m.role.capitalize() }}: {{ content_of(m) }}
{%- if loop.nextitem is defined %} -> {{ loop.nextitem.role }}{% endif %}
{% endfor %}
{% for role, group in messages | groupby('role') %}{{ role }}={{ group | length }};{% endfor %}
{{ messages | map(attribute='role') | unique | join(', ') }} {{ ns.last }} {{ 3 * 2 ** 2 + 7 % 4 }}
{{ '%s has %d' % (system, messages | length) }} {{ 'x{}'.format(2) }} {{ [1, 2] + [3] }} {{ 'ab' * 2 }}
{% if tools %}{% for t in tools %}{{ t | tojson(indent=2) }}{% endfor %}{% else %}no tools{% endif %}
{% for i in range(10) %}
{% if i == 3 %}{% break %}{% elif i == 1 %}{% continue %}{% endif %}{{ i }}
{% endfor %}
{% filter trim %}  text  {% endfilter %}
{% set block %}A{{ eos_token }}B{% endset %}{{ block | replace('A', 'C') }}
{% call(x) twice() %}{{ x }}{% endcall %}
{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}
""".replace("{%- set ns", "{%- macro twice() %}{{ caller(1) }}{{ caller(2) }}{% endmacro %}{%- set ns", 1)


def plain_jinja(source: str) -> jinja2.Template:
    """The same without a sandbox or a meter."""
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    return environment.from_string(source, globals={"bos_token": "<s>", "eos_token": "</s>"})


roles = st.sampled_from(["user", "assistant", "tool"])
message = st.fixed_dictionaries({"role": roles, "content": st.text(max_size=8) | st.just([{"text": "part"}])})
system = st.fixed_dictionaries({"role": st.just("system"), "content": st.text(max_size=8)})
tools = st.none() | st.just([{"name": "f<x>", "parameters": {"a": ["é", 1, None]}}])


def test_a_metered_template_renders_what_plain_jinja_renders():
    ours, plain = template(ELABORATE), plain_jinja(ELABORATE)

    @given(st.lists(system, max_size=1), st.lists(message, min_size=1, max_size=5), tools, st.booleans())
    def check(first, rest, tools, generation):
        variables = {"tools": tools, "add_generation_prompt": generation}
        messages = first + rest
        assert ours.render(messages, **variables) == plain.render(messages=messages, **variables)

    check()


def test_what_hugging_face_templates_rely_on_is_there():
    assert template("{{ tools is none }} {{ documents is none }}").render(HI) == "True True"
    assert (
        template("{{ messages[0] | tojson }}").render(HI) == '{"role": "user", "content": "Hi <there> & you"}'
    )
    assert template("{{ messages[0].content }}").render(HI) == "Hi <there> & you"
    assert template("  {% if true %}\nx\n  {% endif %}\ny").render(HI) == "x\ny"
    assert template("{% generation %}{{ 'a' }}b{% endgeneration %}").render(HI) == "ab"
    assert len(template("{{ strftime_now('%Y-%m-%d') }}").render(HI)) == 10
    assert template("{{ thinking }}").render(HI, thinking="on") == "on"
    assert template("{{ bos_token }}{{ eos_token }}").render(HI) == "<s></s>"
    assert template("{{ undefined_thing }}|").render(HI) == "|"


def test_a_refusal_by_the_template_is_the_clients_mistake_in_the_templates_words():
    source = "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}ok"
    assert template(source).render(HI) == "ok"
    with pytest.raises(RequestError, match="one message only") as caught:
        template(source).render(HI * 2)
    assert caught.value.param == "messages"
    assert caught.value.status == 400


@pytest.mark.parametrize("content", [None, 7, {"a": 1}])
def test_messages_of_a_form_the_template_can_not_handle_are_the_clients_mistake(content):
    with pytest.raises(RequestError, match="can't render these messages") as caught:
        template("{{ 'user: ' + messages[0].content }}").render([{"role": "user", "content": content}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("line one\n{{ 1 + }}", "chat template, line 2"),
        ("{% nonsense %}", "unknown tag 'nonsense'"),
        ("{{ x | nonsense }}", "nonsense"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
    ],
)
def test_a_broken_template_is_an_error_when_it_is_loaded(source, why):
    with pytest.raises(TokenizerError, match=why):
        template(source)


@pytest.mark.parametrize("name", ["messages", "bos_token", "eos_token"])
def test_a_client_can_not_set_the_templates_own_variables(name):
    with pytest.raises(RequestError, match=name) as caught:
        template("{{ bos_token }}").render(HI, **{name: "x"})
    assert caught.value.param == "chat_template_kwargs"


def test_bos_comes_once_whether_the_template_or_the_model_puts_it(gemma3):
    assert gemma3.add_bos
    with_bos = encode_chat(gemma3, chat_template(gemma3, "{{ bos_token }}{{ messages[0].content }}"), HI)
    without = encode_chat(gemma3, chat_template(gemma3, "{{ messages[0].content }}"), HI)
    assert with_bos == without == gemma3.encode(HI[0]["content"], add_bos=True)
    assert with_bos.count(gemma3.bos_id) == 1


def test_bos_is_not_added_for_a_model_that_does_not_want_it(smollm2):
    ids = encode_chat(smollm2, chat_template(smollm2, "{{ messages[0].content }}"), HI)
    assert ids == smollm2.encode(HI[0]["content"])


def test_special_tokens_of_the_template_become_their_ids_and_variables_reach_it(smollm2):
    source = "<|im_start|>{{ word }}{% if add_generation_prompt %}<|im_end|>{% endif %}"
    made = chat_template(smollm2, source)
    ids = encode_chat(smollm2, made, HI, add_generation_prompt=False, word="a")
    assert ids == [1, *smollm2.encode("a")]
    assert encode_chat(smollm2, made, HI, word="a") == [*ids, 2]


def test_a_model_without_a_template_says_so_and_how_to_give_it_one(gemma3):
    with pytest.raises(RequestError, match=r"no chat template.*--chat-template") as caught:
        encode_chat(gemma3, None, HI)
    assert caught.value.param == "messages"


def test_threads_render_one_template_each_with_a_budget_of_its_own():
    made = template("{% for i in range(20000) %}{% endfor %}{{ messages[0].content }}")
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda n: made.render([{"content": str(n)}]), range(40)))
    assert texts == [str(n) for n in range(40)]
