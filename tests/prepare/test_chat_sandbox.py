"""Templates of strangers: errors in them are named, none gets out of the sandbox, and every one comes to an end."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from batchwright.base.errors import SpecError
from batchwright.prepare.chat.messages import ChatError
from batchwright.prepare.chat.render import ChatTemplate, find_template
from batchwright.prepare.chat.sandbox import MAX_SECONDS
from batchwright.prepare.tokenizers import BytesTokenizer
from refusals import refused

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
FAR_TOO_LONG_S = 20.0
"""An endless template never gets here; the ones below end within about a second on a quiet machine."""


def render(source: str, conversation: dict[str, Any] = HELLO, **args: Any) -> str:
    return ChatTemplate("mine", source, {}, args).render(conversation)


class TestWhatTransformersGivesToTemplates:
    @pytest.mark.parametrize(
        ("source", "text"),
        [
            ("{% if true %}\n  a\n{% endif %}\n", "  a\n"),
            ("  {% if true %}a{% endif %}", "a"),
            ("{{ '<&\"é' | tojson }}", '"<&\\"é"'),
            ("{{ {'b': 1, 'a': [2]} | tojson }}", '{"b": 1, "a": [2]}'),
            ("{{ {'b': 1} | tojson(indent=2) }}", '{\n  "b": 1\n}'),
            (
                "{% for i in [0, 1, 2] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
                "02",
            ),
            ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
            ("{% generation %}a{% endgeneration %}b", "ab"),
            ("{% set ns = namespace(n=1) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "4"),
            ("{{ 'a' ~ 1 ~ none ~ undefined }}", "a1None"),
            ("{{ unknown }}{{ messages[0].unknown }}", ""),
            ("{{ '%s-%d' % ('a', 3) }}{{ '{}'.format(2) }}{{ '-' * 3 }}{{ 2 ** 3 }}", "a-32---8"),
            (
                "{% for m in messages %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{% endfor %}",
                "1TrueTrue1",
            ),
            ("{% macro f(x) %}<{{ x }}{{ caller() }}>{% endmacro %}{% call f(2) %}b{% endcall %}", "<2b>"),
            ("{{ [1, 2, 3][::-1] | join(',') }}{{ messages | map(attribute='role') | list }}", "3,2,1['user']"),
            ("{{ messages[0] == messages[-1] }}{{ messages[0] in messages }}{{ [1] < [2] }}", "TrueTrueTrue"),
            ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{{ dict(a=1) }}", "a1{'a': 1}"),
            ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueFalse"),
        ],
    )
    def test_is_there(self, source, text):
        assert render(source) == text


class TestTheTemplateIsWrong:
    @pytest.mark.parametrize(
        ("source", "says", "line"),
        [
            ("{% for m in messages %}", "Unexpected end of template", "1: "),
            ("a\n{{ b c }}", "expected token 'end of print statement'", "2: {{ b c }}"),
            ("a\n\n{% nothing %}", "unknown tag 'nothing'", "3: {% nothing %}"),
            ("{{ a | nothing }}", "No filter named 'nothing'", "1: "),
            ("{{ [1] | random }}", "No filter named 'random'", "1: "),
        ],
    )
    def test_a_syntax_error_names_template_and_line(self, source, says, line):
        with refused(SpecError, says, template="mine", remedy="chat_template=") as caught:
            render(source)
        assert caught.value.where["line"].startswith(line)

    def test_today_is_refused_with_a_remedy(self):
        with refused(SpecError, template="mine", remedy="args={'strftime_now':"):
            render("{{ strftime_now('%d %b %Y') }}")

    def test_a_fixed_day_is_given_in_its_place(self):
        assert render("{{ strftime_now('%d %b %Y') }}", strftime_now="2024-07-26") == "26 Jul 2024"

    def test_a_template_with_a_day_of_its_own_uses_it(self):
        source = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}2024{% endif %}"
        assert render(source) == "2024"

    def test_what_is_no_day_is_refused(self):
        with refused(SpecError, "strftime_now='soon'", parameter="strftime_now"):
            render("{{ strftime_now('%Y') }}", strftime_now="soon")


class TestTheConversationIsWrong:
    def test_what_a_template_says_is_an_error_of_the_conversation(self):
        with refused(ChatError, "'mine'", "only users", kind="refused by the template") as caught:
            render("{{ raise_exception('only users') }}")
        assert caught.value.remedy

    @pytest.mark.parametrize(
        ("source", "says"),
        [
            ("{{ messages[0].unknown.more }}", "has no attribute 'unknown'"),
            ("{{ messages[5].content }}", "has no element 5"),
            ("{{ 'a' + 1 }}", "can only concatenate str"),
            ("{{ 1 / 0 }}", "division by zero"),
            ("{{ unknown() }}", "'unknown' is undefined"),
            ("{{ messages | nothing.more }}", "No filter"),
            ("{% include 'other' %}", "no loader"),
        ],
    )
    def test_what_a_template_misses_is_an_error_of_the_conversation(self, source, says):
        expected = SpecError if "nothing" in source else ChatError
        with refused(expected, says):
            render(source)


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].pop('role') }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% macro f() %}{% endmacro %}{{ f.__call__ }}",
    "{% for m in messages %}{{ loop.__class__ }}{% endfor %}",
    "{{ ((1, 2) | map('string')).gi_frame }}",
    "{{ messages | map(attribute='__class__') | list }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_way_out_of_the_sandbox_is_refused_and_named(source):
    conversation = json.loads(json.dumps(HELLO))
    with refused(SpecError, "sandbox", template="mine"):
        render(source, conversation)
    assert conversation == HELLO


GROW = "{{% set ns = namespace(x='aa') %}}{{% for i in range(90) %}}{{% set ns.x = {} %}}{{% endfor %}}"
NEST = "{% set ns = namespace(x=[1]) %}{% for i in range(90) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in 'a' * 99999 %}x{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "{% set r = range(99999) %}{% for i in r %}{{ r | sum }}{% endfor %}",
    "{% set r = range(99999) %}{% for i in r %}{{ r | map('abs') | list | length }}{% endfor %}",
    "{% set b = 'x' * 9999999 %}{% for i in range(99999) %}{% if 'y' in b %}{% endif %}{% endfor %}",
]
BOMBS = [
    "{{ 'a' * 10 ** 10 }}",
    "{{ 10 ** 10 * 'a' }}",
    "{{ 'a' * 999999 * 999999 }}",
    "{{ [1] * 10 ** 10 }}",
    "{{ 2 ** 999999999 }}",
    "{{ (9 ** 999) ** 999 }}",
    "{{ range(10 ** 9) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=999999999) }}",
    "{{ ('{0}' * 99999).format('a' * 999999) }}",
    "{{ ('%s' * 9999) % (('a' * 999999,) * 9999) }}",
    "{{ 'a'.ljust(999999999) }}",
    "{{ 'a'.zfill(999999999) }}",
    "{{ ('\t' * 999999).expandtabs(999999) }}",
    "{{ 'a' | center(999999999) }}",
    "{{ 'a' | indent(999999999, true) }}",
    "{{ ('a\n' * 99999) | indent(99999) }}",
    "{{ 'a'.join(['b' * 999999] * 9999) }}",
    "{{ (['b' * 999999] * 9999) | join }}",
    "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "{{ [[1] * 9999] | tojson(indent=99999) }}",
    "{{ (1).to_bytes(999999999) }}",
    "{{ (['b' * 999999] * 9999) }}",
    "{{ (['b' * 999999] * 9999) | string }}",
    "{{ (['b' * 999999] * 9999) | tojson }}",
    "{{ 'x' ~ (['b' * 999999] * 9999) }}",
    "{% for i in range(99999) %}{{ 'b' * 999999 }}{% endfor %}",
    "{% set b = 'b' * 999999 %}{% set x %}{% for i in range(99999) %}{{ b ~ i }}{% endfor %}{% endset %}",
    GROW.format("ns.x + ns.x"),
    GROW.format("ns.x ~ ns.x"),
    GROW.format("ns.x | replace('a', 'aa')"),
    GROW.format("ns.x.replace('a', 'aa')"),
    GROW.format("'%s%s' % (ns.x, ns.x)"),
    GROW.format("'{0}{0}'.format(ns.x)"),
    GROW.format("[ns.x, ns.x] | join"),
    GROW.format("ns.x | tojson | tojson"),
    "{% set ns = namespace(x='aa') %}{% for i in range(90) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "{% set ns = namespace(x=3) %}{% for i in range(90) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    NEST + "{{ ns.x }}",
    NEST + "{{ ns.x | string }}",
    NEST + "{{ ns.x | tojson }}",
    NEST + "{{ ns.x ~ '' }}",
    NEST + "{{ '%s' % ns.x }}",
    NEST + "{{ '{}'.format(ns.x) }}",
    NEST + "{{ ns }}",
    NEST + "{% set a = ns.x %}" + NEST + "{{ a == ns.x }}",
    NEST + "{% set a = ns.x %}" + NEST + "{{ a in [ns.x] }}",
    NEST + "{% set a = ns.x %}" + NEST + "{{ [a].index(ns.x) }}",
    NEST + "{% set a = ns.x %}" + NEST + "{{ [a, ns.x] | unique | list }}",
    NEST.replace("[ns.x, ns.x]", "(ns.x, ns.x)") + "{{ {ns.x: 1} }}",
]


@pytest.mark.parametrize("source", ENDLESS + BOMBS)
def test_a_template_without_end_is_an_error(source):
    began = time.thread_time()
    with refused(SpecError, template="mine", remedy="loops"):
        render(source)
    assert time.thread_time() - began < FAR_TOO_LONG_S


def test_an_error_leaves_the_template_usable():
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    source = f"{{% if messages[0].content == 'loop' %}}{loop}{{% endif %}}ok"
    with refused(SpecError, template="mine", remedy="loops"):
        render(source, {"messages": [{"role": "user", "content": "loop"}]})
    assert render(source) == "ok"


def test_a_long_conversation_is_no_endless_loop():
    messages = [{"role": "user", "content": "x" * 1_000}] * 5_000
    source = (
        "{% for m in messages %}"
        + "{% if m.role == 'none' %}{{ m.content }}{% endif %}" * 20
        + "{{ m.content }}{% endfor %}"
    )
    assert len(render(source, {"messages": messages})) == 5_000_000


def test_a_long_message_is_no_bomb():
    assert (
        len(
            render(
                "{{ '' + messages[0].content + 'b' }}", {"messages": [{"role": "user", "content": "x" * 30_000_000}]}
            )
        )
        > 3e7
    )


def test_an_ordinary_template_is_far_from_the_limit():
    template = find_template("qwen", BytesTokenizer())
    conversation = {"messages": HELLO["messages"] * 100}
    began = time.thread_time()
    template.render(conversation)
    assert time.thread_time() - began < MAX_SECONDS / 5
