"""Tokenizers, chat templates, and stop strings found as tokens arrive."""

import json
import logging
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.errors import CheckpointError, RequestError
from engine.text import UNDECODED, StopMatch, StopMatcher, Tokenizer
from tests.helpers.checkpoints import BOS, MASK, write_tokenizer

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "target"
REAL = Path(os.environ.get("DSPARK_TEST_TOKENIZER", DEMO))
"""A tokenizer that someone trained: any checkpoint folder."""

HELLO = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


# ---- tokenizer ------------------------------------------------------------------------------


def test_encode_and_decode(tiny: Tokenizer) -> None:
    ids = tiny.encode("the cat sat on a mat")
    assert ids[0] == BOS
    assert tiny.encode("the cat sat on a mat", add_special_tokens=False) == ids[1:]
    assert tiny.decode(ids) == "the cat sat on a mat"
    assert tiny.decode(tiny.encode("a , b . c 's")) == "a , b . c 's"  # no clean-up of spaces
    assert (tiny.vocab_size, tiny.eos_token_id) == (128, 1)
    assert tiny.decode([]) == ""


def test_special_and_unknown_ids_are_silent(tiny: Tokenizer) -> None:
    a = tiny.encode("a", add_special_tokens=False)
    assert tiny.decode([BOS, MASK, *a, 1, 127 + 50]) == "a"
    assert [tiny.is_silent(t) for t in (BOS, MASK, 1, 200, a[0])] == [True, True, True, True, False]


def test_a_chat_has_at_most_one_bos(tiny: Tokenizer) -> None:
    text = tiny.render_chat(HELLO)
    assert text == "<s>user: the cat\nassistant:"
    assert tiny.encode_chat(HELLO).count(BOS) == 1
    assert tiny.encode(text).count(BOS) == 2  # what encoding the text as a prompt would do


def test_template_arguments_and_a_template_of_ones_own(tiny: Tokenizer) -> None:
    template = "{% if think %}T {% endif %}{{ messages[0]['content'] }}"
    assert tiny.render_chat(HELLO, {"think": True}, template) == "T the cat"
    assert tiny.encode_chat(HELLO, None, template) == tiny.encode("the cat", False)


