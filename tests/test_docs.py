"""The pages agree with the code and with each other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.cli.settings import every_setting, markdown
from agentlightning.config import Config, load_config

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])


def test_the_configuration_reference_is_current() -> None:
    assert (ROOT / "docs/configuration.md").read_text() == markdown(), "run `make docs`"


def test_every_leaf_of_the_tree_is_documented() -> None:
    keys = [setting.key for setting in every_setting()]
    assert len(keys) == len(set(keys))
    assert {"trainer.loss.clip_low", "gateway.port", "run.root"} <= set(keys)
    assert set(Config.model_fields) == {key.partition(".")[0] for key in keys}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} points to {link}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in {title.lower().replace(" ", "-") for title in titles}


def test_readme_shows_commands_and_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", text, re.MULTILINE)) <= targets
    assert "not** Microsoft's" in text
    for path in re.findall(r"examples/[\w./]+\.\w+", text):
        assert (ROOT / path).exists()


@pytest.mark.parametrize("name", ["calculator", "no_example"])
def test_the_examples_configurations_are_valid(name: str) -> None:
    config = load_config(ROOT / f"examples/calculator/{name}.yaml")
    assert (ROOT / config.tasks.train).is_file()


def test_the_reading_order_lists_every_room() -> None:
    script = [sys.executable, str(ROOT / "scripts/reading_order.py")]
    table = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    listed = set(re.findall(r"`(agentlightning/\S+)`", table))
    package = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "agentlightning").rglob("*.py")
        if file.name not in ("__init__.py", "__main__.py")
    }
    assert package <= listed
