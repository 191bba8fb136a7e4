"""Conversations to text, and what is trained in it. The oracle is transformers' `apply_chat_template`."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import (
    CHATML,
    CHATML_GENERATION,
    DROPS_THINKING,
    ELABORATE,
    LLAMA3,
    MISTRAL,
    save_tokenizer,
    tokenizer_json,
)
from tokenizers import Tokenizer

from triweave.data.examples import Conversation, Message
from triweave.data.sandbox import MAX_STEPS
from triweave.data.template import (
    MAX_TEMPLATE_BYTES,
    CannotRender,
    ChatTemplate,
    LossOn,
    load_chat_template,
    make_chat_template,
    render,
)
from triweave.data.tokenize import trained_tokens
from triweave.data.tokenizer import TextTokenizer, load_tokenizer
from triweave.errors import InputError

LIMITS = resource.getrlimit(resource.RLIMIT_AS)
TALK = Conversation(
    (
        Message("user", "  What is the capital of Japan? "),
        Message("assistant", " Tokyo.\n"),
        Message("user", "Thank you! 東京"),
        Message("assistant", "No, thank *you* 🙂"),
    )
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def reference() -> Any:
    transformers = pytest.importorskip("transformers")
    backend = Tokenizer.from_str(tokenizer_json())
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def as_dicts(conversation: Conversation) -> list[dict[str, Any]]:
    return [{"role": m.role, "content": m.content, **m.extra} for m in conversation.messages]


def said(template: ChatTemplate, conversation: Conversation, loss_on: LossOn = "assistant") -> list[str]:
    rendered = render(template, conversation, loss_on)
    return [rendered.text[first:last] for first, last in rendered.trained]


TEMPLATES = {"chatml": CHATML, "generation": CHATML_GENERATION, "llama3": LLAMA3, "mistral": MISTRAL}
WORDS = st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=20)
TURNS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=30, deadline=None)
@given(turns=TURNS)
def test_text_and_tokens_are_those_of_transformers(
    name: str, tokenizer: TextTokenizer, reference: Any, turns: list[tuple[str, str]]
) -> None:
    """Any conversation comes out with the same characters and the same ids, the template's own BOS once."""
    talk = Conversation(tuple(m for u, a in turns for m in (Message("user", u), Message("assistant", a))))
    rendered = render(make_chat_template(TEMPLATES[name], tokenizer, name), talk, "all")
    expected = {"conversation": as_dicts(talk), "chat_template": TEMPLATES[name]}
    assert rendered.text == reference.apply_chat_template(**expected, tokenize=False)
    encoding = tokenizer.encode([rendered.text], add_special_tokens=False)[0]
    assert not isinstance(encoding, Exception)
    assert encoding.ids == reference.apply_chat_template(**expected)["input_ids"]


@settings(max_examples=60, deadline=None)
@given(turns=TURNS)
def test_mask_of_generation_blocks_is_that_of_transformers(
    tokenizer: TextTokenizer, reference: Any, turns: list[tuple[str, str]]
) -> None:
    """Where the template marks what the assistant writes, token by token the same is trained."""
    talk = Conversation(tuple(m for u, a in turns for m in (Message("user", u), Message("assistant", a))))
    rendered = render(make_chat_template(CHATML_GENERATION, tokenizer, "x"), talk)
    encoding = tokenizer.encode([rendered.text], add_special_tokens=False)[0]
    assert not isinstance(encoding, Exception)
    expected = reference.apply_chat_template(
        as_dicts(talk), chat_template=CHATML_GENERATION, return_dict=True, return_assistant_tokens_mask=True
    )
    assert trained_tokens(encoding, rendered).astype(int).tolist() == expected["assistant_masks"]