@pytest.mark.parametrize(
    ("messages", "template", "kind", "message"),
    [
        (HELLO, "{{ raise_exception('roles must alternate') }}", "schema", "roles must alternate"),
        (HELLO, "{% if", "schema", "the chat template rejects"),
        ([{"role": "user"}], "{{ messages[0]['content'] + 'x' }}", "schema", "rejects"),
    ],
)
def test_messages_a_template_rejects_are_that_rows_error(
    tiny: Tokenizer, messages: list[dict[str, Any]], template: str, kind: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as error:
        tiny.encode_chat(messages, None, template)
    assert error.value.kind == kind
    assert error.value.hint


def test_template_arguments_that_rendering_sets_itself_are_named(tiny: Tokenizer) -> None:
    # was: got multiple values for keyword argument 'tokenize'
    with pytest.raises(RequestError, match="may not be named chat_template, tokenize") as info:
        tiny.render_chat(HELLO, {"tokenize": True, "think": True, "chat_template": "x"})
    assert info.value.kind == "schema"
    assert "multiple values" not in str(info.value)


def test_a_prompt_over_the_tokenizers_own_limit_warns_nobody(tmp_path: Path) -> None:
    # transformers wrote "Token indices sequence length is longer than ..." into the progress
    folder = write_tokenizer(tmp_path)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_max_length": 8}))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("transformers")
    log.addHandler(handler)
    try:
        assert len(Tokenizer.load(folder).encode("the cat " * 50)) > 50
        assert not any("longer than" in text for text in said)
        AutoTokenizer.from_pretrained(folder)("the cat " * 50)
        assert any("longer than" in text for text in said), "transformers by itself says it"
    finally:
        log.removeHandler(handler)


def test_messages_without_a_template_are_that_rows_error(tmp_path: Path) -> None:
    plain = Tokenizer.load(write_tokenizer(tmp_path, chat_template=None))
    assert not plain.has_chat_template
    with pytest.raises(RequestError, match="no chat template") as error:
        plain.encode_chat(HELLO)
    assert (error.value.kind, bool(error.value.hint)) == ("unsupported", True)


def test_text_that_is_not_unicode_is_that_rows_error(tiny: Tokenizer) -> None:
    with pytest.raises(RequestError, match="cannot be tokenised") as error:
        tiny.encode("a\ud800b")
    assert (error.value.kind, bool(error.value.hint)) == ("schema", True)


def test_fingerprint_tells_vocabularies_and_templates_apart(tmp_path: Path) -> None:
    made = [
        write_tokenizer(tmp_path / "a"),
        write_tokenizer(tmp_path / "b"),
        write_tokenizer(tmp_path / "c", 120),
        write_tokenizer(tmp_path / "d", chat_template="{{ 1 }}"),
    ]
    a, b, c, d = (Tokenizer.load(folder).fingerprint() for folder in made)
    assert a == b
    assert len({a, c, d}) == 3


@pytest.mark.parametrize(
    ("files", "message"),
    [({}, "holds no tokenizer"), ({"tokenizer.json": "{"}, "cannot read the tokenizer in")],
)
def test_a_folder_without_a_usable_tokenizer(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=message) as error:
        Tokenizer.load(tmp_path)
    assert error.value.hint


# ---- tokenizers of every kind of decoder ----------------------------------------------------

PIECES = [" ", "a", "b", "c", "ab", " a", " b", "bc", "\n", "é", "日", "STOP", " STOP"]


def _wrap(backend: Backend) -> Tokenizer:
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen: characters span tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merged = [split.pre_tokenize_str(p)[0][0] for p in PIECES]
    vocabulary = {t: i for i, t in enumerate(dict.fromkeys([*alphabet, *merged]))}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    return _wrap(backend)


def _sentencepiece_vocabulary() -> list[str]:
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    return ["<unk>", *bytes_, *(p.replace(" ", "▁") for p in PIECES), "▁▁"]


def llama2() -> Tokenizer:
    """SentencePiece with byte fallback; one space is stripped off the whole text's start."""
    vocabulary = {t: i for i, t in enumerate(dict.fromkeys(_sentencepiece_vocabulary()))}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _wrap(backend)


def metaspace() -> Tokenizer:
    """SentencePiece unigram: every space of the first token is stripped."""
    pieces = [(p, -1.0) for p in dict.fromkeys(_sentencepiece_vocabulary()) if "<0x" not in p]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return _wrap(backend)


def word_piece() -> Tokenizer:
    """BERT: spaces between tokens, and clean-up inside the decoder."""
    words = [
        "[UNK]",
        "a",
        "b",
        "##a",
        "##b",
        "##c",
        "c",
        ".",
        ",",
        "STOP",
        "##STOP",
        "'",
        "s",
        "n't",
    ]
    backend = Backend(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    backend.decoder = decoders.WordPiece(cleanup=True)
    return _wrap(backend)


def suffix_bpe() -> Tokenizer:
    """BPE with end-of-word marks: the last token's space shows only with the next token."""
    pieces = ["a", "b", "c", "a</w>", "b</w>", "STOP</w>", "ST", "OP</w>"]
    backend = Backend(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], end_of_word_suffix="</w>")
    )
    backend.decoder = decoders.BPEDecoder("</w>")
    return _wrap(backend)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    made.__name__: cache(made) for made in (byte_level, llama2, metaspace, word_piece, suffix_bpe)
}


# ---- stop strings ---------------------------------------------------------------------------


def by_definition(
    tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str]
) -> tuple[int, StopMatch] | None:
    """Decode everything after every token; the first prefix whose text holds a stop string."""
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:n]).rstrip(UNDECODED)
        ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
        if ends:
            end, length, stop = min(ends)
            return n, StopMatch(stop, end + length)
    return None


def incrementally(
    tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str]
) -> tuple[int, StopMatch] | None:
    matcher = StopMatcher(tokenizer, stops)
    for n, token in enumerate(ids, 1):
        if (match := matcher.push(token)) is not None:
            return n, match
    return None


STOPS = st.lists(
    st.one_of(
        st.text("ab c\n.STOP", min_size=1, max_size=5),
        st.sampled_from(["STOP", "é", "日", "日a", " a b", "aaaaaaaa", "\n\n", "😀", "é日😀"]),
    ),
    max_size=4,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), stops=STOPS)
