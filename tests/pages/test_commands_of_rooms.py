"""Every command of the rooms' own pages; see typing_in.py."""

from pathlib import Path

import pytest

from tests.pages.typing_in import ROOMS, type_all

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("pages", ROOMS, ids=lambda pages: pages[0])
def test_commands_of_a_page(pages: list[str], copy: Path, environment: dict[str, str]) -> None:
    type_all(pages, copy, environment)
