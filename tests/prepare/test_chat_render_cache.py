"""Conversations with the same roles are rendered from one another: text and spans are those of a full render."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.prepare.chat.messages import ChatError
from batchwright.prepare.chat.render import BUILT_IN, ChatTemplate, find_template
from batchwright.prepare.chat.render_cache import RenderCache
from batchwright.prepare.chat.spans import TEMPLATE, TEXT, Rendered
from batchwright.prepare.tokenizers import BytesTokenizer

PRINTING = [
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% set c = '<' ~ m['role'] ~ '>' + m['content'] | trim %}{{ c }}{% endfor %}",
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}"
    "{% else %}{{ ns.s + m.content }}{% endif %}{% endfor %}",
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.content is string and m.content and 'x' not in m %}{{ m.content }}{% endif %}"
    "{% if loop.nextitem is defined and messages[loop.index0 - 1].role != 'tool' %}.{% endif %}{% endfor %}",
    "{% for m in messages if m.role != 'tool' %}{{ m.content if m.role == 'user' else m.content + '.' }}{% endfor %}"
    "{{ messages | length }}{{ (messages | last).role }}",
    "{% macro f(c) %}<{{ c }}>{% endmacro %}{% for m in messages %}{{ f(m.content.strip()) }}{% endfor %}",
    "{% for m in messages %}{% set c %}{{ m.content }}{% endset %}[{{ c }}]{% endfor %}",
    "{% for m in messages %}{{ m.get('content') }}{% for k, v in m.items() %}{{ k }}{% endfor %}{% endfor %}",
]
LOOKING = [
    "{% for m in messages %}{% if m.content == 'a' %}b{% endif %}{% endfor %}",
    "{% for m in messages %}{% if 'a' in m.content %}b{% endif %}{% endfor %}",
    "{% for m in messages %}{{ m.content.split('a')[-1] }}{% endfor %}",
    "{% for m in messages %}{{ m.content[0] }}{% endfor %}",
    "{% for m in messages %}{{ m.content | length }}{% endfor %}",
    "{% for m in messages %}{% if m.content in 'a b c' %}b{% endif %}{% endfor %}",
    "{% for m in messages %}{% if m.content is in 'a b c' %}b{% endif %}{% endfor %}",
    "{% for m in messages %}{{ 'a b c'.count(m.content) }}{% endfor %}",
    "{% for m in messages %}{{ {m.content: 1}['hello'] }}{% endfor %}",
    "{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{{ ('<' ~ m.content)[0:2] }}{% endfor %}",
    "{% for m in messages %}{{ ('<' + m.content) | upper }}{% endfor %}",
    "{% for m in messages %}{{ 'a' | replace('a', m.content) | upper }}{% endfor %}",
    "{% for m in messages %}{{ (m.content | string).startswith('a') }}{% endfor %}",
    "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
    "{% for m in messages %}{{ m.content | trim('a') }}{% endfor %}",
    "{% for m in messages %}{{ '%s' % m.content }}{% endfor %}",
    "{% for m in messages %}{{ '{}'.format(m.content) }}{% endfor %}",
    "{% for m in messages %}{{ m }}{% endfor %}",
    "{% for m in messages %}{{ m | tojson }}{% endfor %}",
    "{% for m in messages %}{{ m.get('content') | upper }}{% endfor %}",
    "{% for m in messages %}{{ m['get']('content') | upper }}{% endfor %}",
    "{% for m in messages %}{% for k in m %}{{ m[k] | upper }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for k, v in m.items() %}{{ v | upper }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% set c = m.content %}{% if c == 'a' %}b{% endif %}{% endfor %}",
    "{% set ns = namespace(c='') %}{% for m in messages %}{% if ns.c == 'a' %}b{% endif %}{% set ns.c = m.content %}"
    "{% endfor %}",
    "{% for m in messages %}{{ [m.content] | join('a') | upper }}{% endfor %}",
    "{{ messages | map(attribute='content') | join }}",
    "{{ messages | selectattr('content', 'equalto', 'a') | list | length }}",
    "{% for m in messages %}{{ loop.changed(m.content) }}{% endfor %}",
    "{% for m in messages %}{% if loop.previtem and loop.previtem.content == 'a' %}b{% endif %}{% endfor %}",
    "{% macro f(m) %}{{ m.content | upper }}{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}",
    "{% for m in messages %}{% set c %}{{ m.content }}{% endset %}{{ c | upper }}{% endfor %}",
    "{% for m in messages %}{% filter upper %}{{ m.content }}{% endfilter %}{% endfor %}",
    "{{ messages[0] == messages[1] }}",
    "{% for m in messages %}{{ 'a' if m.content > 'b' }}{% endfor %}",
    "{% with m = messages[0] %}{{ m.content | upper }}{% endwith %}",
    "{% for m in messages %}{{ (m.content or 'a') | upper }}{% endfor %}",
    # Under another name, or by another way to the same thing
    "{% for m in messages %}{% set l = loop %}{% if l.nextitem.content == 'a' %}b{% endif %}{% endfor %}",
    "{% for m in messages %}{% if loop['nextitem'].content == 'a' %}b{% endif %}{% endfor %}",
    "{% set n = namespace() %}{% set o = n %}{% set n.c = messages[0].content %}{{ o.c == 'a' }}",
    "{% set n = namespace() %}{% set o = n %}{% set o.c = messages[0].content %}{{ n.c == 'a' }}",
    "{% set n = namespace() %}{% for m in messages %}{% set n.c = m.content %}{{ n['c'] == 'a' }}{% endfor %}",
    "{% set n = namespace() %}{% for m in messages %}{% set n.c = m.content %}{{ (n | attr('c')) == 'a' }}{% endfor %}",
    "{% set raise_exception = namespace %}{{ raise_exception(c=messages[0].content).c == 'a' }}",
]


def prints_only(source: str) -> bool:
    template = ChatTemplate("mine", source)
    return template._prints_only(say(("user", "hello"), ("assistant", "b")))


@pytest.mark.parametrize("source", PRINTING)
def test_a_template_that_only_prints_contents_is_known(source):
    assert prints_only(source)


@pytest.mark.parametrize("source", LOOKING)
def test_a_template_that_looks_into_contents_is_found_out(source):
    assert not prints_only(source)


def say(*messages: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content, **more} for role, content in messages], "tools": []}


def result_of(render: Callable[[Any], Rendered], conversation: dict[str, Any]) -> str:
    """Text and spans, or the error, in words: where NaN is equal to NaN."""
    try:
        return repr(render(conversation))
    except ChatError as error:
        return str(error)


CONTENTS = st.text(min_size=1, max_size=8) | st.sampled_from(
    ["assistant", "<|im_end|>", " a ", "\n", "</think>", "<think>x</think>\n\ny", "[INST]", "user", "{{ messages }}"]
)
EXCHANGES = st.lists(st.tuples(CONTENTS, CONTENTS), min_size=1, max_size=2)


@pytest.mark.parametrize("name", BUILT_IN)
@given(many=st.lists(st.tuples(st.booleans(), EXCHANGES), min_size=2, max_size=5))
def test_every_built_in_template_gives_what_a_full_render_gives(name, many):
    template = find_template(name, BytesTokenizer())
    for has_system, exchanges in many:
        messages = [("system", "be kind")] * (has_system and name != "gemma")
        for asked, answer in exchanges:
            messages += [("user", asked), ("assistant", answer)]
        conversation = say(*messages)
        assert result_of(template.rendered, conversation) == result_of(template._rendered_in_full, conversation)


def counted(source: str) -> tuple[ChatTemplate, list[str]]:
    """A template, and which ways of rendering were taken, as they are."""
    template, taken = ChatTemplate("inline", source, {}), []

    def in_full(conversation: Any) -> Rendered:
        taken.append("in full")
        return template._rendered_in_full(conversation)

    def text(conversation: Any) -> str:
        taken.append("text")
        return template.render(conversation)

    template.__dict__["_cache"] = RenderCache(in_full, text, template._prints_only)
    return template, taken


def test_a_template_that_only_prints_is_rendered_once():
    template, taken = counted("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    for number in range(130):
        rendered = template.rendered(say(("user", f"a{number}"), ("assistant", "b" * (number + 1))))
        assert rendered.text == f"<user>a{number}<assistant>{'b' * (number + 1)}"
        assert rendered.said == ((6, 6 + len(f"a{number}")), (len(rendered.text) - number - 1, len(rendered.text)))
    assert taken == ["in full"]


def test_a_template_that_looks_is_rendered_each_time_and_in_full_where_it_does_otherwise():
    template, taken = counted(
        "{% for m in messages %}<{{ m.role }}>{% if 'x' in m.content %}{{ '!' }}{% endif %}{{ m.content }}{% endfor %}"
    )
    for content, text in (("a", "<user>a"), ("bb", "<user>bb"), ("x", "<user>!x"), ("c", "<user>c")):
        assert template.rendered(say(("user", content))).text == text
    assert taken == ["in full", "text", "text", "in full", "text"]


@pytest.mark.parametrize("content", [" a", "a\n", " ", "", "\ufdd0"])
def test_contents_that_a_template_may_treat_otherwise_are_rendered_in_full(content):
    template, taken = counted("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}")
    for _ in range(2):
        try:
            template.rendered(say(("user", content), ("assistant", "b")))
        except ChatError:
            assert content == "\ufdd0"
    assert taken == ["in full", "in full"]


def test_other_fields_are_rendered_in_full():
    template, taken = counted("{% for m in messages %}<{{ m.role }} {{ m.name }}>{{ m.content }}{% endfor %}")
    assert template.rendered(say(("user", "a"), name="n")).text == "<user n>a"
    assert template.rendered(say(("user", "a"), name="o")).text == "<user o>a"
    assert template.rendered({**say(("user", "a")), "tools": [{"name": "f"}]}).text == "<user >a"
    assert taken == ["in full", "in full", "in full"]


def test_weights_belong_to_their_own_conversation():
    template, _ = counted("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    for weight in (0.5, 1.0, 0.5):
        rendered = template.rendered(say(("user", "a"), ("assistant", "b"), weight=weight))
        assert {span.weight for span in rendered.spans if span.turn == 1} == {weight}
    rendered = template.rendered(say(("user", "a"), ("assistant", "b")))
    assert all(math.isnan(span.weight) for span in rendered.spans)


def test_generation_marks_are_read_each_time():
    source = "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    template = ChatTemplate("inline", source, {})
    for content in ("a", "bb"):
        spans = template.rendered(say(("assistant", content))).spans
        assert [(span.stop, span.part) for span in spans] == [(11, TEMPLATE), (11 + len(content), TEXT)]
    assert "_cache" not in template.__dict__
