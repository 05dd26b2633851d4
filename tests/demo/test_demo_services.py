"""The demo's jobs that search and are scored: what is drawn, who finds what, and a small run of both on real parts."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the gpu extra is not installed")

from tangram.demo import corpus, deepsearch, mopd
from tangram.demo.limits import Bucket, Window
from tangram.demo.search import Index
from tests.e2e.test_cli import tangram


def test_a_page_is_found_by_its_words_and_what_is_skipped_is_not() -> None:
    index = Index()
    assert len(corpus.PAGES) > 40
    for title, text in corpus.PAGES.items():
        assert index.best(f"{title} {text}") == title
    assert index.best("Tides Moon", skip="['Tides']") != "Tides"


def test_the_same_seed_draws_the_same_jobs() -> None:
    assert deepsearch.draw(20, 7) == deepsearch.draw(20, 7) != deepsearch.draw(20, 8)
    assert mopd.draw(5, 7) == mopd.draw(5, 7)


def test_how_a_provider_counts() -> None:
    bucket = Bucket(rate=10, burst=2)
    assert [bucket.takes(at_s) for at_s in (5.0, 5.0, 5.0, 5.125, 5.125)] == [True, True, False, True, False]
    assert bucket.wait_s(5.125) == pytest.approx(0.075)
    window = Window(rate=2)
    assert [window.takes(at_s) for at_s in (5.0, 5.9, 5.99, 6.0, 6.5)] == [True, True, False, True, False]


async def test_a_limiter_in_each_worker_beside_one_for_all(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = await tangram("demo", "--workload", "deepsearch", "--trajectories", "3", "--json", "--timeline", str(page))
    assert done.returncode == 0, done.stderr
    policies = json.loads(done.stdout)["policies"]
    assert list(policies) == ["per-worker", "tangram"]
    assert {row["wrong"] for row in policies.values()} == {0}
    assert page.stat().st_size > 10_000
