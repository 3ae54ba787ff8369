from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from report.html.browser import Opened, chromium, open_page

Open = Callable[..., Opened]


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def show(browser: Any) -> Iterator[Open]:
    """Opens a file; at the end of the test checks that the page was quiet and kept to itself."""
    shown: list[tuple[Path, Opened]] = []

    def opening(path: Path, **options: Any) -> Opened:
        opened = open_page(browser, path, **options)
        shown.append((path, opened))
        return opened

    yield opening
    for path, opened in shown:
        assert opened.said == []
        assert opened.asked == [path.as_uri()]
        opened.page.context.close()
