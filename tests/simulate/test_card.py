"""Cards are data with sources, and ops take by them what their operations and bytes take."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from delta_runtime.core.errors import UsageError
from delta_runtime.core.step_graph import OpWork, StepGraph
from delta_runtime.simulate.card import (
    FAST,
    FOLDER,
    LIKELY,
    SLOW,
    Reach,
    load_card,
    names,
    on_card,
    op_seconds,
)
from tests.support.step_graphs import chain

MIB = 1024**2


def with_work(flops: list[float], moved_bytes: list[int], dtype: str = "float32") -> StepGraph:
    """Return a chain of which the first ops have this work, and the others none."""
    graph = chain([8 * MIB] * 6, [0.01] * 6)
    more = graph.n_ops - len(flops)
    work = OpWork(
        flops=np.array([*flops, *[0.0] * more]),
        moved_bytes=np.array([*moved_bytes, *[0] * more], np.int64),
        dtype=(dtype,) * graph.n_ops,
    )
    return replace(graph, work=work)


@pytest.mark.parametrize("name", names())
def test_each_card_names_its_sources(name: str) -> None:
    card = load_card(name)
    assert set(card.sources) == {"memory", "rates", "links", "usable_share", "launch_s"}
    assert "https://" in card.sources["rates"]
    assert 4 << 30 <= card.usable_bytes < card.memory_bytes
    assert card.bytes_per_s > card.in_bytes_per_s


def test_an_op_takes_what_takes_longest() -> None:
    card = load_card("rtx3090")
    ideal = Reach(flops=1.0, bytes=1.0, launch=1.0)
    graph = with_work([card.flops_per_s["float32"], 1.0, 0.0], [4, int(card.bytes_per_s), 4])
    assert op_seconds(graph, card, ideal)[:3].tolist() == pytest.approx([1.0, 1.0, card.launch_s])


def test_half_precision_has_its_own_rate_and_what_a_card_has_not_that_of_float32() -> None:
    card = load_card("t4")
    flops = [card.flops_per_s["float16"]]
    ideal = Reach(flops=1.0, bytes=1.0, launch=1.0)
    assert op_seconds(with_work(flops, [0], "float16"), card, ideal)[0] == pytest.approx(1.0)
    slow = card.flops_per_s["float16"] / card.flops_per_s["float32"]
    assert op_seconds(with_work(flops, [0], "bfloat16"), card, ideal)[0] == pytest.approx(slow)


def test_convolutions_in_float32_are_in_tf32() -> None:
    card = load_card("a100")
    graph = with_work([1e12, 1e12], [0, 0])
    graph = replace(graph, op_name=("aten::mm", "aten::convolution", *graph.op_name[2:]))
    by_product, by_convolution = op_seconds(graph, card)[:2]
    ratio = card.flops_per_s["tf32"] / card.flops_per_s["float32"]
    assert by_product / by_convolution == pytest.approx(ratio)


def test_what_is_likely_lies_between_fast_and_slow() -> None:
    card, graph = load_card("h100"), with_work([1e12, 1e6, 0], [1 << 20, 1 << 30, 0])
    likely = op_seconds(graph, card, LIKELY)
    assert (op_seconds(graph, card, FAST) < likely).all()
    assert (likely < op_seconds(graph, card, SLOW)).all()


def test_a_step_on_a_card_keeps_its_bytes_and_has_the_cards_lanes() -> None:
    card, graph = load_card("l4"), with_work([1e12], [0])
    there = on_card(graph, card)
    assert there.peak_bytes == graph.peak_bytes
    assert there.op_seconds.tolist() == op_seconds(graph, card).tolist()
    assert there.rerun_seconds.tolist() == there.op_seconds.tolist()
    assert there.recorded_on is not None
    assert there.recorded_on.in_bytes_per_s == card.in_bytes_per_s


def test_a_record_that_says_nothing_of_its_work_is_refused() -> None:
    with pytest.raises(UsageError, match="Record the step again"):
        on_card(chain([MIB] * 3, [0.1] * 3), load_card("t4"))


def test_an_unknown_card_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="rtx4090"):
        load_card("rtx9999")


@pytest.mark.parametrize(
    "change",
    [
        {"memory_bytes": 0},
        {"usable_share": 1.5},
        {"flops_per_s": {"bfloat16": 1e12}},
        {"flops_per_s": {"float32": float("nan")}},
        {"launch_s": "fast"},
        {"more": 1},
    ],
)
def test_a_file_of_ones_own_is_read_and_a_wrong_one_refused(tmp_path, change) -> None:
    told = json.loads((FOLDER / "t4.json").read_text())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**told, "title": "mine"}))
    assert load_card(str(path)).title == "mine"
    path.write_text(json.dumps({**told, **change}))
    with pytest.raises(UsageError, match="not a card"):
        load_card(str(path))


def test_what_was_measured_on_the_card_is_believed() -> None:
    """Of half the bytes: ops take twice the seconds that they took there, and workspaces twice the bytes."""
    card = load_card("rtx3090")
    whole = with_work([0.0] * 12, [2 << 30] * 12)
    half = with_work([0.0] * 12, [1 << 30] * 12)
    seen = np.linspace(0.1, 0.2, half.n_ops)
    half = replace(half, op_seconds=seen, op_watermark_bytes=half.op_watermark_bytes * 4)
    there = on_card(whole, card, measured=half)
    same_name = [name == whole.op_name[0] for name in whole.op_name]
    assert there.op_seconds[same_name].sum() == pytest.approx(2 * seen[same_name].sum())
    assert there.op_watermark_bytes.tolist() == (8 * whole.op_watermark_bytes).tolist()
    other = replace(half, op_name=("another", *half.op_name[1:]))
    assert on_card(whole, card, measured=other).op_watermark_bytes.tolist() == (
        whole.op_watermark_bytes.tolist()
    )
