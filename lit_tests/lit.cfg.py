"""Configuration of lit, which tests the code that the compiler emits. No GPU is needed."""

import os
import sys
from pathlib import Path

import lit.formats

checkout = Path(__file__).resolve().parent.parent
scripts = Path(sys.executable).parent

config.name = "TileWeave"
config.test_format = lit.formats.ShTest(execute_external=False)
config.suffixes = [".py"]
config.excludes = ["lit.cfg.py"]
config.test_source_root = str(checkout / "lit_tests")
config.test_exec_root = str(checkout / "build" / "lit")
config.substitutions += [
    ("%python", sys.executable),
    ("%filecheck", str(scripts / "filecheck")),
]
# A test must not import from its own folder: a file could shadow a standard module.
config.environment["PYTHONSAFEPATH"] = "1"
config.environment["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(checkout), os.environ.get("PYTHONPATH")])
)
for name in ("HOME", "CUDA_HOME", "TILELANG_CACHE_DIR", "TMPDIR"):
    if name in os.environ:
        config.environment[name] = os.environ[name]
