"""Say what this machine lacks before anything is installed: one line for each missing piece, with the command for it.

    python3 requirements/check_system.py --device cpu --venv .venv

Exit code 0 and one line when nothing is missing, 2 otherwise. `make install` runs it first. It needs no package, and it
runs on Python 2.7 and every Python 3, so that "needs Python 3.11 or newer" can be said by the Python that is too old.
"""

from __future__ import print_function

import argparse
import os
import platform
import subprocess
import sys
import tempfile

try:
    import ctypes
except ImportError:  # a Python built without libffi: check_python says so
    ctypes = None

OLDEST, NEWEST = (3, 11), (3, 13)
PYTHONS = {"rocm": ((3, 12), (3, 12)), "npu": ((3, 11), (3, 12))}
"""Where a device's wheels exist for fewer Pythons (oldest, newest)."""

GLIBC = {"cpu": (2, 28), "cuda": (2, 28), "rocm": (2, 39), "npu": (2, 34)}
"""Oldest C library that the engine's wheels run on."""

DISK_GB = {"cpu": 9, "cuda": 20, "rocm": 30, "npu": 20}
"""Free space for the environment; for cpu the larger case, the registry's CUDA build of torch."""

SCRATCH_GB = 3
"""Free space where pip unpacks what it downloads."""

CUDA_DRIVER = 580
"""Oldest NVIDIA driver for CUDA 13, which torch 2.13 is built with."""

MANAGERS = ("apt-get", "dnf", "yum", "zypper", "pacman")
INSTALL = {"apt-get": "apt-get update && apt-get install", "pacman": "pacman -S"}  # the others: <name> install
PACKAGES = {
    # What is missing -> the package that has it, for each of MANAGERS.
    "python": ("python3.11 python3.11-venv", "python3.11", "python3.11", "python311", "python"),
    "libnuma.so.1": ("libnuma1", "numactl-libs", "numactl-libs", "libnuma1", "numactl"),
    "libstdc++.so.6": ("libstdc++6", "libstdc++", "libstdc++", "libstdc++6", "gcc-libs"),
}


def which(program):
    """The full path of a program on the PATH, or None (shutil.which came with Python 3.3)."""
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        path = os.path.join(folder, program)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def output_of(*command):
    """What a command prints, stripped; None when it cannot be run or fails."""
    try:
        with open(os.devnull, "wb") as nowhere:
            return subprocess.check_output(command, stderr=nowhere).decode("utf-8", "replace").strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def install_command(packages):
    """The command that installs a package here, from its names for each of MANAGERS."""
    found = [index for index, manager in enumerate(MANAGERS) if which(manager)]
    index = found[0] if found else 0
    command = "%s %s" % (INSTALL.get(MANAGERS[index], MANAGERS[index] + " install"), packages[index])
    if os.geteuid() != 0:
        command = "sudo " + command.replace("&& ", "&& sudo ")
    return "`%s`" % command if found else "the system's package manager (on Debian and Ubuntu: `%s`)" % command


def imports(module):
    try:
        __import__(module)
        return True
    except ImportError:
        return False


def loads(library):
    """Whether the dynamic linker finds a shared library."""
    try:
        ctypes.CDLL(library)
        return True
    except OSError:
        return False


def glibc_version():
    """(major, minor) of the GNU C library, or None where there is another one (Alpine's musl)."""
    try:
        version = ctypes.CDLL(None).gnu_get_libc_version
    except AttributeError:
        return None
    version.restype = ctypes.c_char_p
    return tuple(int(part) for part in version().decode().split(".")[:2])


def free_gb(folder):
    """Free space for this user, in GB, of the file system that holds `folder` (or its nearest parent that exists)."""
    folder = os.path.abspath(folder)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize / 1e9


def has_avx2():
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            return " avx2 " in cpuinfo.read().replace("\n", " ")
    except IOError:
        return True  # unknown: let the engine say


def driver_version():
    """Major version of the NVIDIA driver, or None where there is none (a login node, an image being built)."""
    version = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        return int(version.split(".")[0]) if version else None
    except ValueError:
        return None


def check_platform():
    machine = platform.machine().lower()
    if not sys.platform.startswith("linux"):
        yield "SoloRL needs Linux and this is %s: use a Linux machine, a container, or WSL 2 on Windows" % sys.platform
    elif machine not in ("x86_64", "amd64", "aarch64", "arm64"):
        yield "the packages exist for x86-64 and aarch64, and this processor is %s" % machine


