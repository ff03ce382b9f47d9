"""The page of all keys: complete, and what the code says now."""

from __future__ import annotations

from scripts.config_reference import PAGE, meanings, page
from trainer.keys import KEYS


def test_every_key_says_what_it_means():
    said = meanings()
    assert said.keys() == KEYS.keys()
    assert [key for key, meaning in said.items() if not meaning] == []


def test_the_page_is_what_the_script_writes():
    assert PAGE.read_text() == page(), "run python scripts/config_reference.py"