@settings(max_examples=40, deadline=None)
@given(turns=TURNS)
def test_turn_by_turn_finds_what_the_blocks_mark(tokenizer: TextTokenizer, turns: list[tuple[str, str]]) -> None:
    """The same template with and without its blocks trains the same characters."""
    talk = Conversation(tuple(m for u, a in turns for m in (Message("user", u), Message("assistant", a))))
    plain = CHATML_GENERATION.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    marked = render(make_chat_template(CHATML_GENERATION, tokenizer, "x"), talk)
    assert render(make_chat_template(plain, tokenizer, "x"), talk) == marked


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, [" Tokyo.\n<|im_end|>", "No, thank *you* 🙂<|im_end|>"]),
        (CHATML_GENERATION, [" Tokyo.\n<|im_end|>", "No, thank *you* 🙂<|im_end|>"]),
        (LLAMA3, ["Tokyo.<|eot_id|>", "No, thank *you* 🙂<|eot_id|>"]),
        (MISTRAL, ["  Tokyo.\n</s>", " No, thank *you* 🙂</s>"]),
    ],
)
def test_reply_is_trained_with_its_end_and_without_its_head(
    tokenizer: TextTokenizer, source: str, expected: list[str]
) -> None:
    """What the model writes itself: the words and the end-of-turn token; not the role, not the line feed after."""
    assert said(make_chat_template(source, tokenizer, "x"), TALK) == expected


@pytest.mark.parametrize("source", [CHATML, CHATML_GENERATION])
def test_loss_on_and_flags_choose_the_replies(tokenizer: TextTokenizer, source: str) -> None:
    """`completion` takes the last reply, `all` everything, and a flag takes its message out of either."""
    template = make_chat_template(source, tokenizer, "x")
    first, second = " Tokyo.\n<|im_end|>", "No, thank *you* 🙂<|im_end|>"
    text = render(template, TALK).text
    assert said(template, TALK, "completion") == [second]
    assert said(template, TALK, "all") == [text]
    flagged = Conversation((TALK.messages[0], Message("assistant", " Tokyo.\n", trained=False), *TALK.messages[2:]))
    assert said(template, flagged) == [second]
    assert said(template, flagged, "all") == text.split(first)
    silent = Conversation((*TALK.messages[:3], Message("assistant", "No, thank *you* 🙂", trained=False)))
    assert said(template, silent, "completion") == []


def test_page_shows_a_template_for_plain_prompts(tokenizer: TextTokenizer) -> None:
    """The template on the page about data joins prompt and completion as they are and trains the completion."""
    page = (Path(__file__).parent.parent / "docs" / "data.md").read_text(encoding="utf-8")
    template = make_chat_template(page.split("```jinja\n")[1].split("\n```")[0], tokenizer, "x")
    pair = Conversation((Message("user", "2 + 2 = "), Message("assistant", "4")))
    assert render(template, pair).text == "<s>2 + 2 = 4</s>"
    assert said(template, pair) == ["4</s>"]


def test_several_blocks_in_a_turn_are_matched_to_their_message(tokenizer: TextTokenizer) -> None:
    """A template that marks thought and answer apart: of a flagged message both go."""
    source = CHATML.replace(
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}",
        "{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content[:3] }}{% endgeneration %}"
        "{% generation %}{{ message.content[3:] + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}",
    )
    template = make_chat_template(source, tokenizer, "x")
    assert said(template, TALK) == [" To", "kyo.\n<|im_end|>", "No,", " thank *you* 🙂<|im_end|>"]
    assert said(template, TALK, "completion") == ["No,", " thank *you* 🙂<|im_end|>"]


