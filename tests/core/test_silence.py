"""Who counts as silent, and what starts the counting anew."""

import pytest

from tangram.scheduler.silence import Silence


@pytest.fixture
def silence() -> Silence[str]:
    return Silence(10.0, 0.0)


def test_who_says_nothing_for_the_limit_is_silent(silence: Silence[str]) -> None:
    assert silence.silent(["a", "b"], 1.0) == []
    silence.heard("a", 9.0)
    assert silence.silent(["a", "b"], 11.0) == []
    assert silence.silent(["a", "b"], 11.1) == ["b"]
    assert silence.silent(["a", "b"], 19.1) == ["a", "b"]


def test_who_is_not_watched_is_forgotten_and_starts_anew(silence: Silence[str]) -> None:
    silence.silent(["a"], 1.0)
    silence.silent([], 2.0)
    assert silence.silent(["a"], 20.0) == []


def test_a_word_before_one_is_watched_counts(silence: Silence[str]) -> None:
    silence.heard("a", 5.0)
    assert silence.silent(["a"], 14.0) == []
    assert silence.silent(["a"], 15.5) == ["a"]


def test_after_an_outage_all_start_anew(silence: Silence[str]) -> None:
    silence.silent(["a"], 1.0)
    silence.forget()
    assert silence.silent(["a"], 30.0) == []


def test_it_is_asked_once_a_second(silence: Silence[str]) -> None:
    assert [silence.due(now_s) for now_s in (0.5, 1.0, 1.5, 2.1)] == [False, True, False, True]


def test_who_was_stopped_itself_blames_nobody(silence: Silence[str]) -> None:
    silence.due(1.0)
    silence.silent(["a"], 1.0)
    assert silence.due(12.0)  # all that was said since is still unread
    assert silence.silent(["a"], 12.0) == []
