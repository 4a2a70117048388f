from __future__ import annotations

import statistics

import pytest

from perf import workloads


@pytest.mark.parametrize("name", workloads.NAMES)
def test_repetitions_differ_in_ids_alone(name: str) -> None:
    first, again, other = (workloads.make(name, repetition) for repetition in (0, 0, 1))
    assert first == again
    assert [(len(s.prompt), s.output_len, s.arrival) for s in first] == [
        (len(s.prompt), s.output_len, s.arrival) for s in other
    ]
    assert all(mine.prompt[:16] != its.prompt[:16] for mine, its in zip(first, other))


def test_sizes() -> None:
    (w1,) = workloads.make("W1")
    assert (len(w1.prompt), w1.output_len) == (128, 128)
    w2 = workloads.make("W2")
    assert len(w2) == 64
    # The published figures of other engines were measured on just these lengths.
    assert sum(len(spec.prompt) for spec in w2) == 10_524
    assert sum(spec.output_len for spec in w2) == 8_314
    (w4,) = workloads.make("W4")
    assert (len(w4.prompt), w4.output_len) == (4096, 16)
    assert workloads.longest(["W1", "W4"]) == 4112


def test_w3_shares_exactly_its_prefix() -> None:
    specs = workloads.make("W3")
    assert len(specs) == 32
    assert len({spec.prompt[:512] for spec in specs}) == 1
    assert len({spec.prompt[512:] for spec in specs}) == 32
    assert {(len(spec.prompt), spec.output_len) for spec in specs} == {(528, 32)}


def test_w5_has_the_lengths_of_w2_at_random_times() -> None:
    specs, w2 = workloads.make("W5"), workloads.make("W2")
    assert [len(spec.prompt) for spec in specs] == [len(spec.prompt) for spec in w2[:30]]
    arrivals = [spec.arrival for spec in specs]
    assert arrivals == sorted(arrivals) and arrivals[0] > 0
    rate = 2000 / workloads.poisson_arrivals(2000, rate=2.0)[-1]
    assert rate == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize(
    ("distributions", "means"), [(workloads.SHAREGPT, (161, 338)), (workloads.ALPACA, (19, 58))]
)
def test_log_normal_lengths_have_their_means(
    distributions: tuple[workloads.LogNormal, workloads.LogNormal], means: tuple[int, int]
) -> None:
    lengths = workloads.log_normal_lengths(distributions, 5000)
    for place, mean in enumerate(means):
        drawn = [pair[place] for pair in lengths]
        assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.08)
        assert statistics.median(drawn) < mean  # a long tail to the right
        assert min(drawn) >= 4 and max(drawn) <= 2048


def test_ids_stay_within_a_small_vocabulary() -> None:
    ids = [token for spec in workloads.make("W2", vocab_size=300) for token in spec.prompt]
    assert min(ids) >= 100 and max(ids) < 300
    assert all(token < 40 for spec in workloads.make("W1", vocab_size=40) for token in spec.prompt)
