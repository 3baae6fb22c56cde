"""The config reference of the site: a definition list, with an anchor per key that search and links find.

docs/reference/config.md holds the same keys as plain lists for code hosts, between two markers. Here they are replaced
by a directive per key: the key, its type and default in small text, then its meaning.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.directives import ObjectDescription
from sphinx.transforms import SphinxTransform
from sphinx.util.typing import OptionSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import config_doc

PAGE = "reference/config"
_WORD = re.compile(r"(`[^`]*`)|(?<![\w.$/`])((?:[a-z]\w*\.)*[a-z]+_\w+)(?![\w/`(]|\.\w)")


class ConfigKey(ObjectDescription[str]):
    """`{config-key} NAME`, with all places of the key as anchors."""

    option_spec: ClassVar[OptionSpec] = {
        "anchors": directives.unchanged_required,
        "facts": directives.unchanged_required,
    }

    def handle_signature(self, sig: str, signode: addnodes.desc_signature) -> str:
        signode += addnodes.desc_name(sig, sig)
        facts, _ = self.parse_inline(self.options["facts"], lineno=self.lineno)
        signode += nodes.inline("", "", *facts, classes=["key-facts"])
        return sig

    def add_target_and_index(self, _name: str, _sig: str, signode: addnodes.desc_signature) -> None:
        signode["ids"] += self.options["anchors"].split()
        self.state.document.note_explicit_target(signode)
        # one search result per key; its other places are on the same line
        first = signode["ids"][0]
        self.env.domains.standard_domain.note_object(self.objtype, first, first, location=signode)


class KeyAnchors(SphinxTransform):
    """Let `[text](config.md#KEY)` link to a key as MyST lets it link to a heading."""

    default_priority = 870  # before MyST resolves links within the page

    def apply(self, **_arguments: object) -> None:
        slugs = self.env.metadata[self.env.docname].get("myst_slugs", {})
        for description in self.document.findall(addnodes.desc):
            if description["objtype"] == "config-key":
                for signature in description.findall(addnodes.desc_signature):
                    slugs.update({anchor: (description.line, anchor, anchor) for anchor in signature["ids"]})


def render() -> str:
    """Write all chapters in MyST."""
    chapters = config_doc.chapters()
    names = [key.name for chapter in chapters for key in chapter.keys]
    by_name = {key.name: key.anchors[0] for each in chapters for key in each.keys if names.count(key.name) == 1}
    lines = []
    for chapter in chapters:
        own = {key.name: key.anchors[0] for key in chapter.keys}
        paths = {anchor: anchor for each in chapters for key in each.keys for anchor in key.anchors}
        known = {**by_name, **own, **{path: path for path in paths if "." in path}}
        lines += [f"## {chapter.title}", "", chapter.place, ""]
        for key in chapter.keys:
            facts = key.facts.replace(", default ", " · default ")
            lines += [f"````{{config-key}} {key.name}", f":anchors: {' '.join(key.anchors)}", f":facts: {facts}", ""]
            lines += [_link_keys(key.meaning, known, key.name), "````", ""]
    return "\n".join(lines)


def _link_keys(text: str, known: dict[str, str], own: str) -> str:
    """Turn the names of other keys in a meaning into links; Markdown for the rest."""

    def link(match: re.Match[str]) -> str:
        name = match[0].strip("`")
        if name not in known or name == own:
            return match[0]
        return f"[`{name}`](#{known[name]})"

    return _WORD.sub(link, text)


def _fill_in(_app: Sphinx, docname: str, source: list[str]) -> None:
    if docname == PAGE:
        source[0] = config_doc.with_tables(source[0], render())


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_object_type("config-key", "config-key", objname="config key")
    app.add_directive_to_domain("std", "config-key", ConfigKey, override=True)
    app.add_transform(KeyAnchors)
    app.connect("source-read", _fill_in)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
