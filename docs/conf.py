"""The site that `make docs` builds of these pages: Sphinx, strictly, without a network."""

from pathlib import Path

from torch_mesh.version import __version__

project = "torch_mesh"
author = "the authors of torch_mesh"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3  # as the pages link to each other's headings
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"torch_mesh {__version__}"
html_search_scorer = str(Path(__file__).parent / "search_order.js")
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
