#!/usr/bin/env python3
"""Writes tests/testdata/chat-renderings.json: chats as jinja2 renders them, set up as transformers does.

Run by hand where a template is added; needs python3-jinja2. chat_renderings_test.cc compares.
"""

import argparse
import json
import pathlib
import random

import jinja2
import jinja2.ext
import jinja2.sandbox

TESTDATA = pathlib.Path(__file__).resolve().parents[2] / "testdata"
SEED = 20
CASES = 30  # Of each template; six times as many of the one that others of its kind are cut from.
BOS, EOS = "<BOS>", "<EOS>"

ALTERNATE = """{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"""
MIXTRAL = (
    "{{ bos_token }}{% for message in messages %}" + ALTERNATE +
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant!') }}{% endif %}{% endfor %}")
INSTRUCT = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def between(text, begin, end):
    """What stands from `begin` to `end`, the first with it and the second without."""
    start = text.index(begin)
    return text[start:text.index(end, start)]


def revised(template):
    """Qwen3's template as later checkpoints have it: content that is no string is taken for none."""
    answer = between(template, "        {%- set content = message.content %}", "        {%- if loop.index0 >")
    edits = {
        answer: """        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
""",
        'message.role == "user" and not(': 'message.role == "user" and message.content is string and not(',
        "{%- for message in messages %}\n": """{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
""",
        "message.content + '<|im_end|>'": "content + '<|im_end|>'",
        "{{- message.content }}": "{{- content }}",
    }
    for old, new in edits.items():
        assert template.count(old) == 1, old
        template = template.replace(old, new)
    return template


def without_reasoning(template):
    """As 2507 Instruct has it."""
    template = template.replace(between(template, "{%- set ns", "{%- for message in messages %}"), "")
    answer = between(template, "        {%- set reasoning_content", "        {%- if message.tool_calls")
    return template.replace(answer, "        {{- '<|im_start|>' + message.role + '\\n' + content }}\n")


def with_prompt(template, prompt):
    return template[:template.index("{%- if add_generation_prompt")] + """{%- if add_generation_prompt %}
    {{- '""" + prompt + """' }}
{%- endif %}
"""


QWEN3 = json.loads((TESTDATA / "tokenizers/qwen3/tokenizer_config.json").read_text())["chat_template"]
DEEPSEEK_V2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ 'User: ' + message['content'] + '\\n\\n' }}{% elif message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' + message['content'] + eos_token }}{% elif message['role'] == 'system' %}"
    "{{ message['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}")
SET_IF_UNDEFINED = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}")

# Templates with the statements of published checkpoints; Qwen3's own is among the test data.
TEMPLATES = {
    "qwen3": QWEN3,
    "qwen3_instruct": INSTRUCT,
    "qwen3_thinking": INSTRUCT.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}"),
    "deepseek_v2": DEEPSEEK_V2,
    "mixtral": MIXTRAL,
    "mixtral_space_behind": MIXTRAL.replace("+ eos_token}}", "+ eos_token + ' ' }}"),
    "mixtral_spaced": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}

{{- bos_token }}
{%- for message in loop_messages %}
    """ + ALTERNATE.replace("{%", "{%-").replace("{{", "{{-") + """
    {%- if message["role"] == "user" %}
        {%- if loop.first and system_message is defined %}
            {{- " [INST] " + system_message + "\\n\\n" + message["content"] + " [/INST]" }}
        {%- else %}
            {{- " [INST] " + message["content"] + " [/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
""",
    "qwen3_revised": revised(QWEN3),
    "qwen3_2507_thinking": with_prompt(revised(QWEN3), "<|im_start|>assistant\\n<think>\\n"),
    "qwen3_2507_instruct": with_prompt(without_reasoning(revised(QWEN3)), "<|im_start|>assistant\\n"),
    "deepseek_v2_lite": SET_IF_UNDEFINED + DEEPSEEK_V2,
}

PIECES = [
    "hello", "", "\n", "\n\n", " ", "\t", "  two ", "\u00e9", "\u65e5\u672c\u8a9e", "\U0001f389", "\u200b", "\ufeff",
    "\u00a0", "\r\n", "<think>", "</think>", "<think>\nwhy\n</think>\n\nbecause", "<|im_start|>", "<|im_end|>", "[INST]",
    "[/INST]", EOS, BOS, "{{ x }}", "{% if %}", "<tool_response>", "</tool_response>", "'single'", '"double"', "\\n",
    "\0", "\x1f", "\u2028", "a\u0301", "User: ", "Assistant:",
]


def compiled(template):
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    environment.filters["tojson"] = lambda x, **options: json.dumps(x, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(template)


def content(rng):
    kind = rng.random()
    if kind < 0.12:
        return ""
    if kind < 0.2:
        return "<tool_response>" + rng.choice(PIECES) + "</tool_response>"
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 5)))


def conversation(rng):
    """Half of them in the order that all templates take, the others in any."""
    turns = rng.randint(1, 6)
    if rng.random() < 0.5:
        roles = ["system"] * rng.randint(0, 1) + [("user", "assistant")[i % 2] for i in range(turns)]
    else:
        roles = [rng.choice(("system", "user", "assistant")) for _ in range(turns)]
    return [{"role": role, "content": content(rng)} for role in roles]


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()
    rng = random.Random(SEED)
    cases = []
    for name, template in TEMPLATES.items():
        program = compiled(template)
        for _ in range(6 * CASES if name == "qwen3" else CASES):
            case = {"template": name, "messages": conversation(rng),
                    "add_generation_prompt": rng.random() < 0.7, "enable_thinking": rng.random() < 0.6}
            try:
                case["text"] = program.render(
                    messages=case["messages"], tools=None, documents=None, bos_token=BOS, eos_token=EOS,
                    add_generation_prompt=case["add_generation_prompt"], enable_thinking=case["enable_thinking"])
            except jinja2.exceptions.TemplateError:
                case["text"] = None
            cases.append(case)
    result = {"bos": BOS, "eos": EOS, "templates": TEMPLATES, "cases": cases}
    with open(TESTDATA / "chat-renderings.json", "w", encoding="ascii") as file:
        json.dump(result, file, indent=0)
        file.write("\n")


if __name__ == "__main__":
    main()
