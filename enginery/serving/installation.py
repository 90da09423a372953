"""Triton's server for a machine without NVIDIA's images: the one that the wheel of PyTriton carries."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from components.common.contracts.errors import UserError

HOME_VARIABLE = "ENGINERY_TRITON"
PINS = Path(__file__).with_name("triton.txt")
_STUB = "triton_python_backend_stub"
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_TAKEN = ("3.11", "3.12")  # what both wheels are there for
_PACKAGES_VARIABLE = "ENGINERY_PACKAGES"
# In the site-packages of the server's environment: behind its own NumPy come the packages of ours. Nothing is to be
# added to a checked repository, and the Python that the backend embeds doesn't read PYTHONDONTWRITEBYTECODE.
_LAYER = (
    f"import os, site; list(map(site.addsitedir, filter(None, os.getenv('{_PACKAGES_VARIABLE}', '').split(':'))))\n"
    "import sys; sys.dont_write_bytecode = True\n"
)


@dataclass(frozen=True, kw_only=True)
class Triton:
    """An installed server, in a virtual environment that also holds the NumPy of its Python backend."""

    folder: Path

    @property
    def packages(self) -> Path:
        """The packages that pip installed."""
        return self.folder / f"lib/python{_PYTHON}/site-packages"

    @property
    def binary(self) -> Path:
        """The executable."""
        return self.packages / "pytriton/tritonserver/bin/tritonserver"

    @property
    def backends(self) -> Path:
        """The Python backend alone."""
        return self.packages / "pytriton/tritonserver/backends"

    def environment(self, code: Path) -> dict[str, str]:
        """Environment variables under which its Python backend finds its own NumPy, and all else as this process does.

        Args:
            code: folder that holds the package `components`.
        """
        found = dict(os.environ)

        def first(name: str, *paths: Path) -> None:
            found[name] = os.pathsep.join([*map(str, paths), *filter(None, [found.get(name)])])

        # The backend embeds Python, which finds its packages by the first python3 on the path.
        first("PATH", self.folder / "bin")
        first("LD_LIBRARY_PATH", _library_folder())
        first("PYTHONPATH", code)
        found[_PACKAGES_VARIABLE] = os.pathsep.join({sysconfig.get_path(name) for name in ("purelib", "platlib")})
        found.pop("PYTHONHOME", None)
        return found


def triton_folder() -> Path:
    """Its folder: $ENGINERY_TRITON, or in this Python's own environment. A folder for each version."""
    root = os.environ.get(HOME_VARIABLE)
    pinned = next(line.split()[0] for line in PINS.read_text(encoding="ascii").splitlines() if line.startswith("nvi"))
    base = Path(root).expanduser().absolute() if root else Path(sys.prefix) / "triton"
    return base / f"{pinned.replace('==', '-')}-python{_PYTHON}"


def find_triton() -> Triton | None:
    """The installed server; None where there is none yet."""
    found = Triton(folder=triton_folder())
    return found if found.binary.is_file() else None


def install_triton(say: Callable[[str], None]) -> Triton:
    """The server, installed now where it is not there yet: by pip, without dependencies, pinned by digest.

    Raises:
        UserError: it can't be installed, or this Python can't be embedded.
    """
    if _PYTHON not in _TAKEN:
        raise UserError(
            f"Triton's Python backend is there for Python {' and '.join(_TAKEN)}, and this is {_PYTHON}; install "
            "enginery with one of these, or serve an exported repository with the image `serve`",
            code="unsupported-python",
        )
    _library_folder()
    if found := find_triton():
        return found
    folder = triton_folder()
    say(f"installing Triton's server into {folder} (once; 75 MB to download, 220 MB on disk)")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        _fill(Triton(folder=temporary))
        try:
            temporary.rename(folder)
        except OSError:
            if find_triton() is None:  # else another process was faster
                raise
    except OSError as error:
        raise UserError(
            f"can't install Triton's server into {folder}: {error.strerror}; name a folder that you may write in "
            f"{HOME_VARIABLE}",
            code="not-writable",
            setting="ENGINERY_TRITON",
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Triton(folder=folder)


def _fill(triton: Triton) -> None:
    _call([sys.executable, "-m", "venv", "--without-pip", str(triton.folder)], "Python could not make its environment")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--no-compile", "--require-hashes", "--only-binary", ":all:"]
    _call(
        [*command, "--target", str(triton.packages), "--requirement", str(PINS)],
        "pip could not install it",
        "It needs a package index (PyPI), and Linux on x86-64 or aarch64 with glibc 2.35 or newer; it is fetched only "
        f"once. Without an index, copy {triton_folder()} from such a machine, or serve an exported repository with "
        "the image `serve`",
    )
    (triton.packages / "enginery.pth").write_text(_LAYER, encoding="ascii")
    stub = triton.packages / f"pytriton/tritonserver/python_backend_stubs/{_PYTHON}/{_STUB}"
    own = triton.backends / "python" / _STUB
    shutil.copy(stub, own)
    for program in (triton.binary, own):
        program.chmod(0o755)


def _call(command: list[str], failed: str, fix: str = "") -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.startswith("ERROR")]
        reason = (lines or done.stderr.splitlines() or ["no reason given"])[-1].removeprefix("ERROR: ")
        raise UserError(f"Triton's server is not installed: {failed} ({reason}). {fix}".rstrip(), code="install-failed")


def _library_folder() -> Path:
    """Return the folder of libpython, which the Python backend embeds.

    Raises:
        UserError: there is none.
    """
    name = f"libpython{_PYTHON}.so.1.0"
    multiarch = sysconfig.get_config_var("MULTIARCH")
    folders = [sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib", multiarch and f"/usr/lib/{multiarch}"]
    for folder in map(Path, filter(None, folders)):
        if (folder / name).is_file():
            return folder
    raise UserError(
        f"this Python ({sys.executable}) has no shared library {name}, which Triton's Python backend needs. On Debian "
        f"and Ubuntu: sudo apt-get install libpython{_PYTHON}; a Python of pyenv: install it again with "
        "PYTHON_CONFIGURE_OPTS=--enable-shared",
        code="no-libpython",
    )
