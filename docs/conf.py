"""Sphinx configuration of the documentation; `scripts/docs` builds it. No page requests anything from another host."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from pygments.lexers.data import JsonLexer
from sphinx.highlighting import lexers

import thresher

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "extensions"))
REPOSITORY = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"].get("urls", {}).get("Repository")

lexers["jsonl"] = JsonLexer()  # Pygments has no name for JSON lines

project = "thresher"
version = release = thresher.__version__
language = "en"
smartquotes = False  # it would turn the dashes of `--option` in plain text into one
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "config_reference",
    "figures",
    "links",
    "llms_txt",
    "mathml",
    "reference_pages",
    "search_terms",
]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4  # as on a code host: every heading can be linked to

autodoc_default_options = {"members": True, "member-order": "bysource"}
napoleon_numpy_docstring = False
autoclass_content = "both"  # arguments may be described at the class or at its constructor
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False
toc_object_entries_show_parents = "hide"
# types of other packages and of modules that are not part of the public API have no page to link to
nitpick_ignore_regex = [("py:.*", ".*")]

html_theme = "pydata_sphinx_theme"
html_title = "thresher"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_search_scorer = str(DOCS / "extensions" / "search_scorer.js")  # Sphinx reads it from the working directory
html_favicon = "_static/favicon.svg"
html_math_renderer = "mathml"
html_sidebars = {"index": []}
html_show_sourcelink = False
html_use_index = False
html_domain_indices = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "logo": {"text": f"thresher {version}"},
    "navbar_align": "left",
    "navbar_end": ["theme-switcher", "navbar-icon-links"],
    "icon_links": [{"name": "Source code", "url": REPOSITORY, "icon": "fa-brands fa-github"}] if REPOSITORY else [],
    "header_links_before_dropdown": 7,
    "primary_sidebar_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "article_footer_items": [],
    "footer_start": ["copyright"],
    "footer_center": [],
    "footer_end": [],
    "show_toc_level": 2,
    "navigation_depth": 3,
    "search_bar_text": "Search",
    "pygments_light_style": "github-light-high-contrast",
    "pygments_dark_style": "github-dark",
}
project_copyright = "the thresher authors, Apache License 2.0"
