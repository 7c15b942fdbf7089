"""Output files are checked before the work whose results they hold."""

import pytest

from tileweave import TileWeaveError
from tileweave.runtime.host.out_file import out_file, write_out


def test_a_new_file_and_an_old_one(tmp_path):
    old = tmp_path / "old.json"
    old.write_text("{}")
    assert out_file("bench: --json", str(old)) == old
    assert out_file("bench: --json", tmp_path / "new.json") == tmp_path / "new.json"


def test_what_the_system_refuses(tmp_path):
    expected = "expected a file that can be written"
    with pytest.raises(TileWeaveError, match=f"bench: --json .*: File name too long; {expected}"):
        out_file("bench: --json", tmp_path / ("a" * 300))
    with pytest.raises(TileWeaveError, match=f"/dev/full: No space left on device; {expected}"):
        write_out("bench: --json", "/dev/full", "text")


@pytest.mark.parametrize("name", [".", "none/a.json"])
def test_a_folder_and_a_file_in_none(tmp_path, name):
    with pytest.raises(TileWeaveError, match=r"explain: --html .*; expected a name in a folder"):
        out_file("explain: --html", tmp_path / name)
