"""Token bytes, text offsets and chat templates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from gateway.chat_template import ChatTemplate, ChatTemplateError, load_chat_template
from gateway.config import ConfigError
from gateway.errors import ApiError
from gateway.model import ServedModel
from gateway.tokenizing import SHORT_CHARS, Tokenizing
from gateway.tokentext import TextOffsets, TokenText
from tests.gateway.conftest import Open


def sentencepiece() -> Tokenizer:
    vocab = {"<unk>": 0, "\u2581hello": 1, "<0xC3>": 2, "<0xA9>": 3, "!": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.mark.parametrize("text", ["hello world", "naïve café", "日本語", "a\n\tb", "\U0001f600 ok"])
def test_the_bytes_of_byte_level_tokens_join_to_the_text(model: ServedModel, text: str) -> None:
    ids = model.tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(model.token_text.bytes_of(i) for i in ids).decode() == text


def test_sentencepiece_tokens_show_their_space_and_their_bytes() -> None:
    text = TokenText(sentencepiece())
    assert [text.bytes_of(i) for i in (1, 2, 3, 4)] == [b" hello", b"\xc3", b"\xa9", b"!"]
    assert text.text_of(2) == "\ufffd"


def test_special_and_unknown_tokens(model: ServedModel) -> None:
    assert model.token_text.text_of(2) == "<bos>"
    assert model.token_text.bytes_of(10**6) == b""


def test_offsets_count_characters_and_wait_for_whole_ones() -> None:
    offsets = TextOffsets(TokenText(sentencepiece()))
    assert offsets.advance([1, 2]) == [0, 6]
    assert offsets.advance([3, 4]) == [6, 7]


async def test_a_template_that_writes_bos_gets_no_second_one(model: ServedModel) -> None:
    messages = [{"role": "user", "content": "ab"}]
    for source in ("{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"):
        tokenizing = Tokenizing(model.tokenizer, ChatTemplate(source, {"bos_token": "<bos>"}, "test"))
        ids = await tokenizing.encode_chat(messages)
        tokenizing.close()
        assert ids == model.tokenizer.encode("ab").ids
        assert ids.count(2) == 1


def test_a_template_is_sandboxed_and_its_own_refusals_are_passed_on() -> None:
    for source, said in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{{ nothing.there }}", "undefined"),
    ):
        with pytest.raises(ChatTemplateError, match=said):
            ChatTemplate(source, {}, "test").render([{"role": "user", "content": "x"}])


def test_templates_come_from_the_operator_then_the_file_then_the_tokenizer_config(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, None) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "config", "bos_token": {"content": "<s>"}}')
    override = tmp_path / "mine.jinja"
    override.write_text("mine {{ bos_token }}")

    def rendered(file: Path | None) -> str:
        template = load_chat_template(tmp_path, file)
        assert template is not None
        return template.render([])

    assert rendered(None) == "config"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered(None) == "file"
    assert rendered(override) == "mine <s>"


def test_a_template_that_is_missing_or_does_not_compile_is_refused_at_start(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% if %}")
    for file in (broken, tmp_path / "missing.jinja"):
        with pytest.raises(ConfigError, match=str(file)):
            load_chat_template(tmp_path, file)


def test_templates_listed_by_name_may_be_of_any_form(tmp_path: Path) -> None:
    listed = [1, "x", {"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    for templates, rendered in ((listed, "yes"), (listed[:3], None), ([], None)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
        template = load_chat_template(tmp_path, None)
        assert (template.render([]) if template else None) == rendered


async def test_a_long_text_does_not_hold_up_the_event_loop(model: ServedModel) -> None:
    tokenizing = Tokenizing(model.tokenizer, None)
    loop = asyncio.get_running_loop()

    async def held_up(work: Coroutine[Any, Any, Any]) -> tuple[float, float, Any]:
        """The longest time for which nothing else could run, the time that the work took, and its result."""
        began = ticked = loop.time()
        worst = 0.0
        task = asyncio.create_task(work)
        while not task.done():
            await asyncio.sleep(0.001)
            ticked, before = loop.time(), ticked
            worst = max(worst, ticked - before)
        return worst, loop.time() - began, task.result()

    text = "hello world " * 100_000
    worst, took, ids = await held_up(tokenizing.encode(text))
    assert worst < took / 2
    worst, took, back = await held_up(tokenizing.decode(ids))
    assert worst < took / 2
    assert back == "<bos>" + text
    tokenizing.close()


async def test_more_waiting_texts_than_the_bound_are_refused(model: ServedModel) -> None:
    tokenizing = Tokenizing(model.tokenizer, None, threads=1, max_waiting=0)
    with pytest.raises(ApiError) as refused:
        await tokenizing.encode("a" * (SHORT_CHARS + 1))
    assert await tokenizing.encode("ab")
    tokenizing.close()
    assert refused.value.status == 503


async def test_tokenize_shows_pieces_of_the_vocabulary_and_prompts_as_they_will_be_sent(stage: Open) -> None:
    one = await stage()
    vocab = one.gateway._tokenizing.tokenizer
    messages = [{"role": "user", "content": "hi there"}]

    async def ids(**body: Any) -> list[int]:
        answer = await one.client.post("/tokenize", json=body)
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["tokens"]
        return found

    asked = {"prompt": "hi there", "return_token_strs": True}
    told = (await one.client.post("/tokenize", json=asked)).json()
    assert told["token_strs"] == [vocab.id_to_token(token) for token in told["tokens"]]
    assert (await one.client.post("/tokenize", json={"prompt": "hi"})).json()["token_strs"] is None
    plain = await ids(prompt="hi there", add_special_tokens=False)
    assert await ids(prompt="hi there") == [2, *plain]
    sent = await ids(messages=messages)
    bare = await ids(messages=messages, add_generation_prompt=False)
    assert sent[: len(bare)] == bare
    assert len(sent) > len(bare)
    assert await ids(messages=messages, add_special_tokens=False) == sent[1:]
    refused = await one.client.post("/tokenize", json={"prompt": "a", "add_generation_prompt": True})
    assert refused.json()["error"]["param"] == "add_generation_prompt"
