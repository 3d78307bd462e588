"""Long names in the text break between their words, so that a telephone shows them whole."""

from __future__ import annotations

import re
from typing import Any

SHORT = 24
"""Letters up to which a name does not break."""

_NAME = re.compile(rf'<(span class="pre|em)(">|>)([^<]{{{SHORT + 1},}})(?=</)')
_BETWEEN = re.compile(r"(?<=[\w)\]])([_./:,=(\[]+)(?=\w)")


def with_breaks(html: str) -> str:
    """Return a page whose long names have places to break: behind an underscore, a dot, a slash and the like."""
    return _NAME.sub(_breaking, html)


def _breaking(name: re.Match[str]) -> str:
    marked = " long" if "class" in name[1] else ""  # types in the lists of parameters are in italics
    return f"<{name[1]}{marked}{name[2]}" + _BETWEEN.sub(r"\1<wbr>", name[3])


def break_names(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Have the long names of a page break; Sphinx calls it."""
    if "body" in context:
        context["body"] = with_breaks(context["body"])
