"""From which batch size the loop is sharded, given times; the measuring runs in tests/e2e."""

from engine.runner.loop_choice import _crossing, _sizes


def test_sizes_double_up_to_the_largest_batch() -> None:
    assert _sizes(1) == [1]
    assert _sizes(8) == [1, 2, 4, 8]
    assert _sizes(11) == [1, 2, 4, 8, 11]


def test_sharding_starts_where_it_stays_faster() -> None:
    assert _crossing([(1, 1.1, 1.0), (2, 0.9, 1.0), (4, 0.8, 1.0)]) == 2
    assert _crossing([(1, 0.9, 1.0), (2, 1.1, 1.0), (4, 0.8, 1.0)]) == 4, "a lucky small one"
    assert _crossing([(1, 0.5, 1.0), (2, 0.5, 1.0)]) == 1
    assert _crossing([(1, 0.5, 1.0), (2, 0.995, 1.0)]) is None, "a tie is no reason to change"
