"""Spans from unmodified templates that trim, split, branch, drop or reorder; generation marks; which template it is."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from batchwright.base.errors import SpecError, TokenizerError
from batchwright.prepare.chat.locate import region_between
from batchwright.prepare.chat.messages import ChatError
from batchwright.prepare.chat.render import ChatTemplate, find_template
from batchwright.prepare.chat.spans import END, ROLES, TEMPLATE, TEXT
from batchwright.prepare.tokenizers import BytesTokenizer, load_tokenizer, resolve_tokenizer
from refusals import refused

PARTS = {TEMPLATE: "template", TEXT: "text", END: "end"}

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_TRIMMED = CHATML.replace("m.content", "m.content | trim")
CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
)
# As Qwen3 does it: reasoning is kept in the last answer only, and may come inside of the content.
THINKING = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content, reasoning = message.content, '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.last %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def said(*turns: tuple[Any, ...], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text, **dict(*rest)} for role, text, *rest in turns], **more}


def template_of(source: str, **args: Any) -> ChatTemplate:
    return find_template(source, BytesTokenizer(), args=args)


def answers(source: str, conversation: dict[str, Any]) -> list[tuple[str, str]]:
    """(text, part) of what the assistant has to learn."""
    rendered = template_of(source).rendered(conversation)
    return [
        (rendered.text[span.start : span.stop], PARTS[span.part])
        for span in rendered.spans
        if ROLES[span.role] == "assistant" and span.part != TEMPLATE
    ]


def said_in(source: str, conversation: dict[str, Any]) -> list[str]:
    rendered = template_of(source).rendered(conversation)
    return [rendered.text[start:stop] for start, stop in rendered.said]


QUESTION = ("user", "Why?")


class TestTemplatesThatPrintWhatIsThere:
    def test_an_answer_is_its_text_and_its_end(self):
        assert answers(CHATML, said(QUESTION, ("assistant", "So."))) == [("So.", "text"), ("<|im_end|>", "end")]

    @pytest.mark.parametrize("source", [CHATML, CHATML_TRIMMED])
    def test_two_renders_are_enough_and_three_where_blanks_are_stripped(self, source, monkeypatch):
        template = template_of(source)
        conversation = said(*[QUESTION, ("assistant", " <b> So. ")] * 5)
        template.rendered(conversation)
        renders, render = [], type(template._compiled).render
        counted = lambda self, *args, **kwargs: renders.append(1) or render(self, *args, **kwargs)
        monkeypatch.setattr(type(template._compiled), "render", counted)
        template.rendered(conversation)
        assert len(renders) == (3 if "trim" in source else 2)

    def test_equal_messages_are_told_apart(self):
        rendered = template_of(CHATML).rendered(said(("user", "a"), ("assistant", "a"), ("user", "a")))
        assert [rendered.text[:start].count("<|im_start|>") for start, _ in rendered.said] == [1, 2, 3]

    def test_a_message_keeps_the_order_of_its_fields(self):
        messages = [{"content": "Why?", "role": "user"}, {"role": "assistant", "content": "So."}]
        assert template_of("{{ messages | tojson }}").rendered({"messages": messages}).text == json.dumps(messages)

    def test_a_weight_goes_to_all_spans_of_its_message_and_not_into_the_text(self):
        source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.weight }}</s>{% endfor %}"
        rendered = template_of(source).rendered(said(QUESTION, ("assistant", "So.", {"weight": 0.25})))
        assert rendered.text == "<user>Why?</s><assistant>So.</s>"
        assert [span.weight for span in rendered.spans if span.turn == 1] == [0.25] * 3
        assert all(span.weight != span.weight for span in rendered.spans if span.turn == 0)

    def test_other_spellings_of_tool_are_the_tool_role(self):
        rendered = template_of(CHATML).rendered(said(("ipython", "1"), ("function", "2"), ("tool", "3")))
        assert {ROLES[span.role] for span in rendered.spans} == {"tool"}

    def test_an_unknown_role_is_an_error_of_its_message(self):
        with refused(ChatError, "'usr'", kind="unknown role", turn=1):
            template_of(CHATML).rendered(said(QUESTION, ("usr", "a")))

    def test_a_template_that_always_asks_for_an_answer_has_its_last_header_outside_of_messages(self):
        source = CHATML.replace("if add_generation_prompt", "if true")
        rendered = template_of(source).rendered(said(QUESTION, ("assistant", "So.")))
        last = rendered.spans[-1]
        assert (rendered.text[last.start :], last.turn, last.role) == ("<|im_start|>assistant\n", -1, 0)
        assert answers(source, said(QUESTION, ("assistant", "So.")))[0] == ("So.", "text")

    def test_two_kinds_of_end_are_both_found(self):
        source = (
            "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
            "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
        )
        conversation = said(QUESTION, ("assistant", "a"), QUESTION, ("assistant", "b"))
        assert answers(source, conversation) == [
            *[("a", "text"), ("<|end|>", "end")],
            *[("b", "text"), ("<|return|>", "end")],
        ]

    @pytest.mark.parametrize("header", ["<|{{ m.role }}|>", "{{ m.role }}: "])
    def test_an_end_that_only_the_last_turn_does_not_have_is_found(self, header):
        source = "{% for m in messages %}" + header + "{{ m.content }}{{ eos_token if not loop.last }}{% endfor %}"
        template = ChatTemplate("its name", source, {"eos_token": "</s>"})
        rendered = template.rendered(said(QUESTION, ("assistant", "a"), QUESTION, ("assistant", "b")))
        learnt = [s for s in rendered.spans if ROLES[s.role] == "assistant" and s.part != TEMPLATE]
        assert [rendered.text[span.start : span.stop] for span in learnt] == ["a", "</s>", "b"]

    @pytest.mark.parametrize("header", ["<|{{ m.role }}|>", "<|start|><|{{ m.role }}|>"])
    def test_a_header_is_no_end_where_no_turn_has_one(self, header):
        source = "{% for m in messages %}" + header + "{{ m.content }}{% endfor %}"
        assert template_of(source).end_of_turn is None

    def test_the_header_of_the_next_turn_is_no_end(self):
        source = (
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        )
        assert template_of(source).end_of_turn is None
        assert answers(source, said(QUESTION, ("assistant", "a"), QUESTION)) == [("a", "text")]

    def test_without_a_prompt_or_an_end_that_is_known_the_header_is_not_the_answer(self):
        source = "{% for m in messages %}{{ m.role }}: {{ m.content }} || {% endfor %}"
        assert answers(source, said(QUESTION, ("assistant", "So."))) == [("So.", "text")]

    @pytest.mark.parametrize("value", ["<x>", ["<x>"], {"a": "<x>"}, {"<x>": 1}])
    def test_what_other_fields_of_a_message_say_is_said_too(self, value):
        source = "{% for m in messages %}<{{ m.role }}{{ m.more }}>{{ m.content }}</s>{% endfor %}"
        assert "<x>" in said_in(source, said(("user", "Why?", {"more": value}), ("assistant", "So.")))

    def test_other_fields_that_a_template_compares_are_left_alone(self):
        source = (
            "{% for m in messages %}<{{ m.role }}>{{ '!' if m.mood == 'in a hurry' }}{{ m.content }}</s>{% endfor %}"
        )
        rendered = template_of(source).rendered(said(("user", "Why?", {"mood": "in a hurry"}), ("assistant", "So.")))
        assert rendered.text == "<user>!Why?</s><assistant>So.</s>"

    @pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
    def test_reasoning_is_part_of_an_answer_under_each_of_its_names(self, name):
        source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m." + name + " }}</s>{% endfor %}"
        assert answers(source, said(QUESTION, ("assistant", "So.", {name: " Hm."})))[0] == ("So. Hm.", "text")


class TestTemplatesThatTrim:
    @pytest.mark.parametrize("text", ["  So.  ", "\n\nSo.", "So.\n", "\u00a0So.\t"])
    def test_what_is_left_of_a_message_is_its_span(self, text):
        source = CHATML_TRIMMED
        assert answers(source, said(("user", f" {text}"), ("assistant", text)))[0] == ("So.", "text")
        assert said_in(source, said(("user", f" {text}"), ("assistant", text))) == ["So.", "So."]

    def test_blanks_that_look_like_the_templates_own_are_not_mistaken(self):
        assert answers(CHATML_TRIMMED, said(QUESTION, ("assistant", "\nSo.\n")))[0] == ("So.", "text")
        assert answers(CHATML, said(QUESTION, ("assistant", "\nSo.\n")))[0] == ("\nSo.\n", "text")

    def test_blanks_at_one_end_that_look_like_the_templates_own_are_not_mistaken(self):
        assert answers(CHATML_TRIMMED, said(QUESTION, ("assistant", "\nSo.")))[0] == ("So.", "text")
        source = CHATML_TRIMMED.replace("<|im_end|>", "\n<|im_end|>")
        assert answers(source, said(QUESTION, ("assistant", "So.\n")))[0] == ("So.", "text")

    def test_only_newlines_are_stripped_and_spaces_stay(self):
        source = CHATML.replace("m.content", "m.content.strip('\\n')")
        assert answers(source, said(QUESTION, ("assistant", "\n  So. \n")))[0] == ("  So. ", "text")

    def test_a_message_of_blanks_only_is_an_empty_turn(self):
        assert answers(CHATML_TRIMMED, said(QUESTION, ("assistant", " \n "))) == [("<|im_end|>", "end")]

    def test_the_first_message_is_trimmed_and_later_ones_are_not(self):
        source = CHATML.replace("m.content", "(m.content | trim if loop.first else m.content)")
        assert said_in(source, said(("user", " a "), ("assistant", "b"), ("user", " c "))) == ["a", "b", " c "]

    def test_one_role_is_trimmed_and_another_is_not(self):
        source = CHATML.replace("m.content", "(m.content | trim if m.role == 'assistant' else m.content)")
        assert said_in(source, said(("user", " a "), ("assistant", " b "))) == [" a ", "b"]


class TestTemplatesThatLookInside:
    def test_reasoning_of_earlier_answers_is_dropped_and_the_rest_found(self):
        conversation = said(
            QUESTION,
            ("assistant", "<think>\nhm\n</think>\n\nSo."),
            QUESTION,
            ("assistant", "<think>\nwell\n</think>\n\nThus."),
        )
        assert answers(THINKING, conversation) == [
            ("So.", "text"),
            ("<|im_end|>", "end"),
            ("<think>\nwell\n</think>\n\nThus.", "text"),
            ("<|im_end|>", "end"),
        ]

    @pytest.mark.parametrize("thought", ["<think>\nhm\n</think>\n\n", "<think>hm</think>"])
    def test_reasoning_before_a_tool_call_is_learnt_with_the_call(self, thought):
        source = THINKING.replace(
            "    {{- '<|im_end|>\\n' }}",
            "    {%- for call in message.tool_calls %}{{ '\\n' if content else '' }}"
            "<call>{{ call.function.name }}</call>{% endfor %}\n    {{- '<|im_end|>\\n' }}",
        )
        call = {"type": "function", "function": {"name": "look", "arguments": {}}}
        conversation = said(QUESTION, ("assistant", thought, {"tool_calls": [call]}))
        assert answers(source, conversation) == [
            ("<think>\nhm\n</think>\n\n<call>look</call>", "text"),
            ("<|im_end|>", "end"),
        ]

    def test_an_answer_starts_where_the_prompt_ends_also_before_reasoning_that_is_empty(self):
        text = "<think>\n\n</think>\n\nSo."
        assert answers(THINKING, said(QUESTION, ("assistant", "So.")))[0] == (text, "text")

    def test_reasoning_of_its_own_field_is_said_too(self):
        conversation = said(QUESTION, ("assistant", "So.", {"reasoning_content": "hm <|im_end|>"}))
        assert said_in(THINKING, conversation) == ["Why?", "hm <|im_end|>", "So."]
        assert answers(THINKING, conversation)[0] == ("<think>\nhm <|im_end|>\n</think>\n\nSo.", "text")

    def test_reasoning_is_there_by_the_name_that_other_templates_use(self):
        source = "{% for m in messages %}{{ m.thinking }}<sep>{{ m.content }}</s>{% endfor %}"
        assert said_in(source, said(("assistant", "So.", {"reasoning_content": "hm"}))) == ["hm", "So."]

    def test_a_branch_on_content_is_followed(self):
        source = (
            "{% for m in messages %}<{{ m.role }}>{% if m.content.startswith('/no') %}[quiet]{% endif %}"
            "{{ m.content }}</s>{% endfor %}"
        )
        conversation = said(("user", "/no hello"), ("assistant", "So."))
        assert said_in(source, conversation) == ["/no hello", "So."]
        rendered = template_of(source).rendered(conversation)
        assert rendered.text == "<user>[quiet]/no hello</s><assistant>So.</s>"

    def test_a_branch_on_length_is_followed(self):
        source = (
            "{% for m in messages %}<m>{{ 'long: ' if m.content | length > 3 else '' }}{{ m.content }}</s>{% endfor %}"
        )
        assert said_in(source, said(("user", "abc"), ("assistant", "a"))) == ["abc", "a"]

    def test_a_template_that_changes_a_message_is_named_with_its_turn(self):
        source = CHATML.replace("m.content", "m.content | reverse")
        with refused(ChatError, "'inline'", "content", kind="changed by the template", turn=1) as caught:
            template_of(source).rendered(said(("user", "?"), ("assistant", "So.")))
        assert caught.value.remedy

    def test_arguments_of_tool_calls_are_found_in_json(self):
        source = (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}"
            "<call>{{ c.function | tojson }}</call>{% endfor %}</s>{% endfor %}"
        )
        call = {"type": "function", "function": {"name": "f", "arguments": {"x": 'a"\n</call>', "<k>": ["é"]}}}
        conversation = said(QUESTION, ("assistant", "", {"tool_calls": [call]}))
        text = '<call>{"name": "f", "arguments": {"x": "a\\"\\n</call>", "<k>": ["é"]}}'
        assert answers(source, conversation) == [(text + "</call>", "text"), ("</s>", "end")]
        assert said_in(source, conversation) == ["Why?", "f", 'a\\"\\n</call>', "<k>", "é"]


class TestToolCalls:
    """By mistral's template, whose answers have no header of their own."""

    CALL: ClassVar = {"type": "function", "id": "abc123XYZ", "function": {"name": "f", "arguments": {}}}
    CALLED = '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abc123XYZ"}]'
    TOOLS: ClassVar = [{"type": "function", "function": {"name": "f", "description": "gives </s> or [/INST]"}}]

    def turns(self, *kinds: str) -> dict[str, Any]:
        of = {
            "call": ("assistant", "", {"tool_calls": [self.CALL]}),
            "result": ("tool", "1", {"tool_call_id": "abc123XYZ"}),
            "answer": ("assistant", "So."),
            "question": QUESTION,
        }
        return said(*(of[kind] for kind in kinds), tools=self.TOOLS)

    def test_a_call_after_a_result_is_learnt_whole(self):
        conversation = self.turns("question", "call", "result", "call", "result", "answer")
        assert [text for text, part in answers("mistral", conversation) if part == "text"] == [
            self.CALLED,
            self.CALLED,
            " So.",
        ]

    def test_an_answer_after_a_result_is_learnt_whole_also_where_a_shorter_conversation_is_written_otherwise(self):
        conversation = self.turns("question", "call", "result", "answer", "question", "answer")
        assert [text for text, part in answers("mistral", conversation) if part == "text"] == [
            self.CALLED,
            " So.",
            " So.",
        ]

    def test_a_call_without_an_end_is_learnt_up_to_the_next_message(self):
        source = (
            "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}</call>"
            "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
        )
        text = '{"name": "f", "arguments": {}}</call>'
        conversation = self.turns("question", "call", "result", "answer")
        assert answers(source, conversation) == [(text, "text"), ("So.", "text"), ("</s>", "end")]

    @pytest.mark.parametrize(
        ("condition", "arguments"),
        [
            ("m.tool_calls", "c.function.arguments | tojson"),
            ("m.tool_calls and m.content is none", "c.function.arguments | tojson"),
            ("m.tool_calls", "c.function.arguments + ''"),
            ("m.tool_calls and m.content is none", "c.function.arguments + ''"),
        ],
    )
    def test_calls_are_given_as_the_template_takes_them(self, condition, arguments):
        source = (
            f"{{% for m in messages %}}<{{{{ m.role }}}}>{{% if {condition} %}}{{% for c in m.tool_calls %}}"
            f"{{{{ c.function.name + ':' + {arguments} }}}}{{% endfor %}}{{% else %}}{{{{ m.content }}}}"
            "{% endif %}</s>{% endfor %}"
        )
        call = {"type": "function", "function": {"name": "f", "arguments": {"x": 'é"', "n": 1}}}
        conversation = said(QUESTION, ("assistant", "", {"tool_calls": [call]}))
        assert answers(source, conversation) == [('f:{"x": "é\\"", "n": 1}', "text"), ("</s>", "end")]
        assert conversation["messages"][1]["tool_calls"] == [call]

    def test_markers_in_the_description_of_a_tool_are_none(self):
        rendered = template_of("mistral").rendered(self.turns("question", "answer"))
        (start, message) = [rendered.text[span.start : span.stop] for span in rendered.spans[:2]]
        assert start == "<s>"
        assert message.startswith("[AVAILABLE_TOOLS] ")
        assert message.endswith("[/AVAILABLE_TOOLS][INST] ")

    def test_arguments_may_have_keys_that_are_not_text(self):
        call = {"type": "function", "function": {"name": "f", "arguments": {1: 2}}}
        source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}</s>{% endfor %}"
        assert "{1: 2}" in template_of(source).rendered(said(QUESTION, ("assistant", "", {"tool_calls": [call]}))).text


