"""Sphinx: `make docs` builds these pages into docs/_build/html, without a network."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import refattn  # noqa: E402

project = "refattn"
author = "The refattn developers"
copyright = author
version = release = refattn.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
    "docs.extension",
]
exclude_patterns = ["_build", "tutorials"]  # the latter come to learn/

sphinx_gallery_conf = {
    "examples_dirs": "tutorials",
    "gallery_dirs": "learn",
    "filename_pattern": r"/\d_",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "image_scrapers": (),
    "reset_modules": (),
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,
}

myst_heading_anchors = 3
default_role = "code"  # `name` in a docstring is code
smartquotes = False  # x' in a formula is x prime

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_type_aliases = {"Array": "Array", "Namespace": "Namespace"}
python_use_unqualified_type_names = True
napoleon_google_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False

html_theme = "furo"  # its styles, scripts and icons are files of the package
html_title = f"refattn {release}"
html_static_path = ["static"]
html_css_files = ["equations.css"]
html_copy_source = False
html_show_sourcelink = False