def test_stop_matches_are_those_of_the_whole_text(
    kind: str, data: st.DataObject, stops: list[str]
) -> None:
    tokenizer = KINDS[kind]()
    size = tokenizer.vocab_size
    # any ids at all: broken characters, special tokens, and ids beyond the vocabulary
    wild = st.integers(0, size + 1)
    spoken = st.sampled_from(tokenizer.encode("ab STOP é日😀 a b\n\nabc.", False) or [0])
    length = data.draw(st.integers(0, 150))
    token = st.one_of(spoken, spoken, spoken, wild)
    ids = data.draw(st.lists(token, min_size=length, max_size=length))
    text = tokenizer.decode(ids)
    if UNDECODED not in (late := text[3 * len(text) // 4 :][: data.draw(st.integers(0, 40))]):
        stops = [*stops, late] if late else stops  # a long one that is there, and far in
    expected = by_definition(tokenizer, ids, stops)
    assert incrementally(tokenizer, ids, stops) == expected
    if expected is not None:
        count, match = expected
        assert tokenizer.decode(ids[:count])[match.text_end :].startswith(match.stop)


@pytest.mark.skipif(not REAL.exists(), reason=f"{REAL} is not there")
@settings(max_examples=60, deadline=None)
@given(data=st.data(), stops=STOPS)
def test_stop_matches_of_a_real_tokenizer(data: st.DataObject, stops: list[str]) -> None:
    tokenizer = _real()
    texts = st.text("ab STOPé日😀\n.", max_size=30).map(lambda t: tokenizer.encode(t, False))
    wild = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=10)
    ids = [t for part in data.draw(st.lists(st.one_of(texts, wild), max_size=8)) for t in part]
    assert incrementally(tokenizer, ids, stops) == by_definition(tokenizer, ids, stops)


@cache
def _real() -> Tokenizer:
    return Tokenizer.load(REAL)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("ab STOP", ["STOP"], StopMatch("STOP", 3)),
        ("xabc", ["abc", "b"], StopMatch("b", 2)),  # b is complete first
        ("xab", ["ab", "b"], StopMatch("ab", 1)),  # both end together: the longest
        ("aaa", ["aa"], StopMatch("aa", 0)),
        ("a😀b", ["😀"], StopMatch("😀", 1)),
        ("abc", ["x"], None),
        ("abc", [], None),
    ],
)
def test_which_stop_string_counts(text: str, stops: list[str], expected: StopMatch | None) -> None:
    tokenizer = KINDS["byte_level"]()
    found = incrementally(tokenizer, tokenizer.encode(text, False), stops)
    assert (found and found[1]) == expected


def test_a_stop_string_in_the_middle_of_one_token_is_found() -> None:
    tokenizer = KINDS["byte_level"]()
    token = tokenizer.vocabulary()["ĠSTOP"]
    assert StopMatcher(tokenizer, ["TO"]).push(token) == StopMatch("TO", 2)


def test_a_stop_string_may_reach_back_over_many_tokens() -> None:
    tokenizer = KINDS["byte_level"]()
    stop = "ab c" * 60
    ids = tokenizer.encode("abc" * 50 + stop + "a", False)
    found = incrementally(tokenizer, ids, [stop])
    assert found == (len(ids) - 1, StopMatch(stop, 150))


@pytest.mark.parametrize("kind", KINDS)
def test_the_cost_of_a_token_does_not_grow_with_the_output(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = KINDS[kind]()
    decoded: list[int] = []
    real = tokenizer.decode
    monkeypatch.setattr(
        tokenizer, "decode", lambda ids: (decoded.append(len(ids)), real(ids))[1], raising=True
    )
    ids = tokenizer.encode("ab c a b", False) * 400
    assert incrementally(tokenizer, ids, ["never", "NEVER"]) is None
    assert max(decoded) < 50
    assert sum(decoded) / len(ids) < 60


def test_bytes_that_never_become_characters_stay_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = KINDS["llama2"]()
    longest = 0
    real = tokenizer.decode

    def count(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return real(ids)

    monkeypatch.setattr(tokenizer, "decode", count)
    junk = tokenizer.vocabulary()["<0xFF>"]
    assert incrementally(tokenizer, [junk] * 1000, ["STOP"]) is None
    assert longest <= 96
    tail = tokenizer.encode("STOP", False)
    assert incrementally(tokenizer, [junk] * 300 + tail, ["STOP"]) == by_definition(
        tokenizer, [junk] * 300 + tail, ["STOP"]
    )
