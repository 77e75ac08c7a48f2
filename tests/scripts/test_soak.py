"""A short soak is right, and leaves no thread and no file open; and what rises is not flat."""

from __future__ import annotations

import dataclasses

import pytest

from scripts.stress_soak import BOUNDS, Point, slopes, soak
from tests.support.fixtures import one_thread  # noqa: F401


@pytest.mark.filterwarnings("ignore")
def test_a_short_soak_is_right_and_leaves_nothing_open(tmp_path) -> None:
    out = tmp_path / "points.jsonl"
    points = soak(200, 0, 0.6, 0, out)
    assert len(points) == 40 == len(out.read_text().splitlines())
    assert all(point.right for point in points)
    rising = {each.name for each in slopes(points) if not each.is_flat}
    assert not rising & {"threads", "files"}  # the others need more steps to settle


@pytest.mark.parametrize("name", BOUNDS)
def test_what_rises_is_not_flat(name: str) -> None:
    still = Point(0, *[1000] * 7, 1.1, True)
    assert all(
        each.is_flat for each in slopes([dataclasses.replace(still, steps=k) for k in range(1, 41)])
    )
    rising = [
        dataclasses.replace(
            still, steps=k, **{name: getattr(still, name) + (BOUNDS[name] + 1) * k / 10}
        )
        for k in range(1, 41)
    ]
    assert [each.name for each in slopes(rising) if not each.is_flat] == [name]
