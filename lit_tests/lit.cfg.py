"""Configuration of lit, which tests the code that the compiler emits. No GPU is needed."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import lit.formats

# tools/test_versions.py runs the tests in other environments: --param python=PATH.
python = lit_config.params.get("python", sys.executable)
checkout = Path(__file__).resolve().parent.parent
scripts = Path(sys.executable).parent
numbers_of = runpy.run_path(str(checkout / "builtins" / "versions.py"))["numbers_of"]

# Older releases of TileLang have limits, which docs/guides/versions.md lists. There, lines such as
# "# SINCE_0_1_13: CHECK: ..." are comments, and tests with "# REQUIRES: since-0.1.13" do not run. The
# same holds for "# LINE: CHECK-NEXT: --> file:2" and "# REQUIRES: spans" under 0.1.12, which records
# no source lines.
release = subprocess.run(
    [python, "-c", "from importlib.metadata import version; print(version('tilelang'))"],
    capture_output=True,
    text=True,
    check=True,
).stdout.strip()
ignored = []
for since in ("0.1.13", "0.1.14", "0.1.15"):
    if numbers_of(release) >= numbers_of(since):
        config.available_features.add(f"since-{since}")
    else:
        ignored.append(f"SINCE_{since.replace('.', '_')}")
if "SINCE_0_1_13" in ignored:
    ignored.append("LINE")
else:
    config.available_features.add("spans")
prefixes = f" --comment-prefixes {','.join(['RUN', 'COM', *ignored])}" if ignored else ""

config.name = "TileWeave"
config.test_format = lit.formats.ShTest(execute_external=False)
config.suffixes = [".py"]
config.excludes = ["lit.cfg.py"]
config.test_source_root = str(checkout / "lit_tests")
config.test_exec_root = str(checkout / "build" / "lit")
config.substitutions += [
    ("%filecheck", f"{scripts / 'filecheck'}{prefixes}"),
]
# A test must not import from its own folder: a file could shadow a standard module.
config.environment["PYTHONSAFEPATH"] = "1"
config.environment["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(checkout), os.environ.get("PYTHONPATH")])
)
# NumPy would start threads when it is imported, and a process with threads is not forked.
config.environment["OMP_NUM_THREADS"] = "1"
for name in ("HOME", "CUDA_HOME", "TILELANG_CACHE_DIR", "TMPDIR"):
    if name in os.environ:
        config.environment[name] = os.environ[name]

# Tests run in forks of a process that imports TileWeave once, in their environment.
warm_python = runpy.run_path(str(checkout / "tools" / "warm_python.py"))
config.substitutions.append(("%python", " ".join(warm_python["start"](python, config.environment))))
