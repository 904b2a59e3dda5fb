"""Run the Python blocks of pages in their order, as one of several processes; pages are the arguments."""

import sys
import warnings
from pathlib import Path

from pipeloom.errors import PipeloomWarning
from tests.house.test_docs import blocks


def main() -> None:
    """Run all of them; a warning of Pipeloom's is an error."""
    warnings.simplefilter("error", PipeloomWarning)
    for page in map(Path, sys.argv[1:]):
        namespace: dict[str, object] = {"__name__": "page"}
        for block in blocks("python", [page]):
            exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
        sys.stdout.write(f"ran {page.name}\n")


if __name__ == "__main__":
    main()
