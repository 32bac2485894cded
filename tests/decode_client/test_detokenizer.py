import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from decode_client.detokenizer import Detokenizer, StopFinder, TokenText


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Byte-level: an emoji takes four tokens, so characters are split between tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    made.train_from_iterator(["hello world the cat sat"] * 3, trainer)
    return made


@pytest.fixture(scope="module")
def spaced() -> Tokenizer:
    """Strips the first space of what it decodes, as sentencepiece tokenisers do."""
    made = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2}, unk_token="c"))
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    return made


def test_text_comes_as_soon_as_it_is_certain_and_never_half_a_character(tokenizer):
    text = TokenText(tokenizer)
    parts = [text.step(i) for i in tokenizer.encode("a 😀!").ids]
    assert "".join(parts) == "a 😀!"
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
    assert "" in parts


def test_an_incomplete_character_at_the_end_is_shown_as_the_plain_decoder_shows_it(tokenizer):
    ids = tokenizer.encode("a 😀").ids[:-1]
    text = TokenText(tokenizer)
    shown = "".join(text.step(i) for i in ids) + text.flush()
    assert shown == tokenizer.decode(ids)
    assert text.flush() == ""


def test_the_prompt_before_it_keeps_the_first_tokens_leading_space(spaced):
    assert TokenText(spaced).step(1) == "b"
    assert TokenText(spaced, context=[0, 2]).step(1) == " b"


def test_special_tokens_have_no_text(tokenizer):
    eos = tokenizer.token_to_id("<eos>")
    text = TokenText(tokenizer)
    assert "".join(text.step(i) for i in [*tokenizer.encode("hi").ids, eos]) + text.flush() == "hi"


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_stop_string_is_found_however_the_text_is_cut(cut):
    finder, shown, met = StopFinder(["END!", "xyz"]), "", None
    text = "so it EN ENDS END! more"
    for at in range(0, len(text), cut):
        part, met = finder.feed(text[at : at + cut])
        shown += part
        if met:
            break
    assert (shown, met) == ("so it EN ENDS ", "END!")


def test_no_character_of_a_stop_string_is_ever_shown():
    finder = StopFinder(["ab", "abac"])
    assert finder.feed("a") == ("", None)
    assert finder.feed("b") == ("", "ab")


def test_held_text_is_shown_once_no_stop_string_can_follow():
    finder = StopFinder(["<stop>"])
    assert finder.feed("x <st") == ("x ", None)
    assert finder.feed("ill") == ("<still", None)
    assert finder.feed("<sto") == ("", None)
    assert finder.flush() == "<sto"


def test_the_earliest_stop_string_wins_and_the_longer_of_two_at_one_place():
    assert StopFinder(["b", "a"]).feed("xab") == ("x", "a")
    assert StopFinder(["a", "ab"]).feed("xab") == ("x", "ab")


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop"):
        StopFinder(["ok", ""])


def test_a_stop_string_that_only_the_flushed_bytes_complete_still_stops(tokenizer):
    ids = tokenizer.encode("hi 😀").ids[:-1]
    detokenizer = Detokenizer(tokenizer, [], stops=["\N{REPLACEMENT CHARACTER}"])
    shown = "".join(detokenizer.step(i).text for i in ids)
    end = detokenizer.finish()
    assert (shown + end.text, end.stop) == ("hi ", "\N{REPLACEMENT CHARACTER}")


def test_include_stop_shows_the_stop_string_and_nothing_after_it(tokenizer):
    shown, stop = "", None
    detokenizer = Detokenizer(tokenizer, [], stops=["the"], include_stop=True)
    for token_id in tokenizer.encode("hello the cat").ids:
        said = detokenizer.step(token_id)
        shown, stop = shown + said.text, said.stop
        if stop:
            break
    assert (shown, stop) == ("hello the", "the")


def test_finish_shows_what_was_held_back(tokenizer):
    detokenizer = Detokenizer(tokenizer, [], stops=["cats"])
    shown = "".join(detokenizer.step(i).text for i in tokenizer.encode("the cat").ids)
    assert shown == "the "
    assert detokenizer.finish().text == "cat"


@given(st.lists(st.integers(4, 299), max_size=12), st.lists(st.integers(0, 299), min_size=1, max_size=24))
def test_any_tokens_say_what_they_add_to_the_prompts_text(tokenizer, context, said):
    text = TokenText(tokenizer, context)
    shown = "".join(text.step(i) for i in said) + text.flush()
    before = tokenizer.decode(context)
    if not before.endswith("\N{REPLACEMENT CHARACTER}"):
        assert before + shown == tokenizer.decode(context + said)


def test_a_character_that_the_prompt_left_open_is_shown_once_and_whole(tokenizer):
    ids = tokenizer.encode("😀").ids
    text = TokenText(tokenizer, ids[:-1])
    assert text.step(ids[-1]) == "😀"


def test_bytes_that_the_prompt_left_open_are_not_said_again(tokenizer):
    ids = tokenizer.encode("😀").ids
    text = TokenText(tokenizer, ids[:-1])
    assert "".join(text.step(i) for i in tokenizer.encode("hat").ids) == "hat"
