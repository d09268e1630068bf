"""A verification as one self-contained HTML page."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from polyamp._errors import PolyampError
from polyamp.verify.report import HEADERS, heading, result, summary

if TYPE_CHECKING:
    from polyamp.testing._conformance import Row
    from polyamp.verify.runner import Verification

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid #8884; padding: .2em .6em; text-align: left }
td.steps { text-align: right; font-variant-numeric: tabular-nums }
.differs td { background: #c002; font-weight: 600 }
.verdict { font-size: 1.2em; font-weight: 600 }
:root { color-scheme: light dark }
"""


def check(file: str) -> None:
    """Refuse a `file` that cannot be written, before anything is run.

    Raises:
        PolyampError: the folder is missing, or it or the file is not writable.
    """
    place = os.path.realpath(file)
    folder, why = os.path.dirname(place), ""
    if os.path.isdir(place):
        why = "it is a folder"
    elif not os.path.isdir(folder):
        why = f"there is no folder {folder}"
    elif not os.access(place if os.path.exists(place) else folder, os.W_OK):
        why = "permission denied"
    if why:
        raise PolyampError(f"cannot write --html {file}: {why}")


def write(file: str, found: Verification) -> None:
    """Write the page to `file`."""
    Path(file).write_text(page(found), encoding="utf-8")


def page(found: Verification) -> str:
    """The page: machine, versions, verdict, and every row, those that differ first."""
    rows = sorted(found.rows, key=lambda row: row.ok)
    head = "".join(f"<th>{name}</th>" for name in HEADERS)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>polyamp verify</title><style>{_STYLE}</style></head><body>\n"
        "<h1>polyamp verify</h1>\n"
        f'<p class="verdict">{escape(summary(found))}</p>\n<p>{escape(heading(found))}</p>\n'
        f"<p>Random traces of {found.plan.steps:,} steps, seed {found.plan.seed}.</p>\n"
        f"<table><thead><tr>{head}</tr></thead><tbody>\n"
        + "\n".join(_row(row) for row in rows)
        + "\n</tbody></table></body></html>\n"
    )


def _row(row: Row) -> str:
    texts = (row.backend, row.device, row.mode, row.check, row.rule)
    cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
    kind = "same" if row.ok else "differs"
    return (
        f'<tr class="{kind}">{cells}<td class="steps">{row.steps:,}</td>'
        f"<td>{escape(result(row))}</td></tr>"
    )
