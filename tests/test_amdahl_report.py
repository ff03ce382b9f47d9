"""The Amdahl report from made-up times: ratios against known answers, one whole page, a table that is read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from amdahl_cases import made_up, some_rows
from html_pages import Page, needs_nothing_else

from scripts.amdahl_cells import PARTS, Labels
from scripts.amdahl_html import markdown, page, picture
from scripts.amdahl_stats import not_measured, ratio, rows_of
from scripts.amdahl_store import Store, read_rows
from scripts.amdahl_tables import closing_lines, missed, title, verdict
from trainer.schema import compose_config
from trainer.timing import PHASES

PANELS = ("summary", "prediction", "worth", "map", "phases", "figures", "clock", "origin")
ORIGIN = {"gpu": "a GPU", "commit": "abc", "date": "2026-11-29", "command": "python scripts/amdahl.py"}


def test_a_ratio_of_paired_times_is_exact_whatever_slowed_the_rounds_down():
    b = np.exp(np.random.default_rng(0).standard_normal(12))
    assert ratio(2 * b, b) == pytest.approx((2.0, 2.0, 2.0))


def test_the_interval_holds_the_true_ratio_about_nineteen_times_of_twenty():
    random = np.random.default_rng(5)
    held = 0
    for _ in range(200):
        shared = np.exp(0.5 * random.standard_normal(30))
        a, b = (factor * shared * np.exp(0.05 * random.standard_normal(30)) for factor in (1.1, 1.0))
        found = ratio(a, b)
        held += found.low <= 1.1 <= found.high
        assert found.low <= found.value <= found.high
    assert held >= 180, "a binomial of 200 and 0.95 is below 180 once in 500 times, with too small an interval always"


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("parts", [["credit"], ["update"], ["collect", "update"]])
def test_where_only_the_parts_differ_the_prediction_is_the_measured_ratio(parts: list[str], noise: float):
    slow, fast = rows_of(made_up(parts, noise=noise))
    phases = {name for part in parts for name in PARTS[part]}
    times = {**dict.fromkeys(PHASES, 1.0), "credit": 2.0, "update": 8.0}
    part = sum(times[name] for name in phases)
    whole = sum(times.values())
    assert slow.measured == pytest.approx((whole + 3 * part) / whole)
    assert slow.share == pytest.approx(4 * part / (whole + 3 * part))
    assert slow.speedup == pytest.approx(4.0)
    assert slow.predicted == pytest.approx(slow.measured)
    assert slow.rest == pytest.approx(1.0)
    assert slow.error == pytest.approx(0.0, abs=1e-9)
    assert (slow.rounds, slow.closure) == (9, pytest.approx(1.0))
    assert slow.named == pytest.approx(1 - 1 / (whole + 3 * part))
    assert slow.clock_share == pytest.approx(1 / 500)
    assert not slow.is_noise and slow.is_pair and not fast.is_pair


def test_the_mean_of_a_turn_is_one_round():
    measured = made_up(rounds=3)
    for rounds in measured.samples.values():
        rounds[0] += rounds.pop(1)
    slow, _ = rows_of(measured)
    assert slow.rounds == 2
    assert slow.measured == pytest.approx(rows_of(made_up())[0].measured)


def test_a_cells_name_has_the_passes_of_its_own_algorithm():
    config = compose_config(["algo=impala", "env=CartPole", "impala.update_epochs=3", "impala.num_minibatches=2"])
    assert title(Labels.of("loss", config)).endswith("64-64, impala 3x2, loss")


def test_verdicts_and_closing_lines_say_what_is_noise_what_was_missed_and_what_is_missing():
    rows = some_rows()
    assert [verdict(row) for row in rows if row.is_pair] == [f"{rows[0].measured - 1:+.1%}", "within noise"]
    assert missed(rows) == []
    text = "\n".join(closing_lines(rows))
    assert "prediction: 2 of 2 pairs within 3% (100%)" in text
    assert "of the pairs whose interval is as narrow as that, 1 of 1 pairs within 3% (100%)" in text
    assert "noise: 1 of 2 pairs" in text
    assert "stand at 1.000x (median of 2 pairs), 1.000x to 1.000x" in text
    assert "an empty one is 0.20% of the update (median of 4 runs), at most 0.20%" in text
    assert "clock on by clock off: +0.40%" in text
    assert "costs +0.10%, at most +0.10%" in text and "in 1 of 1 no more than 1%" in text
    assert "not measured: <b>& envpool 8x8" in text and "400 of 400 s were spent" in text
    wrong = [replace(row, low=0.96, predicted=row.measured * 1.05) for row in rows if row.is_pair]
    assert missed(wrong) == wrong
    assert "0 of 2 pairs within 3% (0%)" in closing_lines(wrong)[0]
    assert closing_lines(wrong)[0].endswith("as narrow as that, 0 of 0 pairs within 3%")


def test_the_page_has_every_panel_needs_nothing_else_and_shows_names_as_text():
    html = page(some_rows(), ORIGIN)
    parsed = Page(html)
    assert parsed.open == []
    assert tuple(parsed.texts)[1:] == PANELS
    assert all(any(parsed.texts[panel]) for panel in PANELS)
    assert needs_nothing_else(html)
    assert "<b>" not in html.split("<body>")[1] and "<b>&" in " ".join(parsed.texts["summary"])
    assert html.count('class="diagonal"') == 2, "all pairs, and the small ones on a scale of their own"
    assert "1.010x within noise" in parsed.texts["map"]
    assert {"a GPU", "abc"} <= set(parsed.texts["origin"])
    assert {"+0.40%", "-1.00% to +1.00%", "4", "+0.10%", "-"} <= set(parsed.texts["clock"]), "a cell without control: -"


def test_the_picture_stands_alone_and_the_markdown_has_every_pair():
    rows = some_rows()
    drawing = ElementTree.fromstring(picture(rows, ORIGIN))
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    assert picture(rows, ORIGIN).count('class="mark"') == 3, "two pairs, and the key of their one baseline"
    without = picture([replace(row, compare="loss") for row in rows], ORIGIN)
    assert ElementTree.fromstring(without).tag == drawing.tag, "a table may have no credit cell"
    text = markdown(rows, ORIGIN)
    assert all(f"| {title(row)}: slow | fast | 9 |" in text for row in rows if row.is_pair)
    assert "not measured: <b>&" in text and "a GPU" in text


def test_a_prediction_that_is_off_is_explained_by_its_phases_or_by_the_noise():
    slow, fast = rows_of(made_up(log=1.5))
    off = replace(slow, predicted=1.1 * slow.measured, rest=1.25, log_ms=9.0, other_ms=1.0001)
    text = " ".join(Page(page([off, fast], ORIGIN)).texts["prediction"])
    assert "slow: +10.0%. Phases outside the part stand at 1.250x." in text
    assert "longer than in fast: credit +6.00, log +7.50." in text
    noisy = replace(off, high=2 * off.measured)
    assert "too noisy to tell" in " ".join(Page(page([noisy, fast], ORIGIN)).texts["prediction"])


def test_a_page_without_a_single_pair_still_says_why():
    rows = [row for row in some_rows() if not row.rounds]
    assert "400 of 400 s were spent" in " ".join(Page(page(rows, ORIGIN)).texts["summary"])


def test_a_table_that_was_written_is_read_back_as_it_was(tmp_path: Path):
    rows = sorted(some_rows(), key=lambda row: row.labels)
    Store(tmp_path / "amdahl.csv", ORIGIN).add(rows)
    found, origin = read_rows(tmp_path / "amdahl.csv")
    assert origin == ORIGIN
    assert [repr(row) for row in found] == [repr(row) for row in rows]
    assert page(found, origin) == page(rows, ORIGIN)


def test_the_newest_rows_of_a_cell_count_of_this_commit_on_this_machine_alone(tmp_path: Path):
    pair = some_rows()[:2]
    path = tmp_path / "amdahl.csv"
    missing = replace(not_measured(made_up().cell, "interrupted"), env="Ant")
    for origin, rows in (
        ({**ORIGIN, "commit": "older"}, [replace(row, env="Pendulum") for row in pair]),
        (ORIGIN, [replace(row, measured=9.0) for row in pair]),
        (ORIGIN, [missing]),
        ({**ORIGIN, "gpu": "another"}, [replace(row, env="Pendulum") for row in pair]),
        ({**ORIGIN, "date": "2026-11-30", "command": "another"}, pair),
        (ORIGIN, [replace(row, env="Ant") for row in pair]),
        (ORIGIN, [replace(missing, env="Hopper")]),
    ):
        Store(path, origin).add(rows)
    found, origin = read_rows(path)
    assert [(row.env, row.measured, row.note) for row in found if row.variant != "fast"] == [
        ("Ant", pair[0].measured, ""),
        ("CartPole", pair[0].measured, ""),
        ("Hopper", pytest.approx(np.nan, nan_ok=True), "interrupted"),
    ]
    assert origin["command"] == "python scripts/amdahl.py; another"
    assert {labels.env for labels in Store(path, {**ORIGIN, "date": "today"}).measured()} == {"Ant", "CartPole"}
    assert Store(path, {**ORIGIN, "commit": "new"}).measured() == set()