class TestTemplatesThatLoseMessages:
    def test_a_message_that_is_dropped_is_named(self):
        source = "{% for m in messages if m.role != 'system' %}<m>{{ m.content }}</s>{% endfor %}"
        with refused(ChatError, kind="dropped by the template", turn=0):
            template_of(source).rendered(said(("system", "Be brief."), ("user", "a")))

    def test_an_empty_message_that_is_dropped_is_no_loss(self):
        source = "{% for m in messages if m.content %}<m>{{ m.content }}</s>{% endfor %}"
        assert said_in(source, said(("system", ""), ("user", "a"))) == ["a"]

    def test_tool_calls_that_are_dropped_are_named(self):
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        with refused(ChatError, "'f'", kind="dropped by the template", turn=1):
            template_of(CHATML).rendered(said(QUESTION, ("assistant", "Wait.", {"tool_calls": [call]})))

    def test_messages_in_another_order_are_named(self):
        source = "{% for m in messages | reverse %}<m>{{ m.content }}</s>{% endfor %}"
        with refused(ChatError, kind="reordered by the template", turn=1):
            template_of(source).rendered(said(("user", "a"), ("assistant", "b")))

    def test_a_message_that_is_there_twice_is_named(self):
        source = "{% for m in messages %}<m>{{ m.content }}|{{ m.content }}</s>{% endfor %}"
        with refused(ChatError, 2, kind="repeated by the template", turn=0):
            template_of(source).rendered(said(("user", "a")))

    @pytest.mark.parametrize("character", ["\ufdd0", "\ufdd9", "\ufdef"])
    def test_text_with_the_characters_of_tags_is_refused(self, character):
        with refused(ChatError, "U+FD", kind="noncharacters in the text", turn=1):
            template_of(CHATML).rendered(said(QUESTION, ("assistant", f"a{character}b")))

    def test_arabic_letters_beside_those_characters_are_fine(self):
        assert said_in(CHATML, said(("user", "\ufdf2 \ufdfa"))) == ["\ufdf2 \ufdfa"]


