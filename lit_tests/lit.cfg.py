"""Configuration of lit, which tests the code that the compiler emits. No GPU is needed."""

import os
import subprocess
import sys
from pathlib import Path

import lit.formats

# tools/test_versions.py runs the tests in other environments: --param python=PATH.
python = lit_config.params.get("python", sys.executable)
checkout = Path(__file__).resolve().parent.parent
scripts = Path(sys.executable).parent

# TileLang 0.1.12 records no source lines, and has limits that docs/guides/versions.md lists. There,
# lines such as "# LINE: CHECK-NEXT: --> file:2" and "# SINCE_0_1_13: CHECK: ..." are comments, and
# tests with "# REQUIRES: spans" or "# REQUIRES: since-0.1.13" do not run.
release = subprocess.run(
    [python, "-c", "from importlib.metadata import version; print(version('tilelang'))"],
    capture_output=True,
    text=True,
    check=True,
).stdout
is_oldest = release.strip() == "0.1.12"
if not is_oldest:
    config.available_features.update({"spans", "since-0.1.13"})
ignored = " --comment-prefixes RUN,COM,LINE,SINCE_0_1_13" if is_oldest else ""

config.name = "TileWeave"
config.test_format = lit.formats.ShTest(execute_external=False)
config.suffixes = [".py"]
config.excludes = ["lit.cfg.py"]
config.test_source_root = str(checkout / "lit_tests")
config.test_exec_root = str(checkout / "build" / "lit")
config.substitutions += [
    ("%python", python),
    ("%filecheck", f"{scripts / 'filecheck'}{ignored}"),
]
# A test must not import from its own folder: a file could shadow a standard module.
config.environment["PYTHONSAFEPATH"] = "1"
config.environment["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(checkout), os.environ.get("PYTHONPATH")])
)
for name in ("HOME", "CUDA_HOME", "TILELANG_CACHE_DIR", "TMPDIR"):
    if name in os.environ:
        config.environment[name] = os.environ[name]
