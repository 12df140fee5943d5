"""Cache of a method's results."""

from __future__ import annotations

from meshwright.planner.cost.cached import cached_method


class Counter:
    """Counter of the calls of a cached method."""

    def __init__(self) -> None:
        self.calls = 0

    @cached_method
    def add(self, first: int, second: int) -> list[int]:
        """Return the sum in a list, so that a repeated result can be recognised."""
        self.calls += 1
        return [first + second]


def test_cached_method_computes_each_result_once_for_an_object():
    one, other = Counter(), Counter()
    assert one.add(1, 2) == [3] and one.add(1, 2) is one.add(1, 2)
    assert one.add(2, 1) is not one.add(1, 2) and one.calls == 2
    assert other.add(1, 2) is not one.add(1, 2) and other.calls == 1
