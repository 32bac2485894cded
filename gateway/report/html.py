"""Pieces of a page. Every word that is put into one is escaped here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from gateway.report.svg import Frame


def paragraph(words: str, kind: str = "") -> str:
    """One paragraph."""
    classes = f' class="{kind}"' if kind else ""
    return f"<p{classes}>{escape(words)}</p>"


def heading(words: str) -> str:
    """A section's."""
    return f"<h2>{escape(words)}</h2>"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str, long: Sequence[int] = ()) -> str:
    """A table whose first column names each row; columns in ``long`` may wrap, the others hold figures."""

    def cell(tag: str, index: int, words: str) -> str:
        kind = "long" if index in long else "" if index == 0 else "n"
        scope = ' scope="row"' if tag == "th" and index == 0 else ""
        return f"<{tag}{scope}{f' class={kind!r}' if kind else ''}>{escape(words)}</{tag}>"

    head = "".join(
        f'<th scope="col"{"" if i == 0 or i in long else " class=n"}>{escape(name)}</th>'
        for i, name in enumerate(columns)
    )
    body = "".join(
        "<tr>" + "".join(cell("th" if i == 0 else "td", i, words) for i, words in enumerate(row)) + "</tr>"
        for row in rows
    )
    # it may be wider than a telephone: then it scrolls, by keyboard too
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def plot(frames: tuple[Frame, Frame], draw: Callable[[Frame], str], caption: str, figures: str) -> str:
    """A plot for a wide window and one for a narrow one, what it shows, and the same figures as a table."""
    drawn = "".join(draw(frame) for frame in frames)
    return (
        f"<figure>{drawn}<figcaption>{escape(caption)}</figcaption></figure>"
        f"<details><summary>The figures as a table</summary>{figures}</details>"
    )


def facts(entries: Sequence[tuple[str, str, str]]) -> str:
    """Name, figure, and a word about it."""
    parts = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(figure)}<small>{escape(more)}</small></dd></div>"
        for name, figure, more in entries
    )
    return f'<dl class="keys">{"".join(parts)}</dl>'


def listed(sentences: Sequence[str]) -> str:
    """Sentences under one another."""
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"
