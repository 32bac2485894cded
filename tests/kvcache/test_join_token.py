import pytest

from kvcache.join_token import JoinToken


def test_a_token_is_one_word_that_says_all_again() -> None:
    token = JoinToken.fresh("east", b"r" * 32)
    assert str(token).isascii()
    assert " " not in str(token)
    assert JoinToken.parse(str(token)) == token


def test_two_tokens_differ_and_neither_shows_its_secret() -> None:
    one, other = JoinToken.fresh("east"), JoinToken.fresh("east")
    assert one.digest != other.digest
    assert repr(one) == "JoinToken(cluster='east')"


@pytest.mark.parametrize("cut", [0, 5, 13, 40])
def test_a_token_cut_short_is_refused_without_repeating_it(cut: int) -> None:
    text = str(JoinToken.fresh("east"))[:cut]
    with pytest.raises(ValueError, match=r"\Anot a join token, or cut short\Z"):
        JoinToken.parse(text)


@pytest.mark.parametrize("text", ["secret", "prfaas-join.!!!!", "prfaas-join." + "A" * 600, "prfaas-join.kKFhoKE"])
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a join token"):
        JoinToken.parse(text)