def check_python(device):
    oldest, newest = PYTHONS.get(device, (OLDEST, NEWEST))
    here = tuple(sys.version_info[:2])
    if here < oldest or here > newest:
        others = ["python3.%d" % minor for minor in range(oldest[1], newest[1] + 1)]
        # A name on the PATH may be a stub of a version manager, so it has to start.
        found = [name for name in others if output_of(name, "-c", "import venv, ensurepip") is not None]
        if found:
            cure = "name %s one: `make PYTHON=%s install`" % ("a newer" if here < oldest else "an older", found[-1])
        elif oldest == OLDEST:
            cure = "install it with %s, then `make PYTHON=python3.11 install`" % install_command(PACKAGES["python"])
        else:
            cure = "install Python 3.12 and name it: `make PYTHON=python3.12 install`"
        if newest == oldest:
            wanted = "Python %d.%d" % oldest
        elif here > newest or device in PYTHONS:
            wanted = "Python %d.%d to %d.%d" % (oldest + newest)
        else:
            wanted = "Python %d.%d or newer" % oldest
        yield "%s is needed and %s is %s: %s" % (wanted, sys.executable, platform.python_version(), cure)
        return  # what else this Python lacks does not matter
    if not (imports("venv") and imports("ensurepip")):
        packages = ("python%d.%d-venv" % here,) + ("python%d.%d" % here,) * (len(MANAGERS) - 1)
        cure = install_command(packages)
        yield "%s cannot make virtual environments (no ensurepip): install it with %s" % (sys.executable, cure)
    for module, library in (("ssl", "OpenSSL"), ("ctypes", "libffi"), ("zlib", "zlib")):
        if not imports(module):
            yield "%s was built without %s: use the system's Python or rebuild it" % (sys.executable, library)


def check_libraries(device):
    if ctypes is None:
        return
    libc = glibc_version()
    if libc is None or libc < GLIBC[device]:
        have = "this system has another C library" if libc is None else "this system has %d.%d" % libc
        needed = "%d.%d" % GLIBC[device]
        yield "the packages need glibc %s and %s: use a newer distribution or a container" % (needed, have)
    for library in ("libstdc++.so.6", "libnuma.so.1") if device == "cpu" else ("libstdc++.so.6",):
        if not loads(library):
            yield "%s is not found: install it with %s" % (library, install_command(PACKAGES[library]))
    if device == "cpu" and platform.machine().lower() in ("x86_64", "amd64") and not has_avx2():
        yield "the CPU engine needs a processor with AVX2 and this one has none: use a newer machine"


def check_driver(device):
    if device == "cuda":
        driver = driver_version()
        if driver is not None and driver < CUDA_DRIVER:
            have = "CUDA 13 needs NVIDIA driver %d or newer and this is %d" % (CUDA_DRIVER, driver)
            yield have + ": update the driver, or use `make DEVICE=cpu install`"
    if device == "npu" and not (os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")):
        yield "CANN is not set up: run `source /usr/local/Ascend/ascend-toolkit/set_env.sh` (see docs/devices.md)"


def check_disk(device, venv):
    if os.path.isdir(os.path.join(venv, "bin")):
        return  # installed before: what is still to come is small
    for folder, needed in ((venv, DISK_GB[device]), (tempfile.gettempdir(), SCRATCH_GB)):
        free = free_gb(folder)
        if free < needed:
            cure = "free some, or name another place: `make VENV=/elsewhere/venv install`"
            if folder != venv:
                cure = "free some, or name another place: `TMPDIR=/elsewhere make install`"
            yield "%s has %.1f GB free and %d GB are needed: %s" % (os.path.abspath(folder), free, needed, cure)


def missing(device, venv):
    """All that is missing, as lines of text."""
    lines = list(check_platform())
    if not lines:
        lines += check_python(device)
        lines += check_libraries(device)
        lines += check_driver(device)
        lines += check_disk(device, venv)
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", required=True, choices=sorted(GLIBC))
    parser.add_argument("--venv", default=".venv", help="where the virtual environment will be")
    args = parser.parse_args()
    lines = missing(args.device, args.venv)
    for line in lines:
        print("Missing: " + line, file=sys.stderr)
    if lines:
        sys.exit(2)
    facts = (platform.python_version(), args.device, free_gb(args.venv))
    print("System check passed: Python %s, device %s, %.0f GB free" % facts)


if __name__ == "__main__":
    main()