class TestGenerationMarks:
    def test_what_they_enclose_is_what_is_learnt(self):
        conversation = said(QUESTION, ("assistant", "So."), QUESTION, ("assistant", "Thus."))
        assert answers(CHATML_MARKED, conversation) == [
            *[("So.", "text"), ("<|im_end|>", "end")],
            *[("Thus.", "text"), ("<|im_end|>", "end")],
        ]

    def test_an_end_outside_of_them_is_not_learnt(self):
        source = CHATML_MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
        assert answers(source, said(QUESTION, ("assistant", "So."))) == [("So.", "text")]

    def test_they_win_over_where_the_message_is(self):
        source = CHATML_MARKED.replace("{% generation %}", "{% generation %}Answer: ")
        assert answers(source, said(QUESTION, ("assistant", "So.")))[0] == ("Answer: So.", "text")

    def test_an_answer_without_them_is_not_learnt(self):
        source = CHATML_MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
        conversation = said(QUESTION, ("assistant", "So."), QUESTION, ("assistant", "Thus."))
        assert answers(source, conversation) == [("Thus.", "text"), ("<|im_end|>", "end")]
        source = CHATML_MARKED.replace("m.role == 'assistant'", "m.role == 'none'")
        assert answers(source, conversation) == []

    def test_they_are_followed_through_a_template_that_changes_blanks(self):
        source = CHATML_MARKED.replace("m.content", "m.content.strip('\\n')")
        assert answers(source, said(QUESTION, ("assistant", "\n So."))) == [(" So.", "text"), ("<|im_end|>", "end")]

    def test_a_branch_that_compares_the_answer_is_the_one_that_counts(self):
        source = CHATML_MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and m.content != 'So.'")
        conversation = said(QUESTION, ("assistant", "So."), QUESTION, ("assistant", "Thus."))
        assert answers(source, conversation) == [("Thus.", "text"), ("<|im_end|>", "end")]

    def test_an_answer_without_words_is_what_they_enclose(self):
        source = (
            "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '.' }}"
            "{% endgeneration %}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
        )
        assert answers(source, said(QUESTION, ("assistant", ""))) == [(".", "text")]

    def test_they_are_not_in_the_text(self):
        conversation = said(QUESTION, ("assistant", "So."))
        assert template_of(CHATML_MARKED).rendered(conversation).text == template_of(CHATML).render(conversation)