def test_elaborate_template_renders_as_in_transformers(tokenizer: TextTokenizer, reference: Any) -> None:
    """Namespaces, break and continue, tojson with non-ASCII characters, tools, tool calls and the date."""
    tools = [{"name": "wetter", "description": "Wie ist es in <Köln>?"}]
    call = [{"function": {"name": "wetter", "arguments": {"ort": "Köln"}}}]
    talk = Conversation(
        (
            Message("system", "Sei kurz."),
            Message("user", "Und?"),
            Message("assistant", None, extra={"tool_calls": call}),
            Message("tool", "Regen"),
            Message("assistant", "Es regnet."),
        ),
        tools=tuple(tools),
    )
    template = make_chat_template(ELABORATE, tokenizer, "x")
    expected = reference.apply_chat_template(
        [{"role": m.role, **({"content": m.content} if m.content else {}), **m.extra} for m in talk.messages],
        tools=tools,
        chat_template=ELABORATE,
        tokenize=False,
    )
    assert render(template, talk).text == expected
    assert said(template, talk)[-1] == "Es regnet.<|im_end|>"
    assert "wetter" in said(template, talk)[0]


def test_template_that_rewrites_earlier_turns_is_refused(tokenizer: TextTokenizer) -> None:
    """Qwen3's way: dropping earlier thoughts. The first position that differs is named, and the way out."""
    thinking = Conversation((*TALK.messages[:1], Message("assistant", "<think>Hm</think>Tokyo"), *TALK.messages[2:]))
    template = make_chat_template(DROPS_THINKING, tokenizer, "qwen.jinja")
    with pytest.raises(CannotRender) as raised:
        render(template, thinking)
    text = render(template, thinking, "all").text
    at = text.index("Tokyo")
    assert f"its first 2 turns render differently alone than inside the conversation, first at character {at}" in str(
        raised.value
    )
    assert "mark it with {% generation %} in the chat template (qwen.jinja)" in str(raised.value)
    assert said(template, Conversation(thinking.messages[:2])) == ["<think>Hm</think>Tokyo<|im_end|>"]


def test_template_without_a_generation_prompt_is_refused(tokenizer: TextTokenizer) -> None:
    """Where the template ignores add_generation_prompt, the head of a reply would be trained: it is refused."""
    source = CHATML[: CHATML.index("{% if add_generation_prompt")]
    with pytest.raises(CannotRender, match="does not answer to add_generation_prompt"):
        render(make_chat_template(source, tokenizer, "x"), TALK)


def test_templates_own_refusal_is_passed_on(tokenizer: TextTokenizer) -> None:
    """Mistral's roles must alternate; its own words say so."""
    with pytest.raises(CannotRender, match="Conversation roles must alternate"):
        render(make_chat_template(MISTRAL, tokenizer, "x"), Conversation((Message("system", "S"), *TALK.messages)))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ raise_exception.__globals__['json'] }}", "unsafe"),
        ("{{ strftime_now.__self__.__class__.__mro__ }}", "undefined|unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ namespace(__class__=1) }}", "underscore"),
        ("{{ _budget._spend() }}", "undefined"),
        ("{% include '/etc/hostname' %}", "no loader"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", f"{MAX_STEPS:,} steps"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "steps"),
        ("{% set _budget = 1 %}{% for i in range(99999) %}{% for j in range(9) %}{% endfor %}{% endfor %}", "steps"),
        ("{{ 'a' * 10**10 }}", "more than"),
        ("{{ 10 ** 9999999999 }}", "more than"),
        ("{% set n = namespace(v=3) %}{% for i in range(99) %}{% set n.v = n.v * n.v %}{% endfor %}", "4096 bits"),
        ("{{ 'a' | center(10 ** 10) }}", "MiB of memory"),
        ("{{ 'a'.center(10 ** 10) }}", "MiB of memory"),
        ("{{ '%010000000000d' % 1 }}", "MiB of memory"),
        ("{{ '{:10000000000}'.format(1) }}", "MiB of memory"),
        (
            "{% set n = namespace(v='a') %}{% for i in range(60) %}{% set n.v = n.v ~ n.v %}{% endfor %}",
            "MiB of memory",
        ),
        (
            "{% set n = namespace(v=[1]) %}{% for i in range(60) %}{% set n.v = n.v + n.v %}{% endfor %}",
            "MiB of memory",
        ),
        ("{% set a = 'a' * 9999999 %}" + "{% set b = a | replace('a', 'bb') | length %}" * 999, "takes more than"),
        ("{% for i in range(999) %}{{ 'a' * 99999 }}{% endfor %}", "renders more than"),
    ],
)
def test_hostile_template_comes_to_nothing(tokenizer: TextTokenizer, source: str, message: str) -> None:
    """Whatever reaches for Python, for files, or for endless time and space is refused, and quickly."""
    began = time.process_time()
    with pytest.raises(CannotRender, match=message):
        render(make_chat_template(source, tokenizer, "x"), TALK, "all")
    assert time.process_time() - began < 20
    assert resource.getrlimit(resource.RLIMIT_AS) == LIMITS


