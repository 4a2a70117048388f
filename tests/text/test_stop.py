from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trident_llm.text.stop import StopMatcher, StopResult


def feed(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], str | None]:
    """Push pieces until one matches; return the emitted texts and the match."""
    emitted = []
    for piece in pieces:
        result = matcher.push(piece)
        emitted.append(result.text)
        if result.stop is not None:
            return emitted, result.stop
    return [*emitted, matcher.flush()], None


def test_start_of_a_stop_string_is_not_streamed() -> None:
    emitted, stop = feed(StopMatcher(["DEFGHIJ"]), ["DEF", "G", "HI", "J"])
    assert emitted == ["", "", "", ""]
    assert stop == "DEFGHIJ"


def test_match_inside_tokens_cuts_at_its_first_character() -> None:
    emitted, stop = feed(StopMatcher(["lo w"]), [" hello", " world"])
    assert "".join(emitted) == " hel"
    assert stop == "lo w"


def test_text_held_back_for_nothing_is_emitted_as_soon_as_it_cannot_match() -> None:
    emitted, stop = feed(StopMatcher(["aab"]), ["a", "a", "a", "c"])
    assert emitted == ["", "", "a", "aac", ""]
    assert stop is None


def test_held_text_comes_at_flush() -> None:
    assert feed(StopMatcher(["\n\nUser:"]), ["done.", "\n\nUs"]) == (["done.", "", "\n\nUs"], None)


def test_earliest_position_wins() -> None:
    assert StopMatcher(["abcd", "bc"]).push("xabcd") == StopResult("x", "abcd")
    assert StopMatcher(["abcd", "bc"]).push("abc") == StopResult("a", "bc")


def test_ties_go_to_the_longest() -> None:
    assert StopMatcher(["ab", "abc"]).push("xabcx") == StopResult("x", "abc")
    assert StopMatcher(["\n", "\n\n"]).push("x\n\n") == StopResult("x", "\n\n")


def test_complete_stop_string_does_not_wait_for_a_longer_one() -> None:
    emitted, stop = feed(StopMatcher(["abcd", "bc"]), ["a", "b", "c", "d"])
    assert (emitted, stop) == (["", "", "a"], "bc")


def test_include_stop_str_keeps_it_and_drops_what_follows() -> None:
    assert StopMatcher(["lo"], include_stop_str=True).push("hello world") == StopResult(
        "hello", "lo"
    )
    emitted, stop = feed(StopMatcher(["END"], include_stop_str=True), ["xE", "N", "D!"])
    assert (emitted, stop) == (["x", "", "END"], "END")


def test_skipped_text_is_no_part_of_a_match() -> None:
    matcher = StopMatcher(["END", "e"])
    assert matcher.skip("see the EN") == "see the EN"
    assert matcher.push("D") == StopResult("D")
    assert matcher.push("xe") == StopResult("x", "e")


def test_without_stop_strings_all_text_passes() -> None:
    assert feed(StopMatcher([]), ["a", "b"]) == (["a", "b", ""], None)


def test_empty_stop_string_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        StopMatcher(["a", ""])


def test_text_after_a_match_is_our_bug() -> None:
    matcher = StopMatcher(["a"])
    matcher.push("a")
    with pytest.raises(AssertionError):
        matcher.push("b")


def slow_search(stop: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """The rules word by word, in quadratic time: emitted text after each piece, and the match."""
    emitted, text = [], ""
    for piece in pieces:
        text += piece
        found = [(text.find(string), -len(string), string) for string in stop if string in text]
        if found:
            start, _, match = min(found)
            emitted.append(text[:start])
            return emitted, match
        held = max(
            n
            for n in range(len(text) + 1)
            if any(s.startswith(text[len(text) - n :]) for s in stop)
        )
        emitted.append(text[: len(text) - held])
    return emitted, None


letters = st.text("ab", min_size=1, max_size=5)


@given(st.lists(letters, min_size=1, max_size=4), st.lists(st.text("abc", max_size=6), max_size=8))
def test_equals_a_search_of_the_whole_text(stop: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stop)
    expected, expected_match = slow_search(stop, pieces)
    shown = ""
    for i, text in enumerate(expected):
        result = matcher.push(pieces[i])
        shown += result.text
        assert shown == text
    if expected:
        assert result.stop == expected_match
    if expected_match is None:
        assert shown + matcher.flush() == "".join(pieces)


def test_time_is_linear_in_a_hostile_text() -> None:
    matcher = StopMatcher(["a" * 5000 + "b", "a" * 4999 + "c"])
    begin = time.process_time()
    for _ in range(1000):
        matcher.push("a" * 100)
    assert time.process_time() - begin < 2  # a search from scratch per push takes minutes


def test_a_copy_goes_on_by_itself() -> None:
    matcher = StopMatcher(["abc", "bd"])
    assert matcher.push("xa").text == "x"
    other = matcher.fork()
    assert other.push("bc").stop == "abc"
    assert matcher.push("b").text == ""
    assert matcher.fork().push("d") == StopResult("a", "bd")
    assert matcher.push("e").text == "abe"