class TestFindTemplate:
    def tokenizer(self, **config: Any) -> Any:
        return SimpleNamespace(name="mine", config=config, vocab={})

    def test_a_wrong_name_is_answered_with_the_near_one(self):
        with refused(SpecError, "'chatlm'", "llama-3", parameter="chat_template", remedy="'chatml'"):
            find_template("chatlm", BytesTokenizer())

    def test_a_tokenizer_without_a_template_is_answered_with_the_names(self):
        with refused(TokenizerError, "'bytes'", "chatml", parameter="chat_template", remedy="chat_template="):
            find_template(None, BytesTokenizer())

    @pytest.mark.parametrize(
        "own",
        [
            CHATML,
            [{"name": "tool_use", "template": "{{ 1 }}"}, {"name": "default", "template": CHATML}],
            {"tool_use": "{{ 1 }}", "default": CHATML},
        ],
    )
    def test_none_is_the_tokenizers_own(self, own):
        assert find_template(None, self.tokenizer(chat_template=own)).source == CHATML

    def test_another_of_the_tokenizers_own_is_found_by_its_name(self):
        own = [{"name": "tool_use", "template": "{{ 1 }}"}, {"name": "default", "template": CHATML}]
        assert find_template("tool_use", self.tokenizer(chat_template=own)).source == "{{ 1 }}"

    @pytest.mark.parametrize("own", [[{"name": "default"}], ["default"], {"default": None}, 3, [[CHATML]]])
    def test_a_template_in_no_known_form_is_refused_and_a_built_in_is_still_found(self, own):
        tokenizer = self.tokenizer(chat_template=own)
        with refused(TokenizerError, "'mine'", parameter="chat_template", remedy="chat_template='chatml'"):
            find_template(None, tokenizer)
        assert find_template("chatml", tokenizer).name == "chatml"

    def test_a_file_is_read(self, tmp_path):
        (tmp_path / "mine.jinja").write_text(CHATML)
        assert find_template(str(tmp_path / "mine.jinja"), BytesTokenizer()).source == CHATML
        with refused(SpecError, file=tmp_path / "other.jinja", parameter="chat_template"):
            find_template(tmp_path / "other.jinja", BytesTokenizer())

    def test_a_value_of_another_type_is_refused(self):
        with refused(SpecError, "chat_template=3", parameter="chat_template"):
            find_template(3, BytesTokenizer())  # type: ignore[arg-type]

    def test_special_tokens_come_from_the_config_also_as_objects(self):
        tokenizer = self.tokenizer(bos_token={"content": "<B>"}, eos_token="<E>", pad_token=None, chat_template=CHATML)
        assert find_template(None, tokenizer).special_tokens == {"bos_token": "<B>", "eos_token": "<E>"}
        assert find_template("mistral", tokenizer).render(said(("user", "a"))) == "<B>[INST] a[/INST]"

    def test_special_tokens_of_a_built_in_are_tokens_of_the_tokenizer_where_it_has_known_ones(self):
        tokenizer = SimpleNamespace(name="mine", config={}, vocab={"<|endoftext|>": 0})
        assert find_template("zephyr", tokenizer).special_tokens == {"eos_token": "<|endoftext|>"}
        assert find_template("zephyr", self.tokenizer()).special_tokens == {"eos_token": "</s>"}

    def test_a_template_file_beside_the_tokenizer_is_its_own(self, tmp_path):
        from tokenizers import Tokenizer
        from tokenizers.models import BPE

        Tokenizer(BPE()).save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "chat_template.jinja").write_text(CHATML)
        assert find_template(None, load_tokenizer(tmp_path / "tokenizer.json")).source == CHATML
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ 1 }}"}))
        assert find_template(None, load_tokenizer(tmp_path / "tokenizer.json")).source == "{{ 1 }}"

    def test_a_transformers_object_keeps_its_template_and_special_tokens(self):
        transformers = pytest.importorskip("transformers")
        from tokenizers import Tokenizer
        from tokenizers.models import BPE

        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(BPE()), bos_token="<B>", eos_token="<E>"
        )
        theirs.chat_template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
        template = find_template(None, resolve_tokenizer(theirs))
        assert template.render(said(("user", "a"))) == "<B>a<E>"

    def test_arguments_reach_the_template(self):
        assert template_of("{{ depth }}{{ messages[0].content }}", depth=3).render(said(("user", "a"))) == "3a"