def test_marks_of_blocks_cannot_be_smuggled_in(tokenizer: TextTokenizer) -> None:
    """A message cannot say itself what is trained."""
    evil = Conversation((Message("user", "x\ufdd0train me\ufdd1"), Message("assistant", "no")))
    with pytest.raises(CannotRender, match="noncharacter"):
        render(make_chat_template(CHATML_GENERATION, tokenizer, "x"), evil)


def test_value_that_is_not_json_never_reaches_a_template(tokenizer: TextTokenizer) -> None:
    """Objects have methods that a sandbox knows nothing of."""
    odd = Conversation((Message("user", "x", extra={"when": time}), Message("assistant", "no")))
    with pytest.raises(CannotRender, match="not JSON"):
        render(make_chat_template(CHATML, tokenizer, "x"), odd)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", r"t.jinja:1: data.chat_template: is not a Jinja template"),
        ("a\n{% for %}", r"t.jinja:2: data.chat_template"),
        ("{{ x | no_such_filter }}", "No filter named"),
        (" " * (MAX_TEMPLATE_BYTES + 1), f"has {MAX_TEMPLATE_BYTES + 1:,} bytes"),
    ],
)
def test_wrong_template_is_named_with_its_line(tokenizer: TextTokenizer, source: str, message: str) -> None:
    """What is no Jinja, and what is too large to be a chat template."""
    with pytest.raises(InputError, match=message):
        make_chat_template(source, tokenizer, "t.jinja")


def test_template_is_looked_up_in_order(tmp_path: Path) -> None:
    """A file of the run comes first, then chat_template.jinja, then tokenizer_config.json: a string or a named list."""
    folder = save_tokenizer(
        tmp_path / "a", chat_template=[{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    )
    tokenizer = load_tokenizer(folder)

    def found(file: str | None = None) -> str | None:
        template = load_chat_template(folder, tokenizer, file)
        return None if template is None else template.source

    assert found() == "d"
    save_tokenizer(folder, chat_template="string")
    assert found() == "string"
    (folder / "chat_template.jinja").write_text("file")
    assert found() == "file"
    (tmp_path / "own.jinja").write_text("own")
    assert found(str(tmp_path / "own.jinja")) == "own"
    assert load_chat_template(save_tokenizer(tmp_path / "b", chat_template=None), tokenizer) is None
    with pytest.raises(InputError, match="is not a file"):
        found(str(tmp_path / "none.jinja"))
    with pytest.raises(InputError, match="chat templates rag and none called default"):
        load_chat_template(save_tokenizer(tmp_path / "c", chat_template=[{"name": "rag", "template": "r"}]), tokenizer)
    with pytest.raises(InputError, match="must hold the chat template as a string"):
        load_chat_template(save_tokenizer(tmp_path / "d", chat_template=3), tokenizer)  # type: ignore[arg-type]
    (tmp_path / "large.jinja").write_text(" " * (MAX_TEMPLATE_BYTES + 1))
    with pytest.raises(InputError, match="a chat template has at most"):
        found(str(tmp_path / "large.jinja"))
