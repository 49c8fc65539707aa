"""Every command of the first page, of deployment and of how it is built; see typing_in.py."""

from pathlib import Path

import pytest

from tests.pages.typing_in import OTHERS, type_all

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("pages", OTHERS, ids=lambda pages: pages[0])
def test_commands_of_a_page(pages: list[str], copy: Path, environment: dict[str, str]) -> None:
    type_all(pages, copy, environment)
