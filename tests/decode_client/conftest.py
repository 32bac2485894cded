import pytest

from tests.pair import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
