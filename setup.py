"""The README as an index page shows it: there, links to files of the repository lead nowhere, so their text stays.

Everything else is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
RELATIVE_LINK = r"\[([^\]]+)\]\((?!https?://|#)[^)]+\)"

setup(long_description=re.sub(RELATIVE_LINK, r"`\1`", README), long_description_content_type="text/markdown")