class TestTheValue:
    def test_it_survives_pickling_after_use(self):
        template = template_of(CHATML, depth=3)
        rendered = template.rendered(said(QUESTION))
        again = pickle.loads(pickle.dumps(template))
        assert again == template
        assert again.fingerprint == template.fingerprint
        assert again.rendered(said(QUESTION)) == rendered

    def test_its_fingerprint_follows_what_it_writes(self):
        same = template_of(CHATML).fingerprint
        assert same == template_of(CHATML).fingerprint
        assert same != template_of(CHATML + " ").fingerprint
        assert same != template_of(CHATML, depth=3).fingerprint
        assert same != find_template(CHATML, SimpleNamespace(config={"eos_token": "<E>"})).fingerprint

    def test_a_chat_error_survives_pickling(self):
        error = pickle.loads(pickle.dumps(ChatError("kind", "reason", turn=3, remedy="cure")))
        assert (error.kind, error.reason, error.turn, error.remedy) == ("kind", "reason", 3, "cure")
        assert str(error) == "kind: reason (message 3)"


@pytest.mark.parametrize(
    ("text", "other", "region"),
    [("", "", (0, 0)), ("aXb", "ab", (1, 2)), ("ab", "aXb", (1, 1)), ("aaa", "a?a", (1, 2)), ("abc", "?", (0, 3))],
)
def test_the_region_between_is_what_differs(text, other, region):
    assert region_between(text, other) == region
