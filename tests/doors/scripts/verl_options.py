"""Names of the options of verl's trainers, from the configuration files that they load."""

import re
from pathlib import Path

import verl
from job import finish

FILES = (Path(verl.__file__).parent / "trainer" / "config").rglob("*.yaml")
keys = {key for file in FILES for key in re.findall(r"^[ #]*([a-z]\w*):", file.read_text(), re.M)}
finish(sorted(keys))
