"""Links between documents lead somewhere, and no document is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    broken = []
    for link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        known = target.is_file() and target.is_relative_to(ROOT) and (not anchor or anchor in anchors(target))
        if not known:
            broken.append(link)
    assert broken == []


def test_readme_leads_to_every_document() -> None:
    readme, *documents = PAGES
    linked = {link.partition("#")[0] for link in links(readme)}
    assert [page.name for page in documents if f"docs/{page.name}" not in linked] == []


def test_a_link_to_nowhere_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading: of `two` parts\n[one](other.md) [two](#a-heading-of-two-parts)\n```sh\n[no](link)\n```\n"
    )
    assert links(page) == ["other.md", "#a-heading-of-two-parts"]
    assert anchors(page) == {"a-heading-of-two-parts"}
