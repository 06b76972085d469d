"""The built-in chat templates, in ordinary Jinja. They are treated like a user's own.

They give the same texts as the models' own templates. They refuse the same conversations (gemma: a system message).
One difference: `mistral` writes the system message before the first user message. Mistral 7B v0.3's own template writes
it before the last user message, if nothing follows, and leaves it out of every conversation that has an answer, so a
model cannot learn from it.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BUILT_IN", "BuiltIn"]


class BuiltIn(NamedTuple):
    source: str
    tokens: dict[str, str]
    """The template's special tokens, for a tokenizer that does not name its own."""


_CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

_LLAMA_3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

_MISTRAL = """\
{%- set said = namespace(system='', last='assistant') %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}
            {{- raise_exception('Only the first message may be a system message') }}
        {%- endif %}
        {%- set said.system = message.content + '\\n\\n' %}
    {%- elif message.role == 'user' %}
        {%- if said.last != 'assistant' %}
            {{- raise_exception('Roles must alternate: user, assistant, user, assistant, ...') }}
        {%- endif %}
        {%- if tools and not messages[loop.index:] | selectattr('role', 'equalto', 'user') | list %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + said.system + message.content + '[/INST]' }}
        {%- set said.system = '' %}
        {%- set said.last = 'user' %}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {%- if message.content %}
            {{- raise_exception('A message with tool calls has no content') }}
        {%- elif said.last == 'assistant' %}
            {{- raise_exception('Roles must alternate: user, assistant, user, assistant, ...') }}
        {%- endif %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('A tool call needs an id of 9 characters') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last else '' }}
        {%- endfor %}
        {{- ']' + eos_token }}
        {%- set said.last = 'tool call' %}
    {%- elif message.role == 'assistant' %}
        {%- if said.last == 'assistant' %}
            {{- raise_exception('Roles must alternate: user, assistant, user, assistant, ...') }}
        {%- endif %}
        {{- ' ' + message.content | trim + eos_token }}
        {%- set said.last = 'assistant' %}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('A tool message needs a tool_call_id of 9 characters') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
        {%- set said.last = 'tool' %}
    {%- else %}
        {{- raise_exception('Roles are system, user, assistant and tool; not ' + message.role) }}
    {%- endif %}
{%- endfor %}"""

_GEMMA = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ('user', 'assistant') %}
        {{- raise_exception('Roles are user and assistant; not ' + message.role) }}
    {%- elif (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate: user, assistant, user, assistant, ...') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' }}
    {{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}"""

_ZEPHYR = """\
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception('Roles are system, user and assistant; not ' + message.role) }}
    {%- endif %}
    {{- '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}"""

_QWEN = """\
{%- set default = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}
{%- set has_system = messages and messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + (messages[0].content if has_system else default) }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' }}
    {{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' + ('\\n' + message.content if message.content else '') }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role in ('user', 'assistant') or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

_PLAIN = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- 'Assistant: ' + message.content + eos_token + '\\n' }}
    {%- else %}
        {{- message.role | capitalize + ': ' + message.content + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:' }}
{%- endif %}"""

BUILT_IN = {
    "chatml": BuiltIn(_CHATML, {}),
    "gemma": BuiltIn(_GEMMA, {"bos_token": "<bos>"}),
    "llama-3": BuiltIn(_LLAMA_3, {"bos_token": "<|begin_of_text|>"}),
    "mistral": BuiltIn(_MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"}),
    "plain": BuiltIn(_PLAIN, {"eos_token": ""}),
    "qwen": BuiltIn(_QWEN, {}),
    "zephyr": BuiltIn(_ZEPHYR, {"eos_token": "</s>"}),
}
"""The templates by name. `plain` ends an answer with the tokenizer's end of text, if it has one."""
