"""What the pages about processes show is true of processes; `test_docs` runs the same blocks in one."""

from pathlib import Path

import pytest

from tests.house.test_docs import blocks
from tests.processes.launch import torchrun

ROOT = Path(__file__).parents[2]
PAGES = ("processes.md", "when-a-run-dies.md", "limits.md", "migration.md")


def test_python_blocks_run_in_four_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    pages = [str(ROOT / "docs" / page) for page in PAGES]
    found = torchrun(4, tmp_path, [str(ROOT / "tests/house/run_page.py"), *pages])
    assert found.code == 0, "\n".join(found.outputs)
    for output in found.outputs:
        assert [line for line in output.splitlines() if line.startswith("ran ")] == [f"ran {page}" for page in PAGES]


def test_the_first_lines_of_the_readme_run_in_four_processes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(next(blocks("python", [ROOT / "README.md"])).text, "utf-8")
    found = torchrun(4, tmp_path, [str(script)])
    assert found.code == 0, "\n".join(found.outputs)
    assert found.outputs == [""] * 4
