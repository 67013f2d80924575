"""The child process of conftest.run_forked."""

import os
import runpy
import sys
from pathlib import Path


def run(script: Path, arguments: list[str], variables: dict[str, str], cwd: Path, stdout: Path, stderr: Path) -> None:
    """Become a rank: the script runs as `python script arguments` would run it, in a session of its own."""
    os.setsid()
    for descriptor, path in ((1, stdout), (2, stderr)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(cwd)
    os.environ.update(variables)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
