import tdio

project = "tdio"
author = "The tdio authors"
copyright = "2026, the tdio authors"
version = release = tdio.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "pydata_sphinx_theme"
html_title = "tdio"
autodoc_typehints = "none"
exclude_patterns = ["_build"]
