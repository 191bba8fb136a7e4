"""A byte-level BPE tokenizer trained on the spot, and chat templates in the styles that are met in the wild."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
INSTRUCT = ("[INST]", "[/INST]")

CORPUS = (
    "The quick brown fox jumps over the lazy dog. What is the capital of Japan? The capital of Japan is Tokyo.\n",
    "How do I open a file in Python? Use open(), and close it when you are done; better, use a with statement.\n",
    "user assistant system tool You are a helpful assistant. Thank you! Yes, of course. No, not at all.\n\n",
)

CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CHATML_GENERATION = (
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'assistant' %}\n"
    "        {{- '<|im_start|>assistant\n' }}{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}\n"
    "        {{- '\n' }}\n"
    "    {%- else %}\n"
    "        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)

# Drops what the assistant thought in earlier turns, as Qwen3's does.
DROPS_THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Namespaces, loop controls, tojson, tools and the date: the corners of the environment.
ELABORATE = (
    "{%- set ns = namespace(system='') -%}\n"
    "{%- for message in messages -%}{%- if message.role == 'system' -%}"
    "{%- set ns.system = message.content -%}{%- break -%}{%- endif -%}{%- endfor -%}\n"
    "{{- bos_token + '<|im_start|>system\n' + ns.system + ' Year: ' + strftime_now('%Y') }}\n"
    "{%- if tools %}{{- '\n' + (tools | tojson(indent=2)) + '\n' }}{%- endif %}\n"
    "{{- '<|im_end|>\n' }}\n"
    "{%- for message in messages if message.role != 'system' %}\n"
    "    {%- if message.tool_calls is defined %}\n"
    "        {{- '<|im_start|>assistant\n' + (message.tool_calls | tojson) + '<|im_end|>\n' }}\n"
    "        {%- continue %}\n"
    "    {%- endif %}\n"
    "    {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


@cache
def tokenizer_json() -> str:
    """The tokenizer as the text of its file. It adds `<s>` before what it encodes, as Llama's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*SPECIAL, *INSTRUCT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer.to_str()


def vocab_size() -> int:
    """Number of tokens."""
    return Tokenizer.from_str(tokenizer_json()).get_vocab_size()


def save_tokenizer(folder: Path, chat_template: str | list[dict[str, str]] | None = CHATML, **config: Any) -> Path:
    """Write the tokenizer's files into `folder`, which is made; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, **config}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_jsonl(path: Path, records: list[Any]) -> Path:
    """Write one JSON value a line; returns the path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
