"""What is written for md5sum is read by the real one."""

import hashlib
import shutil
import subprocess

import pytest

from elastic_adapter.core.checkpoint.manifest import MD5_SUMS, md5_lines


@pytest.mark.skipif(shutil.which("md5sum") is None, reason="there is no md5sum")
def test_md5sum_checks_what_was_written(tmp_path):
    """All files are found and pass, whatever they are called; one that changed fails."""
    names = ("model.pt", "a b.pt", " leads.pt", "*star.pt", "-x", "d\u00e9j\u00e0.pt", "step-1/optimizer.pt")
    (tmp_path / "step-1").mkdir()
    for name in names:
        (tmp_path / name).write_bytes(name.encode() * 1000)
    sums = md5_lines({name: hashlib.md5((tmp_path / name).read_bytes()).hexdigest() for name in names})
    (tmp_path / MD5_SUMS).write_text(sums, encoding="utf-8")

    def check():
        argv = ["md5sum", "--check", "--strict", MD5_SUMS]
        return subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)

    good = check()
    assert good.returncode == 0, good.stderr
    assert good.stdout.count(": OK\n") == len(names)
    (tmp_path / names[0]).write_bytes(b"changed")
    bad = check()
    assert bad.returncode == 1
    assert bad.stdout.count(": FAILED\n") == 1
